"""Layouts of fake outputs are those of the real kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memtune.memory import RealOutputs, WorkspaceTable, kernel_layouts


def _batch_norm(x: Tensor, *, training: bool = True) -> Tensor:
    rows = torch.ones(x.shape[1], requires_grad=True)
    return F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), rows, rows, training)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": _batch_norm,
    "batch_norm_eval": lambda x: _batch_norm(x, training=False),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "log_softmax": lambda x: x.log_softmax(1),
    "log_sigmoid": F.logsigmoid,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "prelu": lambda x: F.prelu(x, torch.ones(x.shape[1])),
    "roll": lambda x: x.roll((1, 5), (1, 2)),
    "logit": lambda x: torch.logit(x.sigmoid(), 0.1),
    "dropout": F.dropout,
    "huber": lambda x: F.huber_loss(x, x.detach() + 1),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach()),
    "mse": lambda x: F.mse_loss(x, x.detach() + 1, reduction="none"),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() + 1),
    "floor_divide": lambda x: x * x.div(torch.tensor(2.0), rounding_mode="floor"),
    "power": lambda x: 2**x,
    "xlogy": lambda x: torch.xlogy(x, x[0].abs() + 1),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "batch_last": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "narrowed": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


def _strides(op: Callable[[Tensor], Tensor], layout: str, shape: tuple[int, ...]) -> list[Any]:
    x = LAYOUTS[layout](torch.ones(shape)).detach().requires_grad_()
    out = op(x)
    found: list[Any] = [_layout(out)]
    for gradient in LAYOUTS if out.dim() else ("contiguous",):
        flows_in = LAYOUTS[gradient](torch.ones(out.shape))
        into = torch.autograd.grad(out, x, flows_in, retain_graph=True)[0]
        found.append(_layout(into))
    return found


def _layout(tensor: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides; that of a single element is never used."""
    return [each for each in zip(tensor.shape, tensor.stride(), strict=True) if each[0] > 1]


@pytest.mark.drawn(35)
@pytest.mark.parametrize("shape", [(3, 40, 70), (8, 5, 12, 12), (2, 1, 6)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_layouts_of_fake_outputs_are_those_of_kernels(op: str, shape: tuple[int, ...]) -> None:
    real = {layout: _strides(OPS[op], layout, shape) for layout in LAYOUTS}
    with FakeTensorMode():
        with RealOutputs(WorkspaceTable()):
            assert {layout: _strides(OPS[op], layout, shape) for layout in LAYOUTS} == real


def test_layouts_of_batch_norm_on_accelerators_stay_those_of_its_input() -> None:
    with FakeTensorMode(), RealOutputs(WorkspaceTable(), on_cpu=False):
        x = torch.ones(2, 5, 8).mT
        assert _batch_norm(x).stride() == x.stride()


def test_with_kernel_layout_keeps_the_fake_layout_where_the_cpu_has_no_kernel():
    with FakeTensorMode():
        left, right = (torch.empty(3, 4, 5, dtype=torch.float8_e4m3fn).transpose(0, 2) for _ in range(2))
        out = left / right
        assert (
            kernel_layouts.with_kernel_layout(torch.ops.aten.div.Tensor, (left, right), {}, out, on_cpu=False)
            is out
        )
