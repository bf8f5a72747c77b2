"""Rows of a step by op and by storage, sorted once: patterns ask for those of every module."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np

from memtune.program import Kind, Step


class _Sorted:
    """The uses and the storages of one step, by op, and its uses by storage."""

    def __init__(self, step: Step) -> None:
        ops = np.arange(step.ops.n + 2)
        self.use_starts: list[int] = np.searchsorted(step.uses.op, ops).tolist()
        made = np.flatnonzero((step.storages.producer >= 0) & (step.storages.kind != Kind.WORKSPACE))
        made = made[np.argsort(step.storages.producer[made], kind="stable")]
        self.made: list[int] = made.tolist()
        self.made_starts: list[int] = np.searchsorted(step.storages.producer[made], ops).tolist()
        # Stable: the uses of a storage remain in order.
        order = np.argsort(step.uses.storage, kind="stable")
        self.uses: list[int] = order.tolist()
        self.storage_starts: list[int] = np.searchsorted(
            step.uses.storage[order], np.arange(step.storages.n + 1)
        ).tolist()


_sorted = lru_cache(maxsize=8)(_Sorted)


def made_by(step: Step, ops: tuple[int, ...]) -> list[int]:
    """Return the storages that `ops` make, without workspaces; the ops are contiguous."""
    rows = _sorted(step)
    return sorted(rows.made[rows.made_starts[ops[0]] : rows.made_starts[ops[-1] + 1]])


def uses_of(step: Step, first: int, last: int) -> slice:
    """Return the rows of the uses of ops `first` to `last`."""
    starts = _sorted(step).use_starts
    return slice(starts[first], starts[last + 1])


def used_in(step: Step, storages: set[int], rows: slice) -> set[int]:
    """Return those of `storages` that the rows `rows` of the uses hold."""
    known = _sorted(step)

    def is_used(storage: int) -> bool:
        begin, end = known.storage_starts[storage], known.storage_starts[storage + 1]
        at = bisect_left(known.uses, rows.start, begin, end)
        return at < end and known.uses[at] < rows.stop

    return {each for each in storages if is_used(each)}
