"""Steps that passes remember beside the search's own tree of programs: one limit for all of them, the longest
unused go first.

An `lru_cache` of a pass counts its entries, and an entry may be a step of a hundred rows or of a million.
What is decorated with `remembered` is counted in rows instead, each step once however many entries hold it,
as result or as argument.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from memtune.program.step import Program, Step

P = ParamSpec("P")
T = TypeVar("T")

MAX_ROWS = 1_000_000
"""Op rows of all remembered steps, about 0.15 GB; what is used at the moment stays even if it has more."""


@dataclass(slots=True)
class _Entry:
    value: Any
    steps: list[Step]


class Memory:
    """What all decorated functions have returned so far.

    Attributes:
        n_rows: Of the steps that are held.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._holders: dict[Step, int] = {}

    def find(self, key: Hashable) -> _Entry | None:
        """What is remembered under `key`, which is the youngest then."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def keep(self, key: Hashable, value: Any, *holds: Any) -> None:
        """Remember `value`, which keeps the steps in `holds` in memory."""
        self._entries[key] = _Entry(value, [])
        self.add(key, *holds)

    def add(self, key: Hashable, *holds: Any) -> None:
        """What is remembered under `key` holds these as well from now on."""
        entry = self._entries.get(key)
        if entry is None:
            return  # forgotten meanwhile
        self._entries.move_to_end(key)
        for step in _steps(holds):
            entry.steps.append(step)
            self._holders[step] = self._holders.get(step, 0) + 1
            if self._holders[step] == 1:
                self.n_rows += step.ops.n
        while self.n_rows > MAX_ROWS and len(self._entries) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        for step in entry.steps:
            self._holders[step] -= 1
            if not self._holders[step]:
                del self._holders[step]
                self.n_rows -= step.ops.n


MEMORY = Memory()
"""Of this process; a forked one goes on with a copy."""


class Remembered(Generic[P, T]):
    """A function whose results are remembered by its arguments, which are hashable."""

    def __init__(self, make: Callable[P, T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result, made now if it is not remembered."""
        key = self._key(args, kwargs)
        entry = MEMORY.find(key)
        if entry is not None:
            found: T = entry.value
            return found
        value = self._make(*args, **kwargs)
        MEMORY.keep(key, value, *args, *kwargs.values(), value)
        return value

    def holds(self, made: object, *args: P.args, **kwargs: P.kwargs) -> None:
        """The result for these arguments, a list say, has got `made` into it."""
        MEMORY.add(self._key(args, kwargs), made)

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        return (self._make, args, tuple(sorted(kwargs.items())))


def remembered(make: Callable[P, T]) -> Remembered[P, T]:
    """Decorate a function that is asked for the same steps again and again."""
    return Remembered(make)


def _steps(values: Any) -> Iterator[Step]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _steps(value)
        elif isinstance(value, Program):
            yield from (each.step for each in value.rank_classes)
        elif isinstance(value, Step):
            yield value
        elif isinstance(getattr(value, "step", None), Step):
            yield value.step
