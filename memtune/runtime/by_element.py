"""Ops that make each element of one tensor of the same element of what they read: run in parts, they make the same bits.

Rule 1. Only what gives the same bits wherever an element lies. On CPU these are additions, products, comparisons, choices, casts:
        a vectorised exponential has another last bit in the tail of a row than in its middle. A GPU's kernels compute every
        element alike, so there it is all that works by elements.
Rule 2. All tensors have one shape and one layout, dense, and fill their storages. So a part is a range of memory, and the parts
        of a value that one op makes and another reads are the same, whatever their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtune.program import ON_GPU_ONLY
from memtune.runtime.op_arguments import tensors_in

_EXACT = """
    abs.default add.Tensor bitwise_not.default clamp.default clamp_max.default clamp_min.default div.Scalar div.Tensor eq.Scalar
    eq.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor hardtanh.default hardtanh_backward.default le.Scalar le.Tensor
    leaky_relu.default leaky_relu_backward.default logical_and.default logical_not.default lt.Scalar lt.Tensor masked_fill.Scalar
    maximum.default minimum.default mul.Scalar mul.Tensor native_dropout_backward.default ne.Scalar ne.Tensor neg.default
    relu.default sqrt.default sub.Tensor threshold_backward.default where.self _to_copy.default"""
_ON_GPU = """
    elu.default elu_backward.default erf.default exp.default gelu.default gelu_backward.default hardsigmoid.default
    hardsigmoid_backward.default hardswish.default hardswish_backward.default log.default mish.default mish_backward.default
    pow.Tensor_Scalar reciprocal.default rsqrt.default sigmoid.default sigmoid_backward.default silu.default silu_backward.default
    softplus.default softplus_backward.default square.default tanh.default tanh_backward.default"""
BY_ELEMENT, BY_ELEMENT_ON_GPU = (frozenset(f"aten.{name}" for name in names.split()) for names in (_EXACT, _ON_GPU))
"""By name (Rule 1)."""
_KWARGS = ("alpha", "approximate", "dtype")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)


def element_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes of an element of `out` where `func(*args, **kwargs)` works by elements, else 0; `ON_GPU_ONLY` added if not on CPU.

    Args:
        func: An ATen op.
        args: What it was given.
        kwargs: What it was given by name.
        out: What it returned.
    """
    if not isinstance(out, Tensor) or not may_be_by_element(func, kwargs, on_gpu=True):
        return 0
    inputs = tensors_in([*args, *kwargs.values()])
    if not inputs or out.untyped_storage()._cdata in {each.untyped_storage()._cdata for each in inputs}:
        return 0
    if not all(_fills_its_storage(each) and each.shape == out.shape and each.stride() == out.stride() for each in (*inputs, out)):
        return 0
    if not all(each.device == out.device for each in inputs):
        return 0
    return out.element_size() | (0 if may_be_by_element(func, kwargs, on_gpu=out.device.type != "cpu") else ON_GPU_ONLY)


def may_be_by_element(func: Any, kwargs: Any, *, on_gpu: bool) -> bool:
    """Whether `func` works by elements if what it is given is laid out for that."""
    name = str(func)
    if (name not in BY_ELEMENT and not (on_gpu and name in BY_ELEMENT_ON_GPU)) or kwargs.get("alpha", 1) != 1:
        return False
    return all(value is None for name, value in kwargs.items() if name not in _KWARGS)  # a cast to another device, say


def _fills_its_storage(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and is_dense(tensor.shape, tensor.stride())
    )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has no gaps and no element twice."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def part_of(tensor: Tensor, start: int, end: int) -> Tensor:
    """Elements `start` to `end` of `tensor`, in the order of memory."""
    return tensor.as_strided((end - start,), (1,), tensor.storage_offset() + start)
