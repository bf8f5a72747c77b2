"""What the arguments of an ATen call say of it: which tensors it reads and writes, and among how many ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

READ_OUTS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}
)
"""What gives code a number of a tensor (`.item()`, `float(x)`, `if x:`)."""
_SENDS = ("c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan")
"""Collectives that write into nothing that they are given."""
# BatchNorm kernels that write running_mean and running_var (arguments 3 and 4) without saying so in their schema.
_UNDECLARED = {"aten.native_batch_norm.default": 5, "aten.cudnn_batch_norm.default": 5, "aten.miopen_batch_norm.default": 5}
# RReLU's noise, which it fills (argument 1): autograd saves it before, and does not count this write.
_FILLS = frozenset({torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default})


def tensors_in(values: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    """The tensors among an op's arguments; ops nest them in lists only, so that no pytree is needed."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call of `func` writes into, by its schema and by what its schema leaves out."""
    found: list[Tensor] = []
    training, writes = _writes(func)
    if training is not None and args[training]:
        found.extend(t for t in args[3:5] if isinstance(t, Tensor))
    for position, name in writes:
        value = args[position] if position < len(args) else kwargs.get(name)
        found += tensors_in((value,))
    return found


def is_uncounted(func: Any, args: Any, written: Tensor) -> bool:
    """Whether autograd's version counter of `written` does not see that a call of `func` writes into it."""
    return str(func) in _UNDECLARED or (func in _FILLS and args[1] is written)


def may_write(func: Any) -> bool:
    """Whether some call of `func` writes into what it is given."""
    training, writes = _writes(func)
    return training is not None or bool(writes)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags and not draws_nothing(func, args, kwargs)


def draws_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Attention without dropout could draw and does not; its backward is given what forward drew, whatever its tags say."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "philox_seed":
            return True
        if argument.name == "dropout_p":
            given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given == 0.0)
    return False


def one_pass_bytes(inputs: list[Tensor], written: list[Tensor]) -> int:
    """Bytes that one pass over all arguments moves; a tensor that is given twice is read once."""
    once = ({t.untyped_storage()._cdata: t.nbytes for t in tensors} for tensors in (inputs, written))
    return sum(sum(each.values()) for each in once)


@functools.cache
def _writes(func: Any) -> tuple[int | None, tuple[tuple[int, str], ...]]:
    """The argument that says whether undeclared writes happen (None: there are none), and the arguments written into."""
    if func.namespace == "c10d":  # no schema there says that the first argument is what arrives
        return None, () if func._schema.name in _SENDS else ((0, func._schema.arguments[0].name),)
    arguments = enumerate(func._schema.arguments)
    declared = ((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)
    return _UNDECLARED.get(str(func)), tuple(declared)


def group_size(args: Any, kwargs: Any) -> int:
    """Ranks of the group that a collective was called with."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch._C.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(torch.distributed.ProcessGroup.unbox(value).size())
    numbers = [value for value in args if isinstance(value, int) and not isinstance(value, bool)]
    return numbers[-1] if numbers else torch.distributed.get_world_size()
