"""Memory layouts of real outputs, for the ops whose fake outputs have others.

Such an op runs once for real, alone, on the smallest tensors of the same form: equal sizes stay equal, and
each dimension keeps its place in memory. Its kernel chooses the layout by nothing else.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from memtune.runtime import tensors_in

_OF_EVERY_DEVICE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "_log_softmax_backward_data",
        "_prelu_kernel_backward",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "copysign",
        "div",
        "elu_backward",
        "floor_divide",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "huber_loss_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "log_sigmoid_forward",
        "logit_backward",
        "mse_loss_backward",
        "native_dropout_backward",
        "native_layer_norm_backward",
        "pow",
        "roll",
        "smooth_l1_loss_backward",
        "softplus_backward",
        "special_xlog1py",
        "threshold_backward",
        "xlogy",
    )
)
_OF_CPU = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "_batch_norm_with_update",
        "_native_batch_norm_legit",
        "batch_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
    )
)
"""Ops that return contiguous tensors on CPU, and tensors in the layout of their input on accelerators."""
_NORM = torch.ops.aten.native_layer_norm_backward


@dataclass(frozen=True)
class _Shape:
    """A small tensor to be made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_orders: dict[tuple[Any, str], tuple[tuple[int, ...], ...] | None] = {}
"""Op and forms of its arguments → the order of the dimensions of each output; None: the kernel cannot run."""


def with_kernel_layout(func: Any, args: Any, kwargs: Any, out: Any, *, on_cpu: bool) -> Any:
    """Return `out`, the fake outputs of an op, in the memory layouts that its kernel gives them."""
    packet = getattr(func, "overloadpacket", None)
    if packet not in _OF_EVERY_DEVICE and not (on_cpu and packet in _OF_CPU):
        return out
    inputs, outputs = tensors_in([*args, *kwargs.values()]), tensors_in([out])
    if "out" in kwargs or not any(isinstance(each, FakeTensor) for each in outputs):  # of constants
        return out
    if all(each.is_contiguous() for each in inputs):
        return out
    # As small as keeps sizes apart: the kernel runs for its layouts only, and equal sizes must stay equal.
    sizes = sorted({size for each in inputs for size in each.shape if size > 1})
    small = {size: rank for rank, size in enumerate(sizes, 2)}
    given = [_shrunk(each, small, is_shape=packet is _NORM) for each in args]
    named = {name: _shrunk(each, small) for name, each in kwargs.items()}
    key = func, repr((given, named))
    if key not in _orders:
        _orders[key] = _run(func, given, named)
    if (orders := _orders[key]) is None:
        return out
    left = iter(orders)
    return tree_map_only(Tensor, lambda each: _ordered(each, next(left)), out)


def _run(func: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...] | None:
    def made(form: _Shape) -> Tensor:
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype).fill_(1)

    # No mode of the caller may see this run. The CPU lacks kernels for some types that an accelerator has.
    with _disable_current_modes(), torch.device("cpu"), suppress(RuntimeError):
        given, named = tree_map_only(_Shape, made, (args, kwargs))
        return tuple(_order(each) for each in tensors_in([func(*given, **named)]))
    return None


def _shrunk(value: Any, small: dict[int, int], *, is_shape: bool = False) -> Any:
    """Return an argument with a form instead of a tensor, and small sizes in a list that is a shape."""
    if isinstance(value, Tensor):
        return _Shape(
            value.dtype, tuple(small.get(each, each) for each in value.shape), _strides(value, small)
        )
    if is_shape and isinstance(value, list | tuple):
        return [small.get(each, each) if type(each) is int else each for each in value]
    return value


def _strides(tensor: Tensor, small: dict[int, int]) -> tuple[int, ...]:
    """Return strides of a tensor with `small` sizes, whose dimensions lie in memory as those of `tensor`."""
    found, end, small_end = [0] * tensor.dim(), 1, 1
    for at in sorted(range(tensor.dim()), key=lambda each: (tensor.stride(each), tensor.size(each))):
        size, stride = tensor.size(at), tensor.stride(at)
        if stride > 0:
            found[at] = small_end * (1 + (stride > end))  # with a gap where the tensor has one
            end, small_end = stride * size, found[at] * small.get(size, size)
    return tuple(found)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of `tensor`, that of the largest stride first, those of one element last."""
    sizes, strides = tensor.shape, tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda each: (sizes[each] < 2, -strides[each])))


def _ordered(fake: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `fake`, or another one whose dimensions lie in memory in `order`."""
    if order == _order(fake):
        return fake
    return torch.empty_permuted(fake.shape, order, dtype=fake.dtype, device=fake.device)
