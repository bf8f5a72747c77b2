"""What one run under the online runtime was like: all that its books were told, and what each op made.

Where the program does the same again it tells the same, whatever the budget makes of it: what is evicted and what comes back is
answered by the books, not told to them. So a later run can tell them from here (`runtime.followed`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from memtune import _native
from memtune.runtime.op_facts import Facts
from memtune.runtime.tape import GradientLike

TOLD = ("constant", "call", "retain", "release", "hold", "let_go", "take", "give_back", "bring", "make_room")
"""What changes the books; all else asks them."""
Told = tuple[str, tuple[Any, ...]]


class Made(NamedTuple):
    """A storage that an op made, as its first tensor looks into it."""

    number: int
    """On the books."""
    n_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class OpNote:
    """An op as it ran."""

    before: int
    """How much the books had been told when it ran."""
    made: list[Made] = field(default_factory=list)
    again: int = -1
    """Its number among the ops that may run again."""
    over: tuple[int, int] | None = None
    """The value that it wrote into, and what it made of it."""


@dataclass
class Notes:
    """One forward and its backward."""

    told: list[Told] = field(default_factory=list)
    ops: list[OpNote] = field(default_factory=list)
    forward_end: int = 0
    """How much was told when forward was through."""
    flowed_in: list[tuple[int, int]] = field(default_factory=list)
    """Number of each gradient that flowed in, and which output of forward it belongs to."""
    why_not: str = ""
    """Why nothing can follow it."""

    def made(self, tensor: Tensor, number: int, n_bytes: int) -> None:
        """The op that ran last made a storage."""
        self.ops[-1].made.append(Made(number, n_bytes, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))


class NotedBooks:
    """The books of a run, with a note of what they are told.

    Args:
        books: Whom to pass it on to.
        notes: Where to write it down.
    """

    def __init__(self, books: _native.Rematerializer, notes: Notes) -> None:
        self.pending, self.drain, self.counted = books.pending, books.drain, books.counted
        for name in TOLD:
            setattr(self, name, _noted(name, getattr(books, name), notes.told))


def _noted(name: str, tell: Callable[..., Any], told: list[Told]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        told.append((name, args))
        return tell(*args)

    return noted


@dataclass(frozen=True, eq=False)
class Noted:
    """One forward and its backward, and which ops they were."""

    notes: Notes
    ran: list[Facts]
    """Every op, in the order of first runs."""
    n_forward: int
    gradients: dict[int, GradientLike]
    """What flowed in, by output of forward."""


def script_of(notes: Notes, ran: list[Facts]) -> _native.RematScript:
    """What the books were told, for a run to come: by now it is known how much each op makes."""
    told = list(notes.told)
    for note, facts in zip(notes.ops, ran, strict=True):
        told[note.before - 1] = ("make_room", (facts.makes_bytes + facts.scratch_bytes,))
    script = _native.RematScript()
    for name, args in told:
        getattr(script, name)(*args)
    return script
