"""More stages than ranks: the partition of smallest step time under which every rank's stages stay within its
memory.

What a partition costs hangs on all of its stages (a rank waits for what every other one does before it), so
no sum over neighbours says it, and a partition is judged by running it (`stages_on_ranks.steps_s`), many at
once. Two rules:

Rule 1. Of a number of stages into which there are few partitions, all are judged.
Rule 2. Of any other, those next to the best so far are, from partitions even in seconds and in bytes, until
none is better.
        Next to it: neighbouring bounds are moved by a block or two, together; a block so goes from one stage
        to any other.

Source: Feng et al. 2023, Mobius (ASPLOS 23), section 3.2, which states the same choice as a mixed-integer
program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memtune.offload.layer_major import OnRanks, Span
from memtune.offload.layer_major import balanced as even_bytes
from memtune.offload.multiplexed.stage_placement_planner import TurnBytes, TurnCosts, needed_bytes, steps_s
from memtune.parallel.pipeline import balanced as even_seconds
from memtune.program import F64, I64

MOST_JUDGED = 20_000_000
"""Partitions × micro-batches × stages that Rule 1 judges: about a second."""
_MOVES = 600
"""About as many partitions are next to one."""
_ROUNDS = 60
_AT_ONCE = 2_000_000
"""Partitions × micro-batches in memory at once."""


@dataclass(frozen=True, eq=False)
class Partitions:
    """All partitions of a chain into some numbers of stages, and what is known of them.

    Args:
        costs: Seconds of each block.
        sizes: Bytes of each block.
        cuts: Blocks that may begin a stage, but for the first.
        micro_batches: Of all ranks.
        mapping: From a number of stages to where each of them is.
        prefetch: The next stage's weights come in while one computes.
        waiting_bytes: Of what a stage starts from, in all micro-batches, where that waits on the device.
        most_judged: See `MOST_JUDGED`.
    """

    costs: TurnCosts
    sizes: TurnBytes
    cuts: Sequence[int]
    micro_batches: int
    mapping: Callable[[int], tuple[int, ...]]
    prefetch: bool = True
    waiting_bytes: int = 0
    most_judged: int = MOST_JUDGED
    _judged: dict[int, tuple[I64, F64, F64]] = field(default_factory=dict)
    """By number of stages, where Rule 1 holds: bounds, needed bytes, seconds."""
    _even: dict[int, list[I64]] = field(default_factory=dict)
    """By number of stages, where Rule 2 begins."""

    def fastest(self, counts: Sequence[int], room: F64) -> OnRanks | None:
        """The fastest one, of such with the fewest stages, whose `needed` bytes are within `room`; None where
        there is none.

        Args:
            counts: Numbers of stages.
            room: (ranks,) bytes for blocks on each.
        """
        found = [each for count in counts if (each := self._fastest_of(count, room)) is not None]
        if not found:
            return None
        _, bounds = min(found, key=lambda each: (each[0], len(each[1])))
        return self.layout(bounds)

    def needed(self, layout: OnRanks) -> F64:
        """(ranks,) most bytes of blocks on each."""
        found: F64 = self._needed(np.array([[0, *(end for _, end in layout.stages)]]))[0]
        return found

    def smallest(self, counts: Sequence[int]) -> OnRanks:
        """That into most stages, even in bytes."""
        return self.over_pieces(
            even_bytes(self.piece_bytes, max(count for count in counts if count < len(self._ends)))
        )

    @property
    def piece_bytes(self) -> list[int]:
        """Bytes that the blocks between two places where stages may begin need in backward."""
        need = np.add.reduce([self.sizes.weights, self.sizes.gradients, self.sizes.saved])
        return [int(each) for each in np.add.reduceat(need, self._ends[:-1])]

    def over_pieces(self, stages: Sequence[Span]) -> OnRanks:
        """Stages of such pieces."""
        return self.layout(self._ends[[0, *(end for _, end in stages)]])

    def layout(self, bounds: I64) -> OnRanks:
        """The stages between `bounds`."""
        ends = [int(each) for each in bounds]
        return OnRanks(tuple(itertools.pairwise(ends)), self.mapping(len(ends) - 1), self.prefetch)

    def _fastest_of(self, count: int, room: F64) -> tuple[float, I64] | None:
        pieces = len(self.cuts) + 1
        if not 1 <= count <= pieces:
            return None
        if math.comb(pieces - 1, count - 1) * self.micro_batches * count <= self.most_judged:
            bounds, needed, seconds = self._all(count)
            seconds = np.where((needed <= room).all(1), seconds, np.inf)
            best = int(seconds.argmin())
            return (float(seconds[best]), bounds[best]) if np.isfinite(seconds[best]) else None
        found = [self._descend(start, room) for start in self._starts(count)]
        within = [(seconds, bounds) for over, seconds, bounds in found if over == 0.0]
        return min(within, key=lambda each: each[0], default=None)

    @property
    def _ends(self) -> I64:
        """Where a stage may begin or end."""
        return np.array([0, *self.cuts, len(self.costs.forward_s)])

    def _all(self, count: int) -> tuple[I64, F64, F64]:
        """Rule 1."""
        if count not in self._judged:
            pieces = len(self.cuts) + 1
            inner = itertools.combinations(range(1, pieces), count - 1)
            bounds = self._ends[np.array([(0, *each, pieces) for each in inner])]
            self._judged[count] = (bounds, *self._judge(bounds))
        return self._judged[count]

    def _judge(self, bounds: I64) -> tuple[F64, F64]:
        """Needed bytes and seconds."""
        ranks = self.mapping(bounds.shape[1] - 1)
        parts = np.array_split(bounds, -(-len(bounds) * self.micro_batches // _AT_ONCE))
        each = [
            steps_s(self.costs, part, ranks, self.micro_batches, prefetch=self.prefetch) for part in parts
        ]
        return self._needed(bounds), np.concatenate(each)

    def _needed(self, bounds: I64) -> F64:
        ranks = self.mapping(bounds.shape[1] - 1)
        waiting = np.bincount(ranks[1:-1], minlength=max(ranks) + 1) * self.waiting_bytes
        found: F64 = needed_bytes(self.sizes, bounds, ranks, prefetch=self.prefetch) + waiting
        return found

    def _starts(self, count: int) -> list[I64]:
        """Rule 2: where it begins, as places among `_ends`."""
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
        """Rule 2: bytes too many, seconds and bounds of the best that is found from `start`."""
        ends, moves = self._ends, _moves(len(start) - 1)
        best, at = self._rank(ends[start[None]], room)[0], start
        for _ in range(_ROUNDS):
            near = at + moves
            near = near[(np.diff(near, axis=1) > 0).all(1)]
            if not len(near):
                break
            ranked = self._rank(ends[near], room)
            first = int(np.lexsort((ranked[:, 1], ranked[:, 0]))[0])
            if tuple(ranked[first]) >= tuple(best):
                break
            best, at = ranked[first], near[first]
        return float(best[0]), float(best[1]), ends[at]

    def _rank(self, bounds: I64, room: F64) -> F64:
        """(p, 2) bytes too many on all ranks, and seconds."""
        needed, seconds = self._judge(bounds)
        return np.stack([np.maximum(needed - room, 0.0).sum(1), seconds], axis=1)


def _moves(count: int) -> I64:
    """(moves, count + 1) what Rule 2 adds to bounds: to the inner ones from the i-th to the j-th."""
    inner = range(1, count)
    longest = max(1, min(count, _MOVES // max(4 * count, 1)))
    runs = [(first, end) for first in inner for end in range(first + 1, min(first + longest, count) + 1)]
    moves = np.zeros((4 * len(runs), count + 1), np.int64)
    for number, ((first, end), by) in enumerate(itertools.product(runs, (-1, 1, -2, 2))):
        moves[number, first:end] = by
    return moves
