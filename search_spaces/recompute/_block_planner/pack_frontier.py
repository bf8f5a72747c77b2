"""Plans for blocks that run pack by pack over all micro-batches (layer-major), priced on the plain step as
packs rewrite it.

A pack's blocks hold what they saved only while that pack runs backward, for one micro-batch. Packs therefore
do not share the budget: each takes its fastest plan within all of it, and the fastest plan of a model
consists of the fastest one of each pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.program import F64, I32, I64, Phase, Program, Step
from memtune.search_spaces.recompute._block_planner.frontier import Frontier, Problem, solve
from memtune.search_spaces.recompute._block_planner.measured_options import Levels, live_bytes

Spans = Sequence[tuple[int, int]]
_AGAIN = (Phase.RECOMPUTE, Phase.BACKWARD)


class PackFrontier:
    """Undominated plans, peaks ascending, seconds descending; the interface of `frontier.Frontier`, each pack
    solved by itself.

    Args:
        found: Options of the blocks.
        program: The plain program as packs rewrite it.
        spans: First block of each pack that runs backward, and the one after its last; in the order of
            `found.order`.
        hardware: Gives the allocator's rounding.
    """

    def __init__(self, found: Levels, program: Program, spans: Spans, hardware: Hardware) -> None:
        parts = [_measured(each.step, spans, hardware) for each in program.rank_classes]
        now = _PackPeaks(*(np.maximum.reduce(column) for column in zip(*parts, strict=True)))
        self._packs = [
            solve(_problem(found, span, now, int(now.between[at]))) for at, span in enumerate(spans)
        ]
        self._rest_bytes = int(now.rest_bytes)

    @cached_property
    def peak_bytes(self) -> I64:
        """(plans,) ascending."""
        needs = np.unique(np.concatenate([each.peak_bytes for each in self._packs]))
        least = max(self._rest_bytes, *(int(each.peak_bytes[0]) for each in self._packs))
        found: I64 = np.append(least, needs[needs > least])
        return found

    @cached_property
    def seconds(self) -> F64:
        """(plans,) descending."""
        rows = [np.searchsorted(each.peak_bytes, self.peak_bytes, side="right") - 1 for each in self._packs]
        found: F64 = np.sum(
            [each.seconds[mine] for each, mine in zip(self._packs, rows, strict=True)], axis=0
        )
        return found

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self.peak_bytes)

    def at(self, budget_bytes: int) -> int:
        """Return the row of the fastest plan within the budget, -1 if there is none."""
        return int(np.searchsorted(self.peak_bytes, budget_bytes, side="right")) - 1

    def choice(self, row: int) -> I32:
        """Return the (blocks,) option of each block in plan `row`."""
        budget = int(self.peak_bytes[row])
        found: I32 = np.concatenate([each.choice(each.at(budget)) for each in self._packs])
        return found


AnyFrontier = Frontier | PackFrontier


class _PackPeaks(NamedTuple):
    """Largest live bytes of the plain step under packs."""

    forward: I64
    """(blocks,) in forward, for forwards that the same pack's backward follows."""
    backward: I64
    """(blocks,) in backward."""
    between: I64
    """(packs,) while a pack is in backward and none of its blocks runs."""
    rest_bytes: I64
    """() at any other moment."""


def _measured(step: Step, spans: Spans, hardware: Hardware) -> _PackPeaks:
    live, n_blocks = live_bytes(step, hardware), spans[-1][1]
    # The last pack runs backward right after its forward, so that its forward counts as well.
    block, last_pack = step.ops.block, spans[-1][0]
    again = np.isin(step.ops.phase, _AGAIN) | ((block >= last_pack) & (step.ops.phase == Phase.FORWARD))
    mine = (block >= 0) & again
    back = step.ops.phase == Phase.BACKWARD
    forward, backward = (_most(live, block, mine & rows, n_blocks) for rows in (~back, back))
    inside: npt.NDArray[np.bool_] = mine.copy()
    between = np.zeros(len(spans), np.int64)
    for pack, (first, end) in enumerate(spans):
        rows = np.flatnonzero(mine & (block >= first) & (block < end))
        if len(rows):
            outside = np.flatnonzero(~mine[rows[0] : rows[-1]]) + rows[0]
            between[pack] = live[outside].max(initial=0)
            inside[outside] = True
    return _PackPeaks(forward, backward, between, np.asarray(live[~inside].max(initial=0)))


def _most(live: I64, block: I32, rows: npt.NDArray[np.bool_], n_blocks: int) -> I64:
    found = np.zeros(n_blocks, np.int64)
    np.maximum.at(found, block[rows], live[rows])
    return found


def _problem(found: Levels, span: tuple[int, int], now: _PackPeaks, between_bytes: int) -> Problem:
    """Return the problem of one pack: the options' needs in the plain step, corrected by the live bytes under
    packs.
    """
    mine, pack = slice(*span), found.order[slice(*span)]
    held = found.held_bytes[mine]
    before = np.cumsum(held[:, 0]) - held[:, 0]
    forward, backward = (
        own[mine] - own[mine, :1] + (live[pack] - before)[:, None]
        for own, live in ((found.forward_bytes, now.forward), (found.backward_bytes, now.backward))
    )
    between = between_bytes - int(held[:, 0].sum())
    return Problem(held, np.maximum(forward, backward), found.seconds[mine], found.class_of[mine], between, 0)
