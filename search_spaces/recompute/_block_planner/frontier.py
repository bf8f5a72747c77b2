"""Choose an option for each block: all plans that no other beats in both peak and time, for every budget at
once.

Pure functions over frozen arrays. A block's options differ in the bytes that it holds between its forward and
its backward, in the bytes that it needs while it runs, and in seconds. Blocks run forward in order and
backward in reverse, so what block i holds counts at every moment from its own forward to its own backward.
The *need* of blocks i, i + 1, … on top of what the blocks before them hold is

    need(i) = max(held(i, option) + need(i + 1), own(i, option)),
    need(after the last) = live bytes between the last forward and the first backward.

Hence a plan for the blocks from i on is fully described by two numbers, its need and its seconds. Dynamic
programming over the undominated pairs, from the last block to the first, solves every budget at once. It is
exact as long as no more than `width` pairs are undominated; beyond that, `_spread` thins them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.program import F64, I32, I64

WIDTH = 512
_REMEMBERED = 2048
"""Cached layers, of at most 15 kB each."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Bytes and seconds of the options of all blocks, (blocks, options) each, blocks in forward order.

    A block with fewer options than others repeats its last one.
    """

    held_bytes: I64
    """Bytes held from the block's forward to its backward."""
    own_bytes: I64
    """Largest live bytes while the block runs, forward or backward, without those of earlier blocks."""
    seconds: F64
    """Seconds that the option costs compared with keeping everything."""
    class_of: I32
    """(blocks,) class of each block; blocks of one class are equal."""
    after_bytes: int
    """Largest live bytes between the last block's forward and its backward, without what the blocks hold."""
    rest_bytes: int
    """Largest live bytes at other moments: before forward, after backward, in the optimizer."""

    def cost(self, choice: I32) -> tuple[int, float]:
        """Return peak bytes and seconds for one option per block."""
        rows = np.arange(len(choice))
        held = self.held_bytes[rows, choice]
        before = np.cumsum(held) - held
        own = int((before + self.own_bytes[rows, choice]).max(initial=0))
        peak = max(own, int(held.sum()) + self.after_bytes, self.rest_bytes)
        return peak, float(self.seconds[rows, choice].sum())


@dataclass(frozen=True, eq=False)
class _Layer:
    """Undominated plans of the blocks from one on: need ascending, seconds descending."""

    need: I64
    seconds: F64
    changes: I32
    """Number of changes of option between neighbours of one class; the least among equal plans."""
    option: I32
    """Option of the first block."""
    rest: I32
    """Row of the plan of the blocks after it, in the next layer."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """All undominated plans: peaks ascending, seconds descending."""

    problem: Problem
    layers: tuple[_Layer, ...]
    """One layer per block, by first block."""

    @cached_property
    def _rows(self) -> npt.NDArray[np.intp]:
        peaks = np.maximum(self.layers[0].need, self.problem.rest_bytes)
        last = np.append(np.diff(peaks) > 0, True)  # of plans with equal peaks the last is the fastest
        return np.flatnonzero(last)

    @cached_property
    def peak_bytes(self) -> I64:
        """(plans,) ascending."""
        return np.maximum(self.layers[0].need[self._rows], self.problem.rest_bytes)

    @cached_property
    def seconds(self) -> F64:
        """(plans,) descending."""
        return self.layers[0].seconds[self._rows]

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._rows)

    def row_within(self, budget_bytes: int) -> int:
        """Return the row of the fastest plan within the budget, -1 if there is none."""
        # Rows are looked up, not solved for, so a larger budget never gives a slower plan, nor a
        # smaller one a larger plan.
        return int(np.searchsorted(self.peak_bytes, budget_bytes, side="right")) - 1

    def choice(self, row: int) -> I32:
        """Return the (blocks,) options of plan `row`; among equal blocks later ones hold more if they can."""
        at, found = int(self._rows[row]), []
        for layer in self.layers:
            found.append(int(layer.option[at]))
            at = int(layer.rest[at])
        choice = np.asarray(found, np.int32)
        tidy = _group_equal_options(self.problem, choice)
        # Equal blocks may be exchanged unless one's window peaks elsewhere after the later passes.
        return tidy if self.problem.cost(tidy)[0] <= self.peak_bytes[row] else choice


def solve(problem: Problem, width: int = WIDTH) -> Frontier:
    """Return the frontier of `problem`, keeping at most `width` plans per layer."""
    layer, layers = _after_the_last(problem.after_bytes), list[_Layer]()
    # Backwards, because `need` of a block refers to the blocks after it.
    for block in range(len(problem.class_of) - 1, -1, -1):
        same_class = (
            block + 1 < len(problem.class_of) and problem.class_of[block] == problem.class_of[block + 1]
        )
        rows = _BlockColumns(
            *(each[block].tobytes() for each in (problem.held_bytes, problem.own_bytes, problem.seconds))
        )
        layer = _step_back(rows, layer, bool(same_class), width)
        layers.append(layer)
    return Frontier(problem, tuple(reversed(layers)))


@lru_cache(maxsize=64)
def _after_the_last(after_bytes: int) -> _Layer:
    """Return the layer after the last block; cached: equal layers are one key in `_step_back`'s cache."""
    none = np.zeros(1, np.int32)
    return _Layer(np.asarray([after_bytes], np.int64), np.zeros(1), none, none - 1, none)


class _BlockColumns(NamedTuple):
    """One block's columns of a problem, (options,) each, as bytes: a hashable cache key of a layer."""

    held: bytes
    own: bytes
    seconds: bytes

    def columns(self) -> tuple[I64, I64, F64]:
        """Return the columns as arrays."""
        return (
            np.frombuffer(self.held, np.int64),
            np.frombuffer(self.own, np.int64),
            np.frombuffer(self.seconds),
        )


@lru_cache(maxsize=_REMEMBERED)
def _step_back(rows: _BlockColumns, after: _Layer, same_class: bool, width: int) -> _Layer:
    """Return the plans that begin one block earlier. Problems share layers of equal last blocks."""
    options = _undominated_options(rows)
    held, own, takes = (each[options, None] for each in rows.columns())
    # The recurrence of the module docstring, for all pairs of an option and a later plan.
    need = np.maximum(held + after.need, own).ravel()
    seconds = (takes + after.seconds).ravel()
    changes = (after.changes + (same_class & (after.option != options[:, None]))).ravel()
    order = _undominated(need, seconds, changes)
    if len(order) > width:
        order = order[_spread(need[order], seconds[order], width)]
    # The inverse of `ravel`: rows are options, columns plans of the later blocks.
    option, rest = np.divmod(order, len(after.need))
    return _Layer(
        need[order], seconds[order], changes[order].astype(np.int32), options[option], rest.astype(np.int32)
    )


def _undominated(need: I64, seconds: F64, changes: I32) -> npt.NDArray[np.intp]:
    """Return the undominated rows, by need; of rows equal in both, the first one with the fewest changes."""
    # Stable: among rows equal in both, and in changes, the option listed first wins.
    order = np.argsort(need, kind="stable")
    least, mine = need[order], seconds[order]
    is_last = np.ones(len(order), bool)  # in each run of rows with equal need
    np.not_equal(least[1:], least[:-1], out=is_last[:-1])
    last = np.flatnonzero(is_last)
    # The last row of a run decides for it: by then every row with that need or less has been seen.
    fastest = np.minimum.accumulate(mine)[last]
    # Sums of the same seconds in another order differ in their last bits: a relative tolerance keeps such
    # duplicates off the frontier.
    better = np.ones(len(last), bool)
    np.less(fastest[1:], fastest[:-1] * (1 - 1e-12) - 1e-15, out=better[1:])
    found = np.flatnonzero(mine == np.repeat(np.where(better, fastest, np.nan), np.diff(last, prepend=-1)))
    order = order[found]
    if len(found) > np.count_nonzero(better):
        of = np.searchsorted(last, found)
        is_first = np.ones(len(of), bool)
        np.not_equal(of[1:], of[:-1], out=is_first[1:])
        order = order[np.lexsort((changes[order], of))][is_first]
    return order


def _spread(need: I64, seconds: F64, width: int) -> npt.NDArray[np.intp]:
    """Return up to `width` rows: the ends, and from intervals of need the fastest and the nearest hull."""
    # Many blocks need the rows near the hull: a mix of a few such plans comes closest to any budget.
    # Two rows an interval are kept, the fastest and the one near the hull, besides the ends.
    count = max(width // 2 - 1, 1)
    interval = ((need - need[0]) * count) // (need[-1] - need[0] + 1)
    last = np.flatnonzero(np.append(np.diff(interval) > 0, True))
    first = np.append(0, last[:-1] + 1)
    far = max(len(last) // 16, 1)
    before = last[np.maximum(np.arange(len(last)) - far, 0)]
    after = last[np.minimum(np.arange(len(last)) + far, len(last) - 1)]
    # The slope over a few intervals approximates that of the lower hull, so one pass over columns suffices.
    per_byte = (seconds[before] - seconds[after]) / np.maximum(need[after] - need[before], 1)
    each = last - first + 1
    above = seconds + np.repeat(per_byte, each) * need
    kept = np.zeros(len(need), bool)
    kept[0] = True
    kept[last] = True
    lowest = np.flatnonzero(above == np.repeat(np.minimum.reduceat(above, first), each))
    kept[lowest[np.searchsorted(lowest, first)]] = True  # the first of equal rows
    return np.flatnonzero(kept)


@lru_cache(maxsize=64)
def _undominated_options(rows: _BlockColumns) -> I32:
    """Return the options of a block that no other one beats in all three columns; of equal ones the first."""
    no_worse = np.logical_and.reduce(
        [each[None] <= each[:, None] for each in rows.columns()]
    )  # [i, j]: j is no worse than i in any column
    before = np.tri(
        len(no_worse), k=-1, dtype=bool
    )  # [i, j]: j comes before i, so of equal options the first is kept
    beaten = (no_worse & (before | ~no_worse.T)).any(axis=1)
    return np.flatnonzero(~beaten).astype(np.int32)


def _group_equal_options(problem: Problem, choice: I32) -> I32:
    """Return `choice` with equal blocks' options sorted: blocks that are freed first hold more."""
    tidy = choice.copy()
    for each in np.unique(problem.class_of):
        blocks = np.flatnonzero(problem.class_of == each)
        options = choice[blocks]
        tidy[blocks] = options[np.argsort(problem.held_bytes[blocks[0], options], kind="stable")]
    return tidy
