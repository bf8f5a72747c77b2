"""Rows of messages: native and GPU kernels have the bits of plain torch, and what is lost is within half a
step.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from memtune import _native
from memtune.parallel.collectives import quantization
from memtune.parallel.collectives.message_layout import LEVELS, Bits, Form, Row

TYPES = (torch.float32, torch.bfloat16)
ISAS = ("base", "avx2", "avx512")


def values(n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of many sizes, with zeros, a block that is zero in float32 arithmetic, and one that is not finite."""
    torch.manual_seed(seed)
    x = torch.randn(n) * torch.logspace(-4, 4, n)
    x[: n // 8] *= 1e-37
    x[n // 2] = 0.0
    x[-1] = torch.inf
    return x.to(dtype)


def packed(
    row: Row, x: Tensor, nodes: int = 1, error: Tensor | None = None, how: Any = quantization.quantise_
) -> Tensor:
    out = torch.zeros(x.numel() // row.numel * row.n_bytes, dtype=torch.uint8, device=x.device)
    how(out, x, error, list(row.lengths), row.bits, row.block, nodes)
    return out


def unpacked(
    row: Row, data: Tensor, dtype: torch.dtype, sources: int = 1, factor: float = 1.0, how: Any = None
) -> Tensor:
    out = torch.empty(data.numel() // row.n_bytes // sources * row.numel, dtype=dtype, device=data.device)
    (how or quantization.dequantise_)(out, data, list(row.lengths), row.bits, row.block, sources, factor)
    return out


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().nan_to_num(7.0), other.cpu().nan_to_num(7.0))


def runs(isa: str) -> bool:
    """Return True if this machine and this build have the instruction set."""
    x, row = torch.ones(16), Form(8, 16, 0).row([16], [False])
    try:
        _native.quantise(torch.zeros(row.n_bytes, dtype=torch.uint8), x, None, row.lengths, 8, 16, 1, 1, isa)
    except ValueError:
        return False
    return True


ROWS = st.builds(
    lambda bits, half, parts: Form(bits, 2 * half, 0).row([n for n, _ in parts], [k for _, k in parts]),
    st.sampled_from([4, 8]),
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=5),
)


@settings(deadline=None, max_examples=25)
@given(
    row=ROWS,
    nodes=st.integers(1, 3),
    local=st.integers(1, 2),
    dtype=st.sampled_from(TYPES),
    feedback=st.booleans(),
)
def test_native_quantization_is_bitwise_equal_to_reference(
    row: Row, nodes: int, local: int, dtype: torch.dtype, feedback: bool
) -> None:
    x = values(nodes * local * row.numel, dtype)
    before = torch.linspace(-0.1, 0.1, x.numel()) if feedback else None
    errors = [None if before is None else before.clone() for _ in range(4)]
    wanted = packed(row, x, nodes, errors[0], quantization.plain_quantise_)
    for isa, error in zip(ISAS, errors[1:], strict=True):
        if not runs(isa):
            continue
        out = torch.zeros_like(wanted)
        _native.quantise(out, x, error, row.lengths, row.bits, row.block, nodes, 2, isa)
        assert torch.equal(out, wanted)
        assert error is None or same(error, errors[0])  # type: ignore[arg-type]
    sums = unpacked(row, wanted, dtype, sources=nodes, factor=0.3, how=quantization.plain_dequantise_)
    assert same(unpacked(row, wanted, dtype, sources=nodes, factor=0.3), sums)


@settings(deadline=None, max_examples=15)
@given(row=ROWS, seed=st.integers(0, 9))
def test_quantization_error_is_at_most_half_a_step(row: Row, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(row.numel) * 3
    back = unpacked(row, packed(row, x), torch.float32)
    begin = 0
    for index, count in ((i, n) for i, n in enumerate(row.lengths) if n):
        mine, got = x[begin : begin + count], back[begin : begin + count]
        if index % 2:
            assert torch.equal(mine, got)
        for block, wanted in zip(got.split(row.block), mine.split(row.block), strict=True):
            # levels/largest, the product and the sum are rounded: three more roundings of at most the largest
            bound = float(wanted.abs().max()) * (0.5 / LEVELS[row.bits] + 3 * torch.finfo(torch.float32).eps)
            assert (block - wanted).abs().max() <= bound
        begin += count


@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_keeps_nonfinite_and_zeroes_tiny_values(bits: Bits) -> None:
    row = Form(bits, 16, 0).row([64], [False])
    x = torch.ones(64)
    x[3], x[20], x[32:48] = torch.nan, -torch.inf, 1e-37
    back = unpacked(row, packed(row, x), torch.float32)
    assert back[:32].isnan().all()
    assert torch.equal(back[32:], torch.tensor([0.0] * 16 + [1.0] * 16))


def test_quantization_orders_rows_by_rank_then_node() -> None:
    row = Form(8, 16, 10**9).row([2], [True])  # kept: 16 bytes a row
    x = torch.arange(12.0)
    rows = packed(row, x, nodes=2).view(6, 16)[:, :8].contiguous().view(torch.float32)
    assert rows[:, 0].tolist() == [0, 6, 2, 8, 4, 10]


def test_quantization_error_feedback_is_bounded() -> None:
    row = Form(4, 32, 0).row([64], [False])
    torch.manual_seed(1)
    x, error, total = torch.randn(64), torch.zeros(64), torch.zeros(64)
    for _ in range(50):
        total += unpacked(row, packed(row, x, error=error), torch.float32)
    # After n rounds the sum is off by one step, not by n of them.
    assert (total - 50 * x).abs().max() <= 0.51 * 2 * float((x.abs() + error.abs()).max()) / 7
    assert torch.allclose(total + error, 50 * x, atol=1e-4)


def test_float16_uses_reference_quantization() -> None:
    row = Form(8, 16, 0).row([40], [False])
    x = torch.linspace(-1, 1, 40).half()
    assert (unpacked(row, packed(row, x), torch.float16) - x).abs().max() <= 0.5 / 127 + 1e-3


def test_triton_kernels_use_supported_names() -> None:
    """Triton compiles a kernel at its first launch, and takes neither globals nor imports but its own;
    annotations count.
    """
    tree = ast.parse((Path(quantization.__file__).parent / "quantization_triton.py").read_text())
    kernels = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.decorator_list]
    known = {"tl", "triton", "range", "float", *(kernel.name for kernel in kernels)}
    assert len(kernels) == 3
    for kernel in kernels:
        names = [each for each in ast.walk(kernel) if isinstance(each, ast.Name)]
        own = {argument.arg for argument in kernel.args.args} | {
            each.id for each in names if isinstance(each.ctx, ast.Store)
        }
        assert {each.id for each in names} - own <= known


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make test-triton")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_interpreted_triton_kernels_are_bitwise_equal_to_reference(bits: Bits, dtype: torch.dtype) -> None:
    """Triton's interpreter runs the kernels on the CPU."""
    from memtune.parallel.collectives import quantization_triton as kernels

    for block in (2, 48, 256, 2048):
        row = Form(bits, block, 0).row([1000, 7, 3, 5130], [False, True, True, False])
        x = values(4 * row.numel, dtype)
        error, ours = torch.full((x.numel(),), 0.01), torch.full((x.numel(),), 0.01)
        wanted = packed(row, x, 2, error, quantization.plain_quantise_)
        got = torch.zeros_like(wanted)
        kernels.quantise_(got, x, ours, row, 2)
        assert torch.equal(got, wanted)
        assert same(ours, error)
        # The interpreter truncates to bfloat16, where a GPU rounds to the nearest.
        exact = torch.float32 if dtype == torch.bfloat16 else dtype
        sums = torch.empty(got.numel() // row.n_bytes // 2 * row.numel, dtype=exact)
        kernels.dequantise_(sums, got, row, 2, 0.3)
        assert same(sums, unpacked(row, wanted, exact, 2, 0.3, quantization.plain_dequantise_))


@pytest.mark.gpu
def test_triton_kernels_are_bitwise_equal_to_reference(device: str) -> None:
    """On the simulated accelerator the plain ones run on a device."""
    if device == "cpu" or (device == "cuda" and importlib.util.find_spec("triton") is None):
        pytest.skip("an accelerator is needed, and Triton on CUDA")
    for bits in (4, 8):
        for dtype in (*TYPES, torch.float16):
            for block in (2, 48, 256, 2048):
                row = Form(bits, block, 0).row([1000, 7, 3, 5130], [False, True, True, False])
                x = values(4 * row.numel, dtype)
                error, on_gpu = torch.full((x.numel(),), 0.01), torch.full((x.numel(),), 0.01, device=device)
                wanted = packed(row, x, 2, error, quantization.plain_quantise_)
                got = packed(row, x.to(device), 2, on_gpu)
                assert torch.equal(got.cpu(), wanted)
                assert same(on_gpu, error)
                sums = unpacked(row, wanted, dtype, 2, 0.3, quantization.plain_dequantise_)
                assert same(unpacked(row, got, dtype, 2, 0.3), sums)
