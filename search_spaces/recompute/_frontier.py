"""Which option each block takes: all plans that no other beats in both peak and time, found at once for every budget.

Pure functions over frozen arrays. A block's options differ in what it holds between its forward and its backward, in what
it needs while it runs, and in seconds. Blocks run forward in order and backward in reverse, so what block i holds counts at
every moment from its own forward to its own backward, and the *need* of blocks i, i + 1, … on top of what the blocks before
them hold is

    need(i) = max(held(i, option) + need(i + 1), own(i, option)),    need(after the last) = what the step has there.

Hence a plan for the blocks from i on is fully described by two numbers, its need and its seconds, and walking from the last
block to the first with the undominated pairs solves every budget at once. It is exact as long as no more than `width` pairs
are undominated; beyond that `_spread` says which are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memtune.program import F64, I32, I64

WIDTH = 512


@dataclass(frozen=True, eq=False)
class Problem:
    """What the options of all blocks need and take; (blocks, options) each, blocks in forward order.

    A block with fewer options than others repeats its last one.
    """

    held_bytes: I64
    """Held from the block's forward to its backward."""
    own_bytes: I64
    """Most bytes while the block itself runs, forward or backward, without what the blocks before it hold."""
    seconds: F64
    """What the option costs beyond keeping everything."""
    class_of: I32
    """(blocks,) equal blocks have equal numbers."""
    after_bytes: int
    """Most bytes between the last block's forward and its backward, without what the blocks hold."""
    rest_bytes: int
    """Most bytes at any other moment: before the first block's forward, after its backward, in the optimizer."""

    def cost(self, choice: I32) -> tuple[int, float]:
        """Peak bytes and seconds of one option per block, moment by moment."""
        rows = np.arange(len(choice))
        held = self.held_bytes[rows, choice]
        before = np.cumsum(held) - held
        own = int((before + self.own_bytes[rows, choice]).max(initial=0))
        peak = max(own, int(held.sum()) + self.after_bytes, self.rest_bytes)
        return peak, float(self.seconds[rows, choice].sum())


@dataclass(frozen=True, eq=False)
class _Layer:
    """The undominated plans of the blocks from one on: need ascending, seconds descending."""

    need: I64
    seconds: F64
    changes: I32
    """How often the option changes between neighbours of one class; the least among equal plans."""
    option: I32
    """Option of the first block …"""
    rest: I32
    """… and the plan of the blocks after it."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """Every plan worth having: peaks ascending, seconds descending."""

    problem: Problem
    layers: tuple[_Layer, ...]
    """By first block."""

    @cached_property
    def _rows(self) -> npt.NDArray[np.intp]:
        peaks = np.maximum(self.layers[0].need, self.problem.rest_bytes)
        last = np.append(np.diff(peaks) > 0, True)  # of equal peaks the last is the fastest
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
        """Number of plans."""
        return len(self._rows)

    def at(self, budget_bytes: int) -> int:
        """Row of the fastest plan within the budget, -1 if there is none.

        Rows are looked up, not solved for, so a larger budget never gives a slower plan nor a smaller one a larger plan.
        """
        return int(np.searchsorted(self.peak_bytes, budget_bytes, side="right")) - 1

    def choice(self, row: int) -> I32:
        """(blocks,) option of each block in plan `row`; among equal blocks later ones keep more, if that needs no more."""
        at, found = int(self._rows[row]), []
        for layer in self.layers:
            found.append(int(layer.option[at]))
            at = int(layer.rest[at])
        choice = np.asarray(found, np.int32)
        tidy = _in_runs(self.problem, choice)
        return tidy if self.problem.cost(tidy)[0] <= self.peak_bytes[row] else choice


def solve(problem: Problem, width: int = WIDTH) -> Frontier:
    """The frontier of `problem`."""
    none = np.zeros(1, np.int32)
    layer = _Layer(np.asarray([problem.after_bytes], np.int64), np.zeros(1), none, none - 1, none)
    layers: list[_Layer] = []
    unbeaten = _unbeaten(problem)
    for block in range(len(problem.class_of) - 1, -1, -1):
        layer = _step_back(problem, block, np.flatnonzero(unbeaten[block]).astype(np.int32), layer, width)
        layers.append(layer)
    return Frontier(problem, tuple(reversed(layers)))


def _step_back(problem: Problem, block: int, options: I32, after: _Layer, width: int) -> _Layer:
    held, own = problem.held_bytes[block, options, None], problem.own_bytes[block, options, None]
    need = np.maximum(held + after.need, own).ravel()
    seconds = (problem.seconds[block, options, None] + after.seconds).ravel()
    order = _fastest_so_far(need, seconds)
    count = len(after.need)
    option, rest = options[order // count], order % count
    need, seconds, changes = need[order], seconds[order], after.changes[rest]
    if block + 1 < len(problem.class_of) and problem.class_of[block] == problem.class_of[block + 1]:
        changes = changes + (after.option[rest] != option)
    order = np.lexsort((changes, seconds, need))
    best = np.minimum.accumulate(seconds[order])
    # Sums of the same seconds in another order differ in their last bits, which is no reason to be on the frontier.
    better = np.append(True, best[1:] < best[:-1] * (1 - 1e-12) - 1e-15)
    order = order[better]
    if len(order) > width:
        order = order[_spread(need[order], seconds[order], width)]
    return _Layer(need[order], seconds[order], changes[order].astype(np.int32), option[order], rest[order].astype(np.int32))


def _fastest_so_far(need: I64, seconds: F64) -> npt.NDArray[np.intp]:
    """Rows than which none that needs less is faster: of many, the few that are worth putting in order by all there is."""
    order = np.argsort(need, kind="stable")  # each option's are in order already, which makes it cheap
    found: npt.NDArray[np.intp] = order[seconds[order] <= np.minimum.accumulate(seconds[order])]
    return found


def _spread(need: I64, seconds: F64, width: int) -> npt.NDArray[np.intp]:
    """At most `width` rows: the ends, and of each equal interval of need the fastest and the one nearest to the lower hull.

    The second one is what many blocks together need: a mix of a few such plans comes closest to any budget.
    """
    count = max(width // 2 - 1, 1)
    interval = ((need - need[0]) * count) // (need[-1] - need[0] + 1)
    last = np.flatnonzero(np.append(np.diff(interval) > 0, True))
    far = max(len(last) // 16, 1)
    before, after = last[np.maximum(np.arange(len(last)) - far, 0)], last[np.minimum(np.arange(len(last)) + far, len(last) - 1)]
    per_byte = (seconds[before] - seconds[after]) / np.maximum(need[after] - need[before], 1)
    place = np.repeat(np.arange(len(last)), np.diff(last, prepend=-1))
    order = np.lexsort((seconds + per_byte[place] * need, place))
    nearest = order[np.append(0, last[:-1] + 1)]
    chosen = np.zeros(len(need), bool)
    chosen[0] = chosen[last] = chosen[nearest] = True
    return np.flatnonzero(chosen)


def _unbeaten(problem: Problem) -> npt.NDArray[np.bool_]:
    """(blocks, options) that no other option of the block beats in all three columns; of equal ones the first."""
    n_options = problem.seconds.shape[1]
    first = np.arange(n_options)[:, None] < np.arange(n_options)  # by (other, option)
    no_worse = np.ones((len(problem.seconds), n_options, n_options), bool)
    no_better = no_worse.copy()
    for column in (problem.held_bytes, problem.own_bytes, problem.seconds):
        no_worse &= column[:, :, None] <= column[:, None]
        no_better &= column[:, :, None] >= column[:, None]
    unbeaten: npt.NDArray[np.bool_] = np.all(~no_worse | (no_better & ~first), axis=1)
    return unbeaten


def _in_runs(problem: Problem, choice: I32) -> I32:
    """`choice` with the options of equal blocks in runs: those that hold more go to the blocks that are freed first."""
    tidy = choice.copy()
    for each in np.unique(problem.class_of):
        blocks = np.flatnonzero(problem.class_of == each)
        options = choice[blocks]
        tidy[blocks] = options[np.argsort(problem.held_bytes[blocks[0], options], kind="stable")]
    return tidy
