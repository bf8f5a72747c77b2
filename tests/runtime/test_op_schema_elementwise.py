"""Elementwise ops are bitwise equal in parts, wherever a part begins; other layouts are excluded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memtune.program.op_schedule import parts_of
from memtune.program.step import ON_GPU_ONLY
from memtune.runtime.op_schema import BY_ELEMENT, BY_ELEMENT_ON_GPU, element_bytes, part_of

MORE: dict[str, tuple[Any, ...]] = {
    "clamp": (-0.5, 0.7),
    "clamp_max": (0.3,),
    "clamp_min": (0.1,),
    "div.Scalar": (3.0,),
    "mul.Scalar": (0.1,),
    "hardtanh_backward": (-1.0, 1.0),
    "leaky_relu": (0.1,),
    "leaky_relu_backward": (0.1, False),
    "threshold_backward": (0.0,),
    "masked_fill.Scalar": (0.5,),
    "native_dropout_backward": (1.25,),
    "pow.Tensor_Scalar": (3.0,),
    "elu_backward": (1.0, 1.0, 1.0, False),
    "softplus_backward": (1.0, 20.0),
    **{f"{name}.Scalar": (0.0,) for name in ("eq", "ge", "gt", "le", "lt", "ne")},
}
"""Arguments after the tensors."""
TENSORS = {
    "add": 2,
    "sub": 2,
    "mul.Tensor": 2,
    "div.Tensor": 2,
    "maximum": 2,
    "minimum": 2,
    "where": 3,
    "threshold_backward": 2,
    "leaky_relu_backward": 2,
    "hardtanh_backward": 2,
    "native_dropout_backward": 2,
    "masked_fill.Scalar": 2,
    "logical_and": 2,
    "gelu_backward": 2,
    "silu_backward": 2,
    "sigmoid_backward": 2,
    "tanh_backward": 2,
    "hardswish_backward": 2,
    "hardsigmoid_backward": 2,
    "mish_backward": 2,
    "softplus_backward": 2,
    "elu_backward": 2,
    **{f"{name}.Tensor": 2 for name in ("eq", "ge", "gt", "le", "lt", "ne")},
}


def called(
    name: str, dtype: torch.dtype, device: str
) -> tuple[Any, list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Return the op, tensors for it, the arguments after them, and its keyword arguments."""
    packet, _, overload = name.removeprefix("aten.").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    generator = torch.Generator().manual_seed(3)
    count = next((TENSORS[key] for key in (f"{packet}.{overload}", packet) if key in TENSORS), 1)
    tensors = [torch.randn(100_003, generator=generator).to(dtype) for _ in range(count)]
    if packet in ("log", "sqrt", "rsqrt"):
        tensors[0] = tensors[0].abs() + 0.1
    masks = {"where": 0, "masked_fill": 1, "native_dropout_backward": 1}
    if packet in masks:
        tensors[masks[packet]] = tensors[masks[packet]] > 0
    if packet == "bitwise_not":
        tensors[0] = tensors[0] > 0
    if packet == "elu_backward":  # its second tensor comes last
        elu_backward = op
        op = lambda gradient, given, *numbers: elu_backward(gradient, *numbers, given)  # noqa: E731
    more = next((MORE[key] for key in (f"{packet}.{overload}", packet) if key in MORE), ())
    return (
        op,
        [each.to(device) for each in tensors],
        more,
        {"dtype": torch.float64} if packet == "_to_copy" else {},
    )


def bits_differ(name: str, dtype: torch.dtype, device: str) -> int:
    """Return the elements that differ between parts of odd sizes and the whole."""
    op, tensors, more, kwargs = called(name, dtype, device)
    whole = op(*tensors, *more, **kwargs)
    found = 0
    for parts in (3, 7, 1000):
        for start, end in parts_of(whole.numel(), parts):
            part = op(*(part_of(each, start, end) for each in tensors), *more, **kwargs)
            found += int((part.view(torch.uint8) != part_of(whole, start, end).view(torch.uint8)).sum())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_ops_in_parts_are_bitwise(dtype: torch.dtype) -> None:
    assert {name: bits for name in sorted(BY_ELEMENT) if (bits := bits_differ(name, dtype, "cpu"))} == {}


def test_gpu_elementwise_ops_are_callable() -> None:
    for name in sorted(BY_ELEMENT_ON_GPU):
        op, tensors, more, kwargs = called(name, torch.float32, "cpu")
        assert op(*tensors, *more, **kwargs).shape == tensors[0].shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_elementwise_ops_in_parts_are_bitwise(dtype: torch.dtype) -> None:
    names = sorted(BY_ELEMENT | BY_ELEMENT_ON_GPU)
    assert {name: bits for name in names if (bits := bits_differ(name, dtype, "cuda"))} == {}


def test_exponential_is_elementwise_on_gpus_only() -> None:
    op, tensors, more, kwargs = called("aten.silu.default", torch.float32, "cpu")
    assert element_bytes(op, (*tensors, *more), kwargs, op(*tensors)) == 4 + ON_GPU_ONLY


def test_element_bytes_refuses_other_layouts() -> None:
    add, x = torch.ops.aten.add.Tensor, torch.randn(6, 4)
    assert element_bytes(add, (x, x), {}, add(x, x)) == 4
    assert element_bytes(add, (x, x), {"alpha": 2}, add(x, x, alpha=2)) == 0
    others = (
        x[0],
        x.new_zeros(4, 6).t(),
        x.new_zeros(8, 4)[:6],
        x.new_zeros(()),
        x.new_zeros(6, 1).expand(6, 4),
    )
    assert [element_bytes(add, (x, other), {}, add(x, other)) for other in others] == [0] * 5
    columns = x.new_zeros(4, 6).t()
    assert element_bytes(add, (columns, columns), {}, add(columns, columns)) == 4
    relu = torch.ops.aten.relu_.default
    assert element_bytes(relu, (x,), {}, relu(x)) == 0
