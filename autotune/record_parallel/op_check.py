"""Compare one op of a step with the same op of a partitioned step.

Find the divided dimension of each argument, and check it.

An op may be partitioned if it treats the parts alike: it is element-wise, or a norm within each part, or a
product with whole rows and columns of its contracted dimension, or attention over whole heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program import Phase, Recording

_ELEMENTWISE = frozenset(
    "add sub mul div neg abs pow square sqrt rsqrt reciprocal exp log silu gelu relu sigmoid tanh hardswish"
    " hardtanh elu leaky_relu softplus mish clamp clamp_min clamp_max where masked_fill maximum minimum lerp"
    " addcmul addcdiv copy clone _to_copy fill zeros_like ones_like empty_like zero logical_not eq ne lt le"
    " gt ge cos sin".split()
)
"""Element-wise ops: any dimension may be divided."""
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Positions of the two factors among the arguments."""
_ALONG_DIMS = frozenset(("_softmax", "_log_softmax", "cat", "stack", "sum", "mean", "amax", "amin"))
"""Ops along the dimensions in their arguments."""
_NORMS = frozenset(("native_layer_norm", "_fused_rms_norm"))
"""Ops along the last dimensions, as many as their second argument has."""


@dataclass(frozen=True)
class Op:
    """One op of a recorded forward."""

    index: int
    name: str
    module: str
    draws: bool
    """True if it may draw random numbers."""
    arguments: list[Any]
    """As `memory.workspace.signature` writes them; none for collectives."""
    reads: tuple[int, ...]
    """Storages."""


def forward_ops(
    recording: Recording, modules: npt.NDArray[np.bool_], first: int = 0, last: int | None = None
) -> list[Op]:
    """Return the forward ops from `first` to before `last` in one of `modules` (a mask over the step's)."""
    step, signatures = recording.step, recording.hints[recording.small].signatures
    ops = np.flatnonzero(modules[step.ops.module] & (step.ops.phase == Phase.FORWARD))
    ends = np.searchsorted(step.uses.op, [ops, ops + 1])
    return [
        Op(
            op,
            step.names[step.ops.name[op]],
            step.modules[step.ops.module[op]],
            bool(step.ops.rng[op]),
            json.loads(signatures[op])[1] if signatures[op] else [],
            tuple(step.uses.storage[start:end].tolist()),
        )
        for op, start, end in zip(ops.tolist(), *ends.tolist(), strict=True)
        if first <= op and (last is None or op < last)
    ]


def draws_nothing(op: Op) -> bool:
    """Return whether an op that may draw does not: attention without dropout."""
    return "scaled_dot_product" in op.name and not any(
        isinstance(value, float) and value for value in op.arguments
    )


def partition_error(name: str, whole: list[Any], part: list[Any], degree: int) -> str:
    """Return how an op treats the divided dimension wrongly, '' if it does not."""
    divided: list[int | None] = []
    for one, other in zip(_flat(whole), _flat(part), strict=False):
        dim = _divided(one, other, degree)
        if isinstance(dim, str):
            return dim
        divided.append(dim)
    if len(_flat(whole)) != len(_flat(part)):
        return "is given other arguments"
    if all(dim is None for dim in divided):
        return ""
    # The form in place treats elements as the other one does; names such as `_softmax` keep their first sign.
    op = name.split(".")[1].rstrip("_") if not name.split(".")[1].startswith("_") else name.split(".")[1]
    if op in _ELEMENTWISE:
        return ""
    if op in _PRODUCTS:
        return _product(op, whole, divided)
    if "scaled_dot_product" in op:
        heads = [
            dim
            for shape, dim in zip(_flat(whole), divided, strict=True)
            if _is_tensor(shape) and dim is not None
        ]
        return "" if all(dim == 1 for dim in heads) else "would divide something else than whole heads"
    if op in _NORMS:
        inner = len(_shape(whole[0])) - len(whole[1])
        return (
            "works along what was divided"
            if any(dim is not None and dim >= inner for dim in divided[:1])
            else ""
        )
    if op in _ALONG_DIMS:
        return _along(whole, divided)
    return "is not known to treat what is divided alike"


def attention_error(name: str, whole: list[Any], part: list[Any], degree: int) -> str:
    """Return why an attention cannot be divided so that each part attends to itself, '' if it can."""
    dims = [_divided(one, other, degree) for one, other in zip(whole[:3], part[:3], strict=True)]
    return (
        ""
        if dims == [2, 2, 2]
        else f"does not have (samples, heads, positions, features): {[_shape(each) for each in whole[:3]]}"
    )


def _product(op: str, whole: list[Any], divided: list[int | None]) -> str:
    left, right = _PRODUCTS[op]
    dims = [len(_shape(whole[at])) for at in (left, right)]
    # The contracted dimension: the last one of the left factor, the one before the last of the right.
    summed = divided[left] == dims[0] - 1 or divided[right] == dims[1] - 2
    return "sums over what was divided" if summed else ""


def _along(whole: list[Any], divided: list[int | None]) -> str:
    tensors = [(value, dim) for value, dim in zip(_flat(whole), divided, strict=True) if _is_tensor(value)]
    rank = len(_shape(tensors[0][0]))
    along = {
        number % rank
        for value in whole[1:]
        for number in (value if isinstance(value, list) else [value])
        # Not isinstance: a bool (`keepdim`) is no dimension.
        if type(number) is int
    }
    return "works along what was divided" if not along or along & {dim for _, dim in tensors} else ""


def _flat(arguments: list[Any]) -> list[Any]:
    return [each for value in arguments for each in (value if isinstance(value, list) else [value])]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and ("t" in value or "conj" in value)


def _shape(value: Any) -> list[int]:
    found: list[int] = (value.get("t") or value.get("conj"))[1]
    return found


def _divided(one: Any, other: Any, degree: int) -> int | str | None:
    """Return the divided dimension, None if there is none, or the error."""
    if not (_is_tensor(one) and _is_tensor(other)):
        return None if one == other else "is given another number"
    mine, theirs = _shape(one), _shape(other)
    if len(mine) != len(theirs):
        return "is given another number of dimensions"
    changed = [dim for dim, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    if not changed:
        return None
    # One dimension alone may differ, by the factor of the degree.
    if len(changed) > 1 or mine[changed[0]] != theirs[changed[0]] * degree:
        return f"is given {theirs} in place of {mine}"
    return changed[0]


def count_divided(whole: list[Any], part: list[Any], degree: int) -> tuple[int, int]:
    """Return how many of an op's tensor arguments are divided, and how many are not."""
    tensors = [(one, other) for one, other in zip(_flat(whole), _flat(part), strict=False) if _is_tensor(one)]
    divided = sum(_divided(one, other, degree) is not None for one, other in tensors)
    return divided, len(tensors) - divided
