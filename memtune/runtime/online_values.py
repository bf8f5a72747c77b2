"""What the online runtime remembers: versions of storages, what ops read of them, and how an op runs once more."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from memtune.errors import ApplyError
from memtune.runtime.below_autograd import ASK_GRAD_MODE, as_recorded
from memtune.runtime.by_element import part_of
from memtune.runtime.op_facts import Facts
from memtune.runtime.random_state import RandomState
from memtune.schedule import parts_of
from memtune.units import format_bytes


class View(NamedTuple):
    """How a tensor looks into its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, alias: Tensor) -> Tensor:
        """The same view of the storage behind `alias`."""
        if alias.dtype != self.dtype:
            alias = alias.view(self.dtype)
        return alias.as_strided(self.size, self.stride, self.offset)


def view_of(tensor: Tensor) -> View:
    """How `tensor` looks into its storage."""
    return View(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@dataclass(slots=True, eq=False)
class Value:
    """One version of one storage that an op of the model made."""

    number: int
    """On the books."""
    bytes: int
    again: bool
    alias: Tensor | None = None
    """Looks at its storage while that is there."""
    address: int = 0
    """Of its storage while that is there."""
    outside: bool = True
    """Whether Python or the engine hold it, as far as was seen."""
    writes: int = 0
    """How often it was written into without becoming another value."""
    unsaid: int = 0
    """How many of those writes kernels do not declare (BatchNorm's statistics): autograd does not count them either."""
    version: int | None = None
    """Of its storage when forward returned it, if it did and the storage is still that one."""

    @property
    def is_written(self) -> bool:
        """Whether somebody wrote into it since forward returned it."""
        return self.version is not None and self.alias is not None and self.alias._version != self.version


@dataclass(slots=True, eq=False)
class Given:
    """A tensor from outside; replaced by a copy before it is written into."""

    tensor: Tensor
    version: int


class Read(NamedTuple):
    """A tensor that an op read."""

    of: Value | Given
    view: View
    writes: int
    """Of the value, so far."""


@dataclass(slots=True, eq=False)
class Ran:
    """An op that may run again."""

    facts: Facts
    args: Any
    kwargs: dict[str, Any]
    at: int
    """Its number among all ops that ran."""
    made: list[tuple[int, Value]]
    """Position among the tensors that it returns, and the value."""
    over: tuple[Value, Value] | None
    """The value that it writes into, and what it makes of it."""
    random: RandomState | None


class Again(NamedTuple):
    """A second run, by numbers among all ops that ran."""

    before: int
    """The op that ran next for the first time."""
    which: int
    along: tuple[int, ...] = ()
    """Ops that ran along in its parts."""
    parts: int = 1


class Kept:
    """What autograd holds in place of a tensor; when it goes, so does the value's reference."""

    __slots__ = ("gone", "value", "view", "writes")

    def __init__(self, value: Value, view: View, gone: Callable[[Value], None]) -> None:
        self.value, self.view, self.writes, self.gone = value, view, value.writes - value.unsaid, gone

    def __del__(self) -> None:
        self.gone(self.value)


class Watch(weakref.ref[torch.UntypedStorage]):
    """Tells when a storage is gone that the table does not hold."""

    __slots__ = ("number",)
    number: int
    """On the books."""


# -- once more ---------------------------------------------------------------------------------------------------------


def run_again(ran: Ran, over: bool) -> tuple[Any, Tensor | None]:
    """What `ran` returns when it runs on what it read then, and the whole storage that it wrote into, if it did.

    Args:
        ran: The op.
        over: It may write into the value that it wrote into then; else into a copy.

    Raises:
        ApplyError: Something that it read has been written into since.
    """
    whole = None
    if ran.over is not None:
        old = ran.over[0]
        assert old.alias is not None
        whole = whole_of(old.alias) if over else whole_of(old.alias).clone()
    args, kwargs = tree_map(lambda each: _given_again(each, ran, whole), (ran.args, ran.kwargs), is_leaf=_is_read)
    about = ran.facts.about
    if about.norm and args[5]:  # training; in eval mode they are read
        args = (*args[:3], None, None, *args[5:])  # the running statistics have had their update
    if about.name in ASK_GRAD_MODE:
        with as_recorded():
            return about.func(*args, **kwargs), whole
    if ran.random is not None:
        with ran.random.restored():
            return about.func(*args, **kwargs), whole
    return about.func(*args, **kwargs), whole


def run_in_parts(ran: Ran, along: Sequence[Ran], parts: int) -> Tensor:
    """What `ran` returns when it runs on what it read then, part by part.

    Args:
        ran: An op that works by elements (`memtune.runtime.by_element`).
        along: Others, in order: what of theirs is not there is made part by part as well, and never exists whole.
        parts: In how many.

    Raises:
        ApplyError: Something that one of them read has been written into since.
    """
    looks = next(each.view for each in tree_leaves((ran.args, ran.kwargs), is_leaf=_is_read) if _is_read(each))
    whole: Tensor | None = None
    for start, end in parts_of(math.prod(looks.size), parts):
        made: dict[int, Tensor] = {}  # id of a value → its part
        for each in along:
            made[id(each.made[0][1])] = _run_part(each, made, start, end)
        part = _run_part(ran, made, start, end)
        made.clear()
        if whole is None:
            whole = torch.empty_strided(looks.size, looks.stride, dtype=part.dtype, device=part.device)
        part_of(whole, start, end).copy_(part)
        del part
    assert whole is not None
    return whole


def _run_part(ran: Ran, made: Mapping[int, Tensor], start: int, end: int) -> Tensor:
    def given(each: Any) -> Any:
        if not _is_read(each):
            return each
        part = made.get(id(each.of))
        return part_of(_given_again(each, ran, None), start, end) if part is None else part

    args, kwargs = tree_map(given, (ran.args, ran.kwargs), is_leaf=_is_read)
    out: Tensor = ran.facts.about.func(*args, **kwargs)
    return out


def _is_read(each: Any) -> bool:
    return isinstance(each, Read)


def _given_again(each: Any, ran: Ran, whole: Tensor | None) -> Any:
    if not isinstance(each, Read):
        return each
    what = ran.facts.about.name
    if isinstance(each.of, Given):
        if each.of.tensor._version != each.of.version:
            raise written_since(f"a tensor that {what} has read and must read again")
        return each.view.on(each.of.tensor)
    if ran.over is not None and each.of is ran.over[0]:
        assert whole is not None
        return each.view.on(whole)
    if each.of.alias is None or each.of.is_written or (not each.of.again and each.of.writes != each.writes):
        raise written_since(f"a tensor that {what} has read and must read again")
    return each.view.on(each.of.alias)


def whole_of(alias: Tensor) -> Tensor:
    """All of the storage behind `alias`."""
    return alias.as_strided((alias.untyped_storage().nbytes() // alias.element_size(),), (1,), 0)


def written_since(what: str) -> ApplyError:
    """The error of a region in which `what` was changed in place."""
    return ApplyError(
        f"{what} was written into in place after the model's forward had used it.",
        fix="write x = x + y instead of x += y, and step the optimizer after backward", code="MT326",
    )  # fmt: skip


def too_small(who: str, wanted_bytes: int, held_bytes: int, background_bytes: int, *, waits: bool = False) -> ApplyError:
    """The error of a region in which `who` asks for more than can be made free; `waits`: another forward has no backward yet."""
    first = ", or call backward() before the next forward" if waits else ""
    return ApplyError(
        f"the budget is too small for {who}: nothing is left to evict.",
        evidence=f"It asks for {format_bytes(wanted_bytes)} beside {format_bytes(held_bytes)} that must stay and "
        f"{format_bytes(background_bytes)} of parameters, gradients, optimizer state, inputs and what waits for its backward.",
        fix=f"give a budget of at least {format_bytes(background_bytes + wanted_bytes + held_bytes)}, "
        f"or a smaller micro-batch{first}",
        code="MT337",
    )
