"""Autocast on CPU tensors as CUDA does it: the lists against torch's own registrations, policies by what
comes out.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _dispatch_dump, _dispatch_get_all_op_names

from memtune.autotune.record import accelerator_autocast as ours
from memtune.autotune.record.accelerator_autocast import accelerator_autocast_on_cpu
from memtune.autotune.record.recorder import record
from memtune.workload.workload import Workload

NORMS = {"norm.Scalar", "norm.ScalarOpt_dim"}
BF16, FP32 = torch.bfloat16, torch.float32
BELOW = {
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
}
"""Kernels below what CPU's list names as well."""


def header_lists() -> dict[str, set[str]]:
    """Ops of each policy in the header that torch installs."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = {}
    for policy in ("FP32", "FP32_SET_OPT_DTYPE", "PROMOTE", "LOWER_PRECISION_FP"):
        body = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)*.*)", text)
        assert body
        found[policy] = {re.sub(r",\s*", ".", each) for each in re.findall(r"_\(([^)]+)\)", body[1])}
    return found


def test_cuda_lists_equal_torch_headers() -> None:
    cuda, cpu = (
        {
            name[6:]
            for name in _dispatch_get_all_op_names()
            if name.startswith("aten::") and key in _dispatch_dump(name)
        }
        for key in ("\nAutocastCUDA: ", "\nAutocastCPU: ")
    )
    mine = {*ours.FLOAT32, *ours.FLOAT32_RESULT, *ours.WIDEST, *ours.NARROW, *NORMS}
    assert cuda - cpu - mine <= BELOW
    assert mine <= cuda - cpu
    assert set(ours.NOT_CAST) <= cpu - cuda
    lists = header_lists()
    assert set(ours.FLOAT32) <= lists["FP32"]
    assert set(ours.FLOAT32_RESULT) <= lists["FP32_SET_OPT_DTYPE"]
    assert set(ours.WIDEST) <= lists["PROMOTE"]
    assert set(ours.NARROW) <= lists["LOWER_PRECISION_FP"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_accelerator_autocast_on_cpu_returns_dtypes_of_cuda_policy(device: str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    target = torch.zeros(4, dtype=torch.long)
    with accelerator_autocast_on_cpu("cuda"), torch.autocast(device, BF16):
        h = x @ x
        kinds = {
            "softmax": h.softmax(-1),
            "norm": F.layer_norm(h, (4,)),
            "rms": F.rms_norm(h, (4,)),
            "sum": h.sum(0),
            "power": h**2,
            "vector norm": h.norm(dim=1),
            "loss": F.cross_entropy(h, target),
            "promoted": torch.addcmul(x, h, h),
        }
        narrow = {
            "product": h,
            "cat": torch.cat([h, h]),
            "asked": h.softmax(-1, dtype=BF16),
            "einsum": torch.einsum("ij,jk", x, x),
            "pad": F.pad(h[None], (1, 1, 1, 1), mode="reflect"),
            "all narrow": torch.addcmul(h, h, h),
        }
        double = x.double().softmax(-1)
    assert {name: each.dtype for name, each in kinds.items()} == dict.fromkeys(kinds, FP32)
    assert {name: each.dtype for name, each in narrow.items()} == dict.fromkeys(narrow, BF16)
    assert double.dtype == torch.float64
    kinds["norm"].sum().backward()
    assert x.grad is not None
    with torch.autocast("cpu", BF16):  # CPU's own again
        assert (x @ x).softmax(-1).dtype == BF16


class Doubled(torch.autograd.Function):
    """Casts as torch's own decorators say, in backward by what was on in forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradient @ x.t()).float() + (x.t() @ gradient).float()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_queries_report_emulated_state(device: str) -> None:
    def autocast_state() -> list[Any]:
        return [
            torch.is_autocast_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        ]

    x = torch.randn(4, 4, requires_grad=True)
    before = autocast_state()
    with accelerator_autocast_on_cpu("cuda"):
        assert autocast_state() == [False, False, torch.get_autocast_dtype("cuda")]
        with torch.autocast(device, BF16):
            assert autocast_state() == [True, True, BF16]
            assert torch.get_autocast_gpu_dtype() == BF16
            with torch.autocast("cuda", enabled=False):
                assert autocast_state()[:2] == [False, False]
            y = Doubled.apply(x)
        assert y.dtype == BF16
        y.sum().backward()
        assert not torch.is_autocast_enabled()
    assert autocast_state() == before == [False, False, torch.float16]


MODEL = """
import torch
from torch import nn
casts = torch.autocast("cuda", torch.bfloat16)
def model(): return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
def batch(size): return torch.randn(size, 8)
def loss(model, x):
    with {casts}:
        return model(x).softmax(-1).square().sum()
"""


@pytest.mark.parametrize(
    "casts",
    ["casts", "torch.autocast('cuda', torch.bfloat16)", "torch.autocast(x.device.type, torch.bfloat16)"],
)
def test_recording_for_cuda_has_casts_of_cuda(tmp_path: Path, casts: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(casts=casts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is no CUDA here
        step = record(Workload.load(path), target="cuda").step
    saved = sorted(step.storages.bytes[step.saves.storage].tolist())
    # In 16 bits: the batch, the second weight and the hidden layer; softmax's output, of what came out in 16
    # bits, in 32.
    assert saved == sorted([2 * 2 * 8, 2 * 16 * 4, 2 * 2 * 16, 4 * 2 * 4, 4 * 2 * 4])
