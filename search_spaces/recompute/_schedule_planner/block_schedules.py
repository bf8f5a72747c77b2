"""A schedule for each block, where parameters are there for a block's own calls alone.

Hooks of a block's module gather its parameters before its forward and its backward and let them go after. A
schedule of the block alone runs inside of both, so what it runs again finds the block's parameters, and
nothing is gathered once more.

Blocks hold bytes from their forward to their backward, so the budget is shared out as for plans by blocks:
`_frontier` has every plan that no other beats, priced moment by moment on the step after all later passes;
the rewritten step has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from memtune.activations.capture import COLLECTIVE_INSIDE
from memtune.activations.schedules import (
    BlockRegions,
    FrozenRegion,
    block_regions_of,
    not_foreseen,
    run_blocks,
    wrong_with_block,
)
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.parallel.ranks import require_whole_layers
from memtune.program import I32, I64, Program, Schedule, Step, remembered
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes, Index, ScheduleField, require_entries
from memtune.search_spaces._support import effects_conflict
from memtune.search_spaces.recompute._block_planner import (
    Frontier,
    Problem,
    best_row,
    live_bytes,
    packs_of,
    solve,
)
from memtune.search_spaces.recompute._schedule_planner.block_levels import LevelSearch
from memtune.search_spaces.recompute._schedule_planner.block_options import BlockOption, Source, options_of
from memtune.search_spaces.recompute._schedule_planner.placement import SCHEDULED, Place, schedules_nothing
from memtune.technique import Plan, Reason, Target
from memtune.units import format_bytes, format_seconds

_MUCH = 1 << 60
_TRIES = 4
"""Plans that are rewritten in search of the best one: prices are near enough that the first or second mostly
is.
"""
_WIDTH = 128
"""Plans that are kept for the blocks from each one on; more are closer to the budget."""


@dataclass(frozen=True, eq=False)
class BlockSchedules:
    """A schedule for each block, and what it comes to."""

    regions: BlockRegions
    schedules: tuple[Schedule, ...]
    """By block in the order of `regions.blocks`."""
    peak_bytes: int
    """After every later pass."""
    again_s: float
    """Of what runs again."""
    budget_bytes: int
    plain_bytes: int
    smallest_bytes: int
    """The least peak that any of the plans gives; looked for where the budget is not met."""

    @property
    def is_within(self) -> bool:
        """Whether the budget is met."""
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, eq=False)
class _Beside:
    """What is live besides the blocks' own values on the plain step after every later pass; (blocks, ops of
    its sort) each.
    """

    while_op: tuple[I64, ...]
    after_op: tuple[I64, ...]
    """Until the next op of the blocks; far below 0 where that is at once."""
    held_bytes: tuple[int, ...]
    """By block: its own values between its forward and its backward."""
    between_bytes: int
    """Between the last block's forward and its backward, blocks' own values left out."""
    rest_bytes: int


class BlockSearch:
    """Plans for the blocks of one step, by row of their frontier; true peaks as far as they were asked for.

    Args:
        place: The step and what comes after.
        regions: Of its blocks.
        sources: Who is asked for options.
    """

    def __init__(self, place: Place, regions: BlockRegions, sources: tuple[Source, ...]) -> None:
        self._place, self._regions, self._sources = place, regions, sources
        self._peaks: dict[int, int] = {}

    @cached_property
    def options(self) -> tuple[tuple[BlockOption, ...], ...]:
        """Of each sort of block."""
        place, sorts = self._place, range(len(self._regions.graphs))
        return tuple(
            options_of(place.step, self._regions, sort, place.hardware, self._sources) for sort in sorts
        )

    @cached_property
    def _beside(self) -> _Beside:
        return _beside(self._place, self._regions)

    @cached_property
    def frontier(self) -> Frontier:
        """Every plan worth having."""
        regions, beside = self._regions, self._beside
        options = [self.options[sort] for sort in regions.sort.tolist()]
        shape = len(options), max(map(len, options))
        held, own, seconds = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        before = 0
        for block, mine in enumerate(options):
            for number in range(shape[1]):
                option = mine[min(number, len(mine) - 1)]
                held[block, number], seconds[block, number] = option.held_bytes, option.seconds
                own[block, number] = (
                    _own_bytes(option, beside.while_op[block], beside.after_op[block]) - before
                )
            before += beside.held_bytes[block]
        problem = Problem(held, own, seconds, regions.sort, beside.between_bytes, beside.rest_bytes)
        return solve(problem, _WIDTH)

    def schedules(self, row: int) -> tuple[Schedule, ...]:
        """By block, what plan `row` says."""
        options = (self.options[sort] for sort in self._regions.sort.tolist())
        pairs = zip(options, self.frontier.choice(row).tolist(), strict=True)
        return tuple(mine[min(number, len(mine) - 1)].schedule for mine, number in pairs)

    def peak_of(self, row: int) -> int:
        """Peak of plan `row` after every pass."""
        if row not in self._peaks:
            step = under_blocks(self._place.step, self.schedules(row))
            self._peaks[row] = int(live_bytes(self._place.after(step), self._place.hardware).max(initial=0))
        return self._peaks[row]


def _own_bytes(option: BlockOption, while_op: I64, after_op: I64) -> int:
    return int(
        max(
            (while_op[option.anchor] + option.bytes).max(),
            (after_op[option.anchor] + option.left_bytes).max(),
        )
    )


def _beside(place: Place, regions: BlockRegions) -> _Beside:
    together = regions.together
    marks = np.zeros(place.step.ops.n, np.int32)
    marks[together.rows] = 1
    after = place.after(place.step.with_ops(match=marks))
    rows = np.flatnonzero(after.ops.match).astype(np.int32)
    live = live_bytes(after, place.hardware)
    n_forward, own = together.graph.n_forward, together.outside_until < 0
    gaps = np.full(len(rows), -_MUCH)
    for op in np.flatnonzero(np.diff(rows) > 1).tolist():
        if op != n_forward - 1:  # what comes after forward is no block's
            gaps[op] = live[rows[op] + 1 : rows[op + 1]].max()
    held, while_op, after_op = [], [], []
    for ops, values in zip(regions.ops, regions.values, strict=True):
        mine = _live_of(after, together.storages[values[own[values]]], place.hardware)
        held.append(int(mine[rows[n_forward - 1] + 1]))
        here = rows[ops]
        while_op.append(live[here] - mine[here] - together.scratch_bytes[ops])
        after_op.append(gaps[ops] - mine[np.minimum(here + 1, after.ops.n - 1)])
    middle = slice(int(rows[n_forward - 1]) + 1, int(rows[n_forward]))
    between = int(live[middle].max(initial=0)) - sum(held)
    rest = max(int(live[: rows[0]].max(initial=0)), int(live[rows[-1] + 1 :].max(initial=0)))
    return _Beside(tuple(while_op), tuple(after_op), tuple(held), between, rest)


def _live_of(step: Step, storages: I32, hardware: Hardware) -> I64:
    rounding = hardware.allocation_rounding_bytes
    n_bytes = -(-step.storages.bytes[storages] // rounding) * rounding
    delta = np.zeros(step.ops.n + 1, np.int64)
    np.add.at(delta, step.storages.producer[storages], n_bytes)
    np.add.at(delta, np.minimum(step.freed_after[storages], step.ops.n - 1) + 1, -n_bytes)
    return np.cumsum(delta[:-1])


@lru_cache(maxsize=32)
def search_blocks(place: Place, sources: tuple[Source, ...]) -> BlockSearch | LevelSearch:
    """The plans for the blocks of a place; `cannot_freeze` has seen to it that there are regions."""
    regions = block_regions_of(place.step)
    assert not isinstance(regions, str), regions
    if not any(each.effects.layer_major or each.slot == "offload.activations" for each in place.later):
        return BlockSearch(place, regions, sources)
    sorts = range(len(regions.graphs))
    options = [options_of(place.step, regions, sort, place.hardware, sources) for sort in sorts]
    return LevelSearch(place, regions, [options[sort] for sort in regions.sort.tolist()], under_blocks)


@lru_cache(maxsize=64)
def found_by_blocks(
    place: Place, sources: tuple[Source, ...], budget_bytes: int | None, share: float = 0.0
) -> BlockSchedules:
    """The fastest plan within the budget, the smallest one if none is.

    Args:
        place: The program without recompute, and what comes after it.
        sources: Who is asked for schedules of a block.
        budget_bytes: Peak of the whole step; None: by `share`.
        share: Where the budget lies between the smallest peak found and the plain one.
    """
    search = search_blocks(place, sources)
    if budget_bytes is None:
        smallest = search.peak_of(0)
        budget_bytes = smallest + round(max(place.plain_live_bytes - smallest, 0) * share)
    row = best_row(search.frontier, search.peak_of, budget_bytes, _TRIES)
    peak_bytes = search.peak_of(row)
    smallest_bytes = peak_bytes if peak_bytes <= budget_bytes else search.peak_of(0)
    seconds = float(search.frontier.seconds[row])
    regions = block_regions_of(place.step)
    assert not isinstance(regions, str)
    return BlockSchedules(
        regions,
        search.schedules(row),
        peak_bytes,
        seconds,
        budget_bytes,
        place.plain_live_bytes,
        smallest_bytes,
    )


def surely_slower(place: Place, sources: tuple[Source, ...], budget_bytes: int, seconds: float) -> bool:
    """Whether no plan that is priced near the budget takes less than `seconds`; known before any is
    rewritten.
    """
    frontier = search_blocks(place, sources).frontier
    return float(frontier.seconds[max(frontier.at(budget_bytes + (budget_bytes >> 7)), 0)]) >= seconds


def cannot_run_blocks(program: Program, target: Target) -> Reason | None:
    """Why the blocks cannot each run by a schedule of their own."""
    reason = schedules_nothing(target, "sharding.parallel") or _not_in_packs(program, target)
    if reason is not None:
        return reason
    if (reason := effects_conflict("recompute", SCHEDULED, target, "split", "offload.states")) is not None:
        return reason
    step, regions = program.step, block_regions_of(program.step)
    if isinstance(regions, str):
        return Reason(f"blocks cannot run by schedules of their own: {regions}", "recompute: {kind: planned}")
    odd = not_foreseen(step, regions.together)
    if odd:
        return Reason(odd, "recompute: {kind: planned}")
    return None


def _not_in_packs(program: Program, target: Target) -> Reason | None:
    """Why blocks do not run pack by pack, known before schedules are looked for."""
    packs = packs_of(target)
    return None if packs is None else packs.fits(program, target)


@remembered
def under_blocks(step: Step, schedules: tuple[Schedule, ...]) -> Step:
    """`step` with each block run by its schedule."""
    regions = block_regions_of(step)
    assert not isinstance(regions, str), regions
    return run_blocks(step, regions, schedules)


# -- the plan ------------------------------------------------------------------------------------------------


class BlockSchedulesPlan(Plan):
    """A schedule for each block."""

    block_schedules: tuple[ScheduleField, ...]
    """The different schedules."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `block_schedules` that each block runs by."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("block_schedules", self.block_schedules, self.blocks)
        return self

    def schedules(self, kind: str) -> list[Schedule]:
        """Return the schedule of each row of `step.blocks`, made by the technique `kind`."""
        different = [replace(each, made_by=kind) for each in self.block_schedules]
        return [different[number] for number in self.blocks]


class BudgetBlocksPlan(BlockSchedulesPlan):
    """A schedule for each block, within a budget together."""

    budget_bytes: Bytes
    """Peak to stay within."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without schedules."""
    again_s: float
    """Seconds of what runs again in a micro-batch."""


def plan_by_blocks(found: BlockSchedules) -> BudgetBlocksPlan:
    """Return the plan: the different schedules, which of them each block runs by, and what that comes to."""
    return BudgetBlocksPlan(
        **which_by_block(found.regions, found.schedules),
        budget_bytes=found.budget_bytes,
        peak_bytes=found.peak_bytes,
        plain_bytes=found.plain_bytes,
        again_s=round(found.again_s, 9),
    )


def which_by_block(regions: BlockRegions, schedules: tuple[Schedule, ...]) -> dict[str, Any]:
    """The different ones of `schedules`, which are in the order of `regions.blocks`, and which of them each
    block runs by.
    """
    different = tuple(dict.fromkeys(schedules))
    of_block = dict(zip(regions.blocks, (different.index(each) for each in schedules), strict=True))
    return {"block_schedules": different, "blocks": tuple(of_block[block] for block in range(len(of_block)))}


def rewritten_by_blocks(plan: BlockSchedulesPlan, program: Program, kind: str) -> Program:
    """Each block's ops in the order of its schedule.

    Raises:
        ApplyError: The schedules are for another model's blocks.
    """
    regions, schedules = block_regions_of(program.step), plan.schedules(kind)
    wrong = regions if isinstance(regions, str) else ""
    if not isinstance(regions, str):
        if len(schedules) != len(regions.blocks):
            wrong = f"it is for {len(schedules)} blocks, here are {len(regions.blocks)}"
        else:
            ordered = tuple(schedules[block] for block in regions.blocks)
            pairs = {(int(sort), each) for sort, each in zip(regions.sort, ordered, strict=True)}
            wrong = next(
                (why for sort, each in pairs if (why := wrong_with_block(regions.graphs[sort], each))), ""
            )
    if wrong:
        raise ApplyError(
            "the plan's schedules are for another model.",
            evidence=f"{wrong}.",
            fix="memtune search  or  memtune trial --config  makes a new plan; or recompute: {kind: full}",
            code="MT316",
        )
    return program.with_step(under_blocks(program.step, ordered))


def install_blocks(plan: BlockSchedulesPlan, context: Context, kind: str) -> None:
    """Put the executor of each block's schedule in the place of its forward; the audit asks whether they ran.

    Raises:
        ApplyError: The schedules are for another number of blocks.
    """
    schedules = plan.schedules(kind)
    if len(schedules) != len(context.blocks):
        raise ApplyError(
            f"the plan is for {len(schedules)} blocks, the model has {len(context.blocks)}.",
            fix="memtune search  or  memtune trial --config  makes a new plan",
            code="MT316",
        )
    context.events.states_sharded.subscribe(
        partial(require_whole_layers, context, f"recompute: {{kind: {kind}}}")
    )
    found = {}
    for name, schedule in zip(context.blocks, schedules, strict=True):
        found[name] = FrozenRegion(context.model.get_submodule(name), schedule, context.device)
        found[name].install()
    context.checks["recompute"] = lambda: _check(found)


def instead_of_schedule(why: str, kind: str) -> str:
    """What to do where a schedule did not run for the reason `why`; `kind` needs no schedule, but would
    repeat a collective.
    """
    if why.endswith(COLLECTIVE_INSIDE):
        return "move it out of the model, or choose recompute: {kind: none}"
    return f"search again with the model as it is now, or choose recompute: {{kind: {kind}}}"


def _check(regions: Mapping[str, FrozenRegion]) -> dict[str, Any]:
    """Facts for the audit: how often schedules ran, and the plain blocks in their place."""
    for name, each in regions.items():
        if not each.is_installed:
            raise ApplyError(f"{name} should run by a schedule, but its forward was replaced.", code="MT313")
        if each.runs.plain and not each.runs.frozen:
            raise ApplyError(
                f"{name} ran without its schedule.",
                evidence=f"{each.runs.why_plain[:1].upper()}{each.runs.why_plain[1:]}.",
                fix=instead_of_schedule(each.runs.why_plain, "planned"),
                code="MT313",
            )
    runs = [each.runs for each in regions.values()]
    fewest: dict[str, Any] = {
        "frozen_runs": min(each.frozen for each in runs),
        "plain_runs": max(each.plain for each in runs),
    }
    return fewest | {
        "blocks_by_schedule": len(runs),
        "why_plain": next((each.why_plain for each in runs if each.why_plain), ""),
    }


def explained_blocks(plan: BudgetBlocksPlan) -> tuple[str, ...]:
    """What the plan comes to, then each schedule with the blocks that run by it."""
    schedules = plan.schedules("planned")
    peak, budget, plain = (
        format_bytes(each) for each in (plan.peak_bytes, plan.budget_bytes, plan.plain_bytes)
    )
    again = format_seconds(plan.again_s)
    lines = [
        f"peak {peak} by a schedule for each block for a budget of {budget}; {plain} without; costs {again} a"
        " micro-batch"
    ]
    for each in dict.fromkeys(schedules):
        computes = each.computes()
        lines.append(
            f"{schedules.count(each)} blocks: {len(computes)} ops, {len(computes) - len(set(computes))} of"
            " them again"
        )
    return tuple(lines)
