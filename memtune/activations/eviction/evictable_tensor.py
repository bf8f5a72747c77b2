"""Records of the evicting region: versions of storages, reads of ops, and the second run of an op."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from memtune.activations.eviction.op_metadata import OpMetadata
from memtune.errors import ApplyError
from memtune.program import parts_of
from memtune.runtime import READS_GRAD_MODE, RandomState, grad_mode_on, part_of
from memtune.units import format_bytes


class View(NamedTuple):
    """Layout of a tensor within its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, alias: Tensor) -> Tensor:
        """Return the same view of the storage behind `alias`."""
        if alias.dtype != self.dtype:
            alias = alias.view(self.dtype)
        return alias.as_strided(self.size, self.stride, self.offset)


def view_of(tensor: Tensor) -> View:
    """Return the layout of `tensor` within its storage."""
    return View(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@dataclass(slots=True, eq=False)
class Value:
    """One version of a storage that an op of the model made."""

    number: int
    """Number in the rematerializer."""
    bytes: int
    again: bool
    alias: Tensor | None = None
    """A tensor on its storage while it is resident."""
    address: int = 0
    """Address of its storage while it is resident."""
    outside: bool = True
    """True while Python or autograd's engine hold it, as of the last check."""
    writes: int = 0
    """Number of in-place writes that did not make a new version."""
    undeclared_writes: int = 0
    """Number of those writes that the schema does not declare (BatchNorm), so no version counts them."""
    version: int | None = None
    """Version counter of its storage when forward returned it; None if not returned, or moved."""

    @property
    def is_written(self) -> bool:
        """Return whether it was written into since forward returned it."""
        return self.version is not None and self.alias is not None and self.alias._version != self.version


@dataclass(slots=True, eq=False)
class OutsideTensor:
    """Tensor from outside the region; a copy replaces it before it is written into."""

    tensor: Tensor
    version: int


class Read(NamedTuple):
    """A tensor that an op read."""

    of: Value | OutsideTensor
    view: View
    writes: int
    """Number of writes into the value at that time."""


@dataclass(slots=True, eq=False)
class RepeatableOp:
    """An op that may run again, with its recorded arguments."""

    facts: OpMetadata
    args: Any
    kwargs: dict[str, Any]
    at: int
    """Its number among all ops that ran."""
    made: list[tuple[int, Value]]
    """Position among the returned tensors, and the value, of each output."""
    over: tuple[Value, Value] | None
    """The value that it writes into, and the new version."""
    random: RandomState | None


class ReplayRecord(NamedTuple):
    """Record of a second run, by numbers among all ops that ran."""

    before: int
    """The op that ran next for the first time."""
    which: int
    along: tuple[int, ...] = ()
    """Ops that ran with it, part by part."""
    parts: int = 1


class PackedValue:
    """Saved by autograd instead of a tensor. Its deletion releases autograd's reference to the value."""

    __slots__ = ("gone", "value", "view", "writes")

    def __init__(self, value: Value, view: View, gone: Callable[[Value], None]) -> None:
        self.value = value
        self.view = view
        self.writes = value.writes - value.undeclared_writes
        self.gone = gone

    def __del__(self) -> None:
        self.gone(self.value)


class StorageWatch(weakref.ref[torch.UntypedStorage]):
    """Weak reference that reports the end of a storage that the table does not hold."""

    __slots__ = ("number",)
    number: int
    """Number in the rematerializer."""


# -- second runs ---------------------------------------------------------------------------------------------


def run_again(ran: RepeatableOp, over: bool) -> tuple[Any, Tensor | None]:
    """Run `ran` again on its recorded arguments; return its result, and the whole storage it wrote into, if
    any.

    Args:
        ran: The op.
        over: Whether it may write into the original value; otherwise it writes into a copy.

    Raises:
        ApplyError: An argument has been written into since.
    """
    whole = None
    if ran.over is not None:
        old = ran.over[0]
        assert old.alias is not None
        # A copy, if another op still reads the old version.
        whole = whole_of(old.alias) if over else whole_of(old.alias).clone()
    args, kwargs = tree_map(
        lambda each: _argument(each, ran, whole), (ran.args, ran.kwargs), is_leaf=_is_read
    )
    about = ran.facts.about
    if about.norm and args[5]:  # training: the first run has already updated the running statistics
        args = (*args[:3], None, None, *args[5:])
    # Its kernel saves the workspace for backward only with the grad mode on, as in the first run.
    if about.name in READS_GRAD_MODE:
        with grad_mode_on():
            return about.func(*args, **kwargs), whole
    # With the numbers of the first run; the generators continue from where they are.
    if ran.random is not None:
        with ran.random.restored():
            return about.func(*args, **kwargs), whole
    return about.func(*args, **kwargs), whole


def run_in_parts(ran: RepeatableOp, along: Sequence[RepeatableOp], parts: int) -> Tensor:
    """Run `ran` again on its recorded arguments, part by part; return its output.

    Args:
        ran: An elementwise op (`memtune.runtime.op_schema`).
        along: Elementwise ops, in order, whose outputs are missing arguments; computed part by part as well,
            so these never exist in full.
        parts: Number of parts.

    Raises:
        ApplyError: An argument of one of them has been written into since.
    """
    # All tensor arguments of an elementwise op have the layout of its output.
    like = next(each.view for each in tree_leaves((ran.args, ran.kwargs), is_leaf=_is_read) if _is_read(each))
    whole: Tensor | None = None
    # Each element depends on its own inputs only, so parts give the bits of the whole.
    for start, end in parts_of(math.prod(like.size), parts):
        made: dict[int, Tensor] = {}  # id of a value → its part
        for each in along:
            made[id(each.made[0][1])] = _run_part(each, made, start, end)
        part = _run_part(ran, made, start, end)
        made.clear()
        if whole is None:
            whole = torch.empty_strided(like.size, like.stride, dtype=part.dtype, device=part.device)
        part_of(whole, start, end).copy_(part)
        del part  # else two parts would be live in the next round
    assert whole is not None
    return whole


def _run_part(ran: RepeatableOp, made: Mapping[int, Tensor], start: int, end: int) -> Tensor:
    def given(each: Any) -> Any:
        if not _is_read(each):
            return each
        part = made.get(id(each.of))
        return part_of(_argument(each, ran, None), start, end) if part is None else part

    args, kwargs = tree_map(given, (ran.args, ran.kwargs), is_leaf=_is_read)
    out: Tensor = ran.facts.about.func(*args, **kwargs)
    return out


def _is_read(each: Any) -> bool:
    return isinstance(each, Read)


def _argument(each: Any, ran: RepeatableOp, whole: Tensor | None) -> Any:
    if not isinstance(each, Read):
        return each
    what = ran.facts.about.name
    if isinstance(each.of, OutsideTensor):
        # User code may write into parameters and inputs between forward and backward.
        if each.of.tensor._version != each.of.version:
            raise written_since(f"a tensor that {what} has read and must read again")
        return each.view.on(each.of.tensor)
    if ran.over is not None and each.of is ran.over[0]:
        assert whole is not None
        return each.view.on(whole)
    # Not resident, written by user code since forward returned it, or another version of a value that cannot
    # be made again.
    if each.of.alias is None or each.of.is_written or (not each.of.again and each.of.writes != each.writes):
        raise written_since(f"a tensor that {what} has read and must read again")
    return each.view.on(each.of.alias)


def whole_of(alias: Tensor) -> Tensor:
    """Return the whole storage behind `alias` as one flat tensor."""
    return alias.as_strided((alias.untyped_storage().nbytes() // alias.element_size(),), (1,), 0)


def written_since(what: str) -> ApplyError:
    """Return the error for an in-place write to `what` within a region."""
    return ApplyError(
        f"{what} was written into in place after the model's forward had used it.",
        fix="write x = x + y instead of x += y, and step the optimizer after backward",
        code="MT326",
    )


def too_small(
    requester: str, wanted_bytes: int, held_bytes: int, background_bytes: int, *, waits: bool = False
) -> ApplyError:
    """Return the error for a request that eviction cannot satisfy; `waits`: for another's backward."""
    first = ", or call backward() before the next forward" if waits else ""
    return ApplyError(
        f"the budget is too small for {requester}: nothing is left to evict.",
        evidence=(
            f"It requests {format_bytes(wanted_bytes)} in addition to {format_bytes(held_bytes)} that cannot"
            f" be evicted and {format_bytes(background_bytes)} of parameters, gradients, optimizer state,"
            " inputs and values of forwards that wait for their backward."
        ),
        fix=(
            f"give a budget of at least {format_bytes(background_bytes + wanted_bytes + held_bytes)}, "
            f"or a smaller micro-batch{first}"
        ),
        code="MT337",
    )
