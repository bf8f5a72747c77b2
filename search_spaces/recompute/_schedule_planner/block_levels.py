"""Plans of block schedules under later passes that run blocks in packs or offload what blocks keep.

Under such passes a block's own bytes do not tell how much it holds at which moment. A few *levels*, one
option for every block, are therefore rewritten through all later passes, and plans between them are priced by
interpolation. With packs, each pack takes the fastest level whose own peak is within the budget. Otherwise
blocks share the budget: the last blocks take the faster of two levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtune.activations.schedules import BlockRegions
from memtune.offload.layer_major import Span
from memtune.program import F64, I32, I64, Phase, Program, Schedule, Step
from memtune.search_spaces.recompute._block_planner import live_bytes, pack_spans
from memtune.search_spaces.recompute._schedule_planner.block_options import BlockOption
from memtune.search_spaces.recompute._schedule_planner.region_placement import Placement
from memtune.technique import Target

_LEVELS = 12
"""Number of levels: a block's options from the fastest to the smallest, evenly spaced."""
_BETWEEN = 4
"""Steps between two levels; in each step one more part of the blocks takes the slower level."""
_BUDGETS = 24
"""Number of budgets, evenly spaced, for which packs at different levels are considered."""
_AGAIN = (Phase.RECOMPUTE, Phase.BACKWARD)


@dataclass(frozen=True, eq=False)
class LevelFrontier:
    """Undominated plans, peaks ascending, seconds descending; the interface of `frontier.Frontier`."""

    peak_bytes: I64
    seconds: F64
    level: I32
    """(plans, blocks) level of each block."""

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self.peak_bytes)

    def at(self, budget_bytes: int) -> int:
        """Return the row of the fastest plan priced within the budget, -1 if there is none."""
        return int(np.searchsorted(self.peak_bytes, budget_bytes, side="right")) - 1


class LevelSearch:
    """Plans for the blocks of one step, by row of their frontier; true peaks are computed on demand.

    Args:
        place: The step and the later passes.
        regions: Regions of its blocks.
        options: Options of each block in the order of `regions.blocks`, the fastest first.
        rewritten: Rewrites the step by a schedule for each block.
    """

    def __init__(
        self,
        place: Placement,
        regions: BlockRegions,
        options: Sequence[Sequence[BlockOption]],
        rewritten: Callable[[Step, tuple[Schedule, ...]], Step],
    ) -> None:
        self._place, self._regions, self._rewritten = place, regions, rewritten
        count = min(max(map(len, options)), _LEVELS)
        self._options = [
            [each[round(at * (len(each) - 1) / max(count - 1, 1))] for at in range(count)] for each in options
        ]
        self._seconds = np.array([[each.seconds for each in mine] for mine in self._options])
        self._known: dict[bytes, list[Program]] = {}
        self._peaks: dict[int, int] = {}

    @cached_property
    def frontier(self) -> LevelFrontier:
        """All undominated plans."""
        plans = self._by_packs() or self._by_parts()
        peak, seconds = np.array([each[0] for each in plans]), np.array([each[1] for each in plans])
        # The usual sweep: by rising peak keep what is faster than all before.
        order = np.lexsort((seconds, peak))
        fastest = np.minimum.accumulate(seconds[order])
        order = order[np.append(True, fastest[1:] < fastest[:-1])]
        return LevelFrontier(
            peak[order].astype(np.int64), seconds[order], np.array([plans[at][2] for at in order], np.int32)
        )

    def schedules(self, row: int) -> tuple[Schedule, ...]:
        """Return the schedule of each block in plan `row`."""
        return self._schedules(self.frontier.level[row])

    def peak_of(self, row: int) -> int:
        """Return the peak of plan `row` after every pass."""
        if row not in self._peaks:
            self._peaks[row] = self._peak(self.frontier.level[row])
        return self._peaks[row]

    def _schedules(self, level: I32) -> tuple[Schedule, ...]:
        return tuple(mine[at].schedule for mine, at in zip(self._options, level.tolist(), strict=True))

    def _peak(self, level: I32) -> int:
        live = (live_bytes(each, self._place.hardware) for each in self._steps(self._after(level)))
        return max(int(each.max(initial=0)) for each in live)

    def _after(self, level: I32) -> Program:
        """Return the program after every later pass; the cache is small, since only recent levels are asked
        for again.
        """
        key = level.tobytes()
        if key not in self._known:
            if len(self._known) > _LEVELS:
                self._known.clear()
            self._known[key] = [
                self._place.program_after(self._rewritten(self._place.step, self._schedules(level)))
            ]
        return self._known[key][0]

    def _steps(self, program: Program) -> list[Step]:
        return [each.step for each in program.rank_classes]

    def _uniform(self) -> list[I32]:
        count, blocks = self._seconds.shape[1], len(self._options)
        return [np.full(blocks, at, np.int32) for at in range(count)]

    def _cost(self, level: I32) -> float:
        return float(self._seconds[np.arange(len(level)), level].sum())

    def _by_parts(self) -> list[tuple[int, float, I32]]:
        """Return each level, and between two of them plans whose last blocks take the faster one."""
        found, blocks = list[tuple[int, float, I32]](), len(self._options)
        before = 0
        for level in self._uniform():
            peak = self._peak(level)
            for part in range(1, _BETWEEN) if found else ():
                slower = blocks * part // _BETWEEN
                # The last blocks hold their values for the shortest time, so they take the faster level.
                mixed = np.where(np.arange(blocks) < slower, level, level - 1).astype(np.int32)
                found.append((before + (peak - before) * part // _BETWEEN, self._cost(mixed), mixed))
            found.append((peak, self._cost(level), level))
            before = peak
        return found

    def _by_packs(self) -> list[tuple[int, float, I32]]:
        """Return, for each budget, the plan with each pack at its fastest level; empty without packs or if
        they vary by level.

        A technique that forms packs by bytes may form others when levels differ: such mixed plans are
        dropped, the uniform levels are kept.
        """
        levels = self._uniform()
        spans = {self._spans(level) for level in levels}
        packs = next(iter(spans))
        # Peaks by pack have no meaning if a pack is another one at another level.
        if len(spans) > 1 or not packs:
            return []
        peaks = np.stack(
            [self._peaks_of(packs, level) for level in levels], axis=1
        )  # (packs + 1, levels); the last row is any other moment
        seconds = np.stack([self._seconds[slice(*span)].sum(axis=0) for span in packs])
        # No pack's level can lower the peak below this.
        rest = int(peaks[-1].max())
        least = max(rest, int(peaks[:-1].min(axis=1).max()))
        found = [
            (max(rest, int(peaks[:-1, at].max())), self._cost(level), level)
            for at, level in enumerate(levels)
        ]
        budgets = np.append(least, np.unique(peaks[peaks > least]))
        few = np.unique(np.linspace(0, len(budgets) - 1, min(len(budgets), _BUDGETS)).round().astype(int))
        for budget in budgets[few].tolist():
            priced = np.where(peaks[:-1] <= budget, seconds, np.inf)
            chosen = priced.argmin(axis=1)
            level = np.concatenate(
                [
                    np.full(end - first, at, np.int32)
                    for (first, end), at in zip(packs, chosen.tolist(), strict=True)
                ]
            )
            if np.ptp(chosen) and self._spans(level) == packs:
                found.append(
                    (max(rest, int(peaks[np.arange(len(packs)), chosen].max())), self._cost(level), level)
                )
        return found

    def _spans(self, level: I32) -> tuple[Span, ...]:
        """Return the first and last block of each pack."""
        place = self._place
        packs = next((each for each in place.later if each.effects.layer_major), None)
        if packs is None:
            return ()
        chosen = {each.slot: each for each in place.later}
        target = Target(place.hardware, place.ranks, place.pass_inputs.budget_bytes, chosen)
        program = place.program(self._rewritten(place.step, self._schedules(level)))
        return pack_spans(packs, packs.plan(program, target), len(self._options))

    def _peaks_of(self, packs: Sequence[Span], level: I32) -> I64:
        """Return the (packs + 1,) largest live bytes while each pack runs backward and, last, at any other
        moment.
        """
        found = np.zeros(len(packs) + 1, np.int64)
        of_block = np.repeat(np.arange(len(packs)), [end - first for first, end in packs])
        last_pack = packs[-1][0]
        for step in self._steps(self._after(level)):
            block = step.ops.block
            again = np.isin(step.ops.phase, _AGAIN) | (
                (block >= last_pack) & (step.ops.phase == Phase.FORWARD)
            )
            at = np.where((block >= 0) & again, np.arange(step.ops.n), -1)
            at = np.maximum.accumulate(at)  # ops between two block ops count for the pack of the first
            pack = np.where(at >= 0, of_block[block[np.maximum(at, 0)]], len(packs))
            np.maximum.at(found, pack, live_bytes(step, self._place.hardware))
        return found
