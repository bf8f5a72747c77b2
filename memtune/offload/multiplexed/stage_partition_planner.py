"""Fastest partition into multiplexed stages on several ranks whose stages fit in each rank's memory.

A rank waits for all that other ranks do before it, so the cost of a partition depends on all stages and is no
sum over neighbours. Partitions are evaluated by simulation (`stage_placement_planner.steps_s`), many at once:

Rule 1. For a number of stages with few partitions, all are evaluated.
Rule 2. For others, a local search starts from partitions even in seconds and in bytes, and evaluates the
  neighbours of the best partition until none is better. A neighbour moves adjacent bounds by a block or two,
  together, so a block can move from one stage to any other.

Source: Feng et al. 2023, Mobius (ASPLOS 23), section 3.2, which states the same choice as a mixed-integer
program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memtune.offload.layer_major import Span, StageLayout, balanced as even_bytes
from memtune.offload.multiplexed.stage_placement_planner import BlockBytes, BlockCosts, needed_bytes, steps_s
from memtune.parallel.pipeline import balanced as even_seconds
from memtune.program import F64, I64

EVALUATED_MAX = 20_000_000
"""Partitions × micro-batches × stages that Rule 1 evaluates: about a second."""
_MOVES = 600
"""Approximate number of neighbours of a partition."""
_ROUNDS = 60
_AT_ONCE = 2_000_000
"""Partitions × micro-batches in memory at once."""


@dataclass(frozen=True, eq=False)
class Partitions:
    """The partitions of a chain into numbers of stages, with cached evaluations.

    Args:
        costs: Seconds of each block.
        sizes: Bytes of each block.
        cuts: Blocks that may begin a stage, without the first.
        micro_batches: Of all ranks.
        mapping: From a number of stages to the rank of each.
        prefetch: The next stage's weights are prefetched while one computes.
        waiting_bytes: Bytes of a stage's arguments in all micro-batches, if they wait on the device.
        evaluated_max: See `EVALUATED_MAX`.
    """

    costs: BlockCosts
    sizes: BlockBytes
    cuts: Sequence[int]
    micro_batches: int
    mapping: Callable[[int], tuple[int, ...]]
    prefetch: bool = True
    waiting_bytes: int = 0
    evaluated_max: int = EVALUATED_MAX
    _evaluated: dict[int, tuple[I64, F64, F64]] = field(default_factory=dict)
    """Under Rule 1, by number of stages: bounds, needed bytes, seconds."""
    _even: dict[int, list[I64]] = field(default_factory=dict)
    """Under Rule 2, by number of stages: partitions where the search starts."""

    def fastest(self, counts: Sequence[int], room: F64) -> StageLayout | None:
        """Return the fastest layout of `counts` stages that fits into `room` of each rank, if any does.

        Args:
            counts: Numbers of stages.
            room: (ranks,) bytes for blocks on each.
        """
        # With the fewest stages among equals.
        found = [each for count in counts if (each := self._fastest_of(count, room)) is not None]
        if not found:
            return None
        _, bounds = min(found, key=lambda each: (each[0], len(each[1])))
        return self.layout(bounds)

    def needed(self, layout: StageLayout) -> F64:
        """Return (ranks,) the largest bytes of blocks on each."""
        found: F64 = self._needed(np.array([[0, *(end for _, end in layout.stages)]]))[0]
        return found

    def smallest(self, counts: Sequence[int]) -> StageLayout:
        """Return the layout with the most stages, even in bytes."""
        return self.over_pieces(
            even_bytes(self.piece_bytes, max(count for count in counts if count < len(self._ends)))
        )

    @property
    def piece_bytes(self) -> list[int]:
        """Bytes that the blocks between two neighbouring cuts need in backward."""
        need = np.add.reduce([self.sizes.weights, self.sizes.gradients, self.sizes.saved])
        return [int(each) for each in np.add.reduceat(need, self._ends[:-1])]

    def over_pieces(self, stages: Sequence[Span]) -> StageLayout:
        """Return the layout of stages given in pieces between cuts."""
        return self.layout(self._ends[[0, *(end for _, end in stages)]])

    def layout(self, bounds: I64) -> StageLayout:
        """Return the layout of the stages between `bounds`."""
        ends = [int(each) for each in bounds]
        return StageLayout(tuple(itertools.pairwise(ends)), self.mapping(len(ends) - 1), self.prefetch)

    def _fastest_of(self, count: int, room: F64) -> tuple[float, I64] | None:
        pieces = len(self.cuts) + 1
        if not 1 <= count <= pieces:
            return None
        if math.comb(pieces - 1, count - 1) * self.micro_batches * count <= self.evaluated_max:
            bounds, needed, seconds = self._enumerate(count)
            seconds = np.where((needed <= room).all(1), seconds, np.inf)
            best = int(seconds.argmin())
            return (float(seconds[best]), bounds[best]) if np.isfinite(seconds[best]) else None
        # Two starts, because the best partition lies between even seconds and even bytes.
        found = [self._descend(start, room) for start in self._starts(count)]
        within = [(seconds, bounds) for over, seconds, bounds in found if over == 0.0]
        return min(within, key=lambda each: each[0], default=None)

    @property
    def _ends(self) -> I64:
        """Bounds that stages may have."""
        return np.array([0, *self.cuts, len(self.costs.forward_s)])

    def _enumerate(self, count: int) -> tuple[I64, F64, F64]:
        """Return bounds, needed bytes and seconds of all partitions (Rule 1)."""
        if count not in self._evaluated:
            pieces = len(self.cuts) + 1
            inner = itertools.combinations(range(1, pieces), count - 1)
            bounds = self._ends[np.array([(0, *each, pieces) for each in inner])]
            self._evaluated[count] = (bounds, *self._evaluate(bounds))
        return self._evaluated[count]

    def _evaluate(self, bounds: I64) -> tuple[F64, F64]:
        """Return needed bytes and seconds of partitions."""
        ranks = self.mapping(bounds.shape[1] - 1)
        parts = np.array_split(bounds, -(-len(bounds) * self.micro_batches // _AT_ONCE))
        each = [
            steps_s(self.costs, part, ranks, self.micro_batches, prefetch=self.prefetch) for part in parts
        ]
        return self._needed(bounds), np.concatenate(each)

    def _needed(self, bounds: I64) -> F64:
        ranks = self.mapping(bounds.shape[1] - 1)
        # Not of the first stage, whose arguments are the batch, nor of the last, whose backward follows its
        # forward.
        waiting = np.bincount(ranks[1:-1], minlength=max(ranks) + 1) * self.waiting_bytes
        found: F64 = needed_bytes(self.sizes, bounds, ranks, prefetch=self.prefetch) + waiting
        return found

    def _starts(self, count: int) -> list[I64]:
        """Return the partitions where the search starts, as indices into `_ends` (Rule 2)."""
        if count in self._even:
            return self._even[count]
        ends = self._ends
        need = np.add.reduce([self.sizes.weights, self.sizes.gradients, self.sizes.saved]).astype(np.float64)
        seconds = np.add(self.costs.forward_s, self.costs.backward_s)
        begins = even_seconds(seconds, np.broadcast_to(need, (count, len(need))), self.cuts, count)
        assert begins is not None, "there are as many pieces"
        by_bytes = even_bytes(self.piece_bytes, count)
        by_seconds = np.searchsorted(ends, [*begins, ends[-1]])
        self._even[count] = [by_seconds, np.array([0, *(end for _, end in by_bytes)])]
        return self._even[count]

    def _descend(self, start: I64, room: F64) -> tuple[float, float, I64]:
        """Search from `start`; return excess bytes, seconds and bounds of the best partition (Rule 2)."""
        ends, moves = self._ends, _moves(len(start) - 1)
        best, at = self._rank(ends[start[None]], room)[0], start
        for _ in range(_ROUNDS):
            near = at + moves
            # A stage must have at least one piece.
            near = near[(np.diff(near, axis=1) > 0).all(1)]
            if not len(near):
                break
            ranked = self._rank(ends[near], room)
            first = int(np.lexsort((ranked[:, 1], ranked[:, 0]))[0])
            # Excess bytes first: the search walks into the budget, then gets faster within it.
            if tuple(ranked[first]) >= tuple(best):
                break
            best, at = ranked[first], near[first]
        return float(best[0]), float(best[1]), ends[at]

    def _rank(self, bounds: I64, room: F64) -> F64:
        """Return (p, 2) excess bytes over all ranks, and seconds."""
        needed, seconds = self._evaluate(bounds)
        return np.stack([np.maximum(needed - room, 0.0).sum(1), seconds], axis=1)


def _moves(count: int) -> I64:
    """Return (moves, count + 1) the changes of bounds that lead to neighbours (Rule 2)."""
    inner = range(1, count)
    # Fewer joint moves for many stages, so that the number of neighbours stays about `_MOVES`.
    longest = max(1, min(count, _MOVES // max(4 * count, 1)))
    runs = [(first, end) for first in inner for end in range(first + 1, min(first + longest, count) + 1)]
    moves = np.zeros((4 * len(runs), count + 1), np.int64)
    for number, ((first, end), by) in enumerate(itertools.product(runs, (-1, 1, -2, 2))):
        moves[number, first:end] = by
    return moves
