"""Memoization of passes with one memory limit for all results; the least recently used are dropped first.

`functools.lru_cache` counts entries, and an entry may be a step of a hundred rows or of a million. `memoized`
counts op rows instead, and each step once, however many entries refer to it as result or argument.
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
"""Most op rows of all steps in the cache, about 0.15 GB; the newest entry is kept even if it has more."""


@dataclass(slots=True)
class _Entry:
    value: Any
    steps: list[Step]


class StepCache:
    """Least-recently-used cache of the results of all decorated functions, limited in op rows.

    Attributes:
        n_rows: Op rows of the steps that entries refer to.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._holders: dict[Step, int] = {}

    def find(self, key: Hashable) -> _Entry | None:
        """Return the entry of `key`, now the most recently used one; None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def keep(self, key: Hashable, value: Any, *holds: Any) -> None:
        """Store `value`, whose entry keeps the steps in `holds` in memory."""
        self._entries[key] = _Entry(value, [])
        self.add(key, *holds)

    def add(self, key: Hashable, *holds: Any) -> None:
        """Count the steps in `holds` for the entry of `key`, too, and drop entries over the limit."""
        entry = self._entries.get(key)
        if entry is None:
            return  # dropped since
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


STEP_CACHE = StepCache()
"""The cache of this process; a forked process continues with a copy."""


class Memoized(Generic[P, T]):
    """A function whose results are cached by its hashable arguments."""

    def __init__(self, make: Callable[P, T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result, computed now unless it is in the cache."""
        key = self._key(args, kwargs)
        entry = STEP_CACHE.find(key)
        if entry is not None:
            found: T = entry.value
            return found
        value = self._make(*args, **kwargs)
        STEP_CACHE.keep(key, value, *args, *kwargs.values(), value)
        return value

    def holds(self, made: object, *args: P.args, **kwargs: P.kwargs) -> None:
        """Count `made`, which was added to the cached result (a list, for example) for these arguments."""
        STEP_CACHE.add(self._key(args, kwargs), made)

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        return (self._make, args, tuple(sorted(kwargs.items())))


def memoized(make: Callable[P, T]) -> Memoized[P, T]:
    """Cache the results of a function that is called repeatedly for the same steps."""
    return Memoized(make)


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
