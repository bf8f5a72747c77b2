"""Facts about ATen calls from their schemas and arguments: tensors read and written, random draws,
elementwise ops, group sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from memtune.program import ON_GPU_ONLY

READ_OUTS = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
    }
)
"""Ops that return a number of a tensor to Python (`.item()`, `float(x)`, `if x:`)."""
_SENDS = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan")
"""Collectives that write none of their arguments."""
# BatchNorm kernels that write running_mean and running_var (arguments 3 and 4), which their schema does not
# declare.
_UNDECLARED = {
    "aten.native_batch_norm.default": 5,
    "aten.cudnn_batch_norm.default": 5,
    "aten.miopen_batch_norm.default": 5,
}
# RReLU fills its noise (argument 1). Autograd saves the noise before, and the version counter does not count
# this write.
_FILLS = frozenset({torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default})


def tensors_in(values: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    """Return the tensors among an op's arguments; ops nest them in lists only, so no pytree is needed."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call of `func` writes, declared in its schema or not."""
    found: list[Tensor] = []
    training, writes = _writes(func)
    if training is not None and args[training]:
        found.extend(t for t in args[3:5] if isinstance(t, Tensor))
    for position, name in writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        found += tensors_in((value,))
    return found


def is_uncounted(func: Any, args: Any, written: Tensor) -> bool:
    """Return True if a call of `func` writes `written` without increasing its version counter."""
    return str(func) in _UNDECLARED or (func in _FILLS and args[1] is written)


def may_write(func: Any) -> bool:
    """Return True if some call of `func` writes its arguments."""
    training, writes = _writes(func)
    return training is not None or bool(writes)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if the op draws random numbers."""
    return _is_seeded(func) and not draws_nothing(func, args, kwargs)


@functools.cache
def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for attention without dropout, which is tagged as random but draws nothing."""
    # Its backward gets forward's state, regardless of its tags.
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "philox_seed":
            return True
        if argument.name == "dropout_p":
            given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given == 0.0)
    return False


def one_pass_bytes(inputs: list[Tensor], written: list[Tensor]) -> int:
    """Return the bytes that one pass over all arguments moves; a tensor passed twice is read once."""
    once = ({t.untyped_storage()._cdata: t.nbytes for t in tensors} for tensors in (inputs, written))
    return sum(sum(each.values()) for each in once)


@functools.cache
def _writes(func: Any) -> tuple[int | None, tuple[tuple[int, str], ...]]:
    """Return the index of the argument that enables undeclared writes, and the written arguments."""
    if func.namespace == "c10d":  # its schemas do not declare that the first argument is written
        return None, () if func._schema.name in _SENDS else ((0, func._schema.arguments[0].name),)
    arguments = enumerate(func._schema.arguments)
    declared = (
        (at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write
    )
    return _UNDECLARED.get(str(func)), tuple(declared)


def group_size(args: Any, kwargs: Any) -> int:
    """Return the number of ranks of the group of a collective."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch._C.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(torch.distributed.ProcessGroup.unbox(value).size())
    numbers = [value for value in args if isinstance(value, int) and not isinstance(value, bool)]
    return numbers[-1] if numbers else torch.distributed.get_world_size()


# Kernels that read the grad mode although they run below autograd: oneDNN's LSTM saves tensors for backward
# only if it is on.
READS_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Ops with such kernels."""


@contextmanager
def grad_mode_on() -> Iterator[None]:
    """Enable the grad mode for kernels in this context, without autograd recording."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


# Elementwise ops: each output element depends on the same element of the inputs. Run in parts, they return
# the same bits.
_EXACT = """
    abs.default add.Tensor bitwise_not.default clamp.default clamp_max.default clamp_min.default div.Scalar div.Tensor eq.Scalar
    eq.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor hardtanh.default hardtanh_backward.default le.Scalar le.Tensor
    leaky_relu.default leaky_relu_backward.default logical_and.default logical_not.default lt.Scalar lt.Tensor masked_fill.Scalar
    maximum.default minimum.default mul.Scalar mul.Tensor native_dropout_backward.default ne.Scalar ne.Tensor neg.default
    relu.default sqrt.default sub.Tensor threshold_backward.default where.self _to_copy.default"""  # noqa: E501
_ON_GPU = """
    elu.default elu_backward.default erf.default exp.default gelu.default gelu_backward.default hardsigmoid.default
    hardsigmoid_backward.default hardswish.default hardswish_backward.default log.default mish.default mish_backward.default
    pow.Tensor_Scalar reciprocal.default rsqrt.default sigmoid.default sigmoid_backward.default silu.default silu_backward.default
    softplus.default softplus_backward.default square.default tanh.default tanh_backward.default"""  # noqa: E501
BY_ELEMENT, BY_ELEMENT_ON_GPU = (
    frozenset(f"aten.{name}" for name in names.split()) for names in (_EXACT, _ON_GPU)
)
"""Names of the ops that are bitwise equal in parts on all devices, and of those that are so on a GPU only."""
_KWARGS = ("alpha", "approximate", "dtype")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool)


def element_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes of an element of `out` if `func(*args, **kwargs)` is elementwise, else 0; adds
    `ON_GPU_ONLY` if not so on CPU.

    Args:
        func: An ATen op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its output.
    """
    if not isinstance(out, Tensor) or not may_be_by_element(func, kwargs, on_gpu=True):
        return 0
    inputs = tensors_in([*args, *kwargs.values()])
    if not inputs or out.untyped_storage()._cdata in {each.untyped_storage()._cdata for each in inputs}:
        return 0
    if not all(
        _fills_its_storage(each) and each.shape == out.shape and each.stride() == out.stride()
        for each in (*inputs, out)
    ):
        return 0
    if not all(each.device == out.device for each in inputs):
        return 0
    return out.element_size() | (
        0 if may_be_by_element(func, kwargs, on_gpu=out.device.type != "cpu") else ON_GPU_ONLY
    )


def may_be_by_element(func: Any, kwargs: Any, *, on_gpu: bool) -> bool:
    """Return True if `func` is elementwise for arguments of a suitable layout."""
    name = str(func)
    if (name not in BY_ELEMENT and not (on_gpu and name in BY_ELEMENT_ON_GPU)) or kwargs.get("alpha", 1) != 1:
        return False
    # Any other keyword, such as the device of a cast, changes more than the elements.
    return all(value is None for name, value in kwargs.items() if name not in _KWARGS)


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
    """Return True if a tensor has no gaps and no overlapping elements."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def part_of(tensor: Tensor, start: int, end: int) -> Tensor:
    """Return elements `start` to `end` of `tensor`, in memory order."""
    return tensor.as_strided((end - start,), (1,), tensor.storage_offset() + start)


def without_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes; a null context, which costs nothing, if none is active."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
