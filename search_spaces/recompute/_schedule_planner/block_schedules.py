"""A schedule for each block, if parameters are available during a block's own calls only.

Hooks of a block's module unshard or load its parameters before its forward and its backward, and free them
after. A schedule of the block alone runs inside both, so the ops that it runs again find the parameters, and
no extra all-gather or load is needed.

Blocks hold bytes from their forward to their backward and share the budget as in plans by blocks: `frontier`
has every undominated plan, priced moment by moment on the step after all later passes. The peak of the
rewritten step decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from memtune import refusals
from memtune.activations.capture import COLLECTIVE_INSIDE
from memtune.activations.schedules import (
    BlockRegions,
    ScheduledRegion,
    block_regions_of,
    find_block_schedule_error,
    not_foreseen,
    run_blocks,
)
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.parallel.ranks import require_whole_layers
from memtune.program import I32, I64, Program, Schedule, Step, memoized
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes, Index, ScheduleField, require_entries
from memtune.search_spaces._support import effects_conflict
from memtune.search_spaces.recompute._block_planner import (
    Frontier,
    Problem,
    best_row,
    layer_major_technique,
    live_bytes,
    solve,
)
from memtune.search_spaces.recompute._schedule_planner.block_levels import LevelSearch
from memtune.search_spaces.recompute._schedule_planner.block_options import BlockOption, Source, options_of
from memtune.search_spaces.recompute._schedule_planner.region_placement import (
    SCHEDULED,
    Placement,
    schedules_nothing,
)
from memtune.technique import Plan, Reason, Target
from memtune.units import format_bytes, format_seconds

# Far below 0 when negated, and sums of a few stay within int64.
_MUCH = 1 << 60
_TRIES = 4
"""Plans rewritten in search of the best one; prices are accurate enough that the first or second usually is.
"""
_WIDTH = 128
"""Plans kept per layer of the frontier; more come closer to the budget."""


@dataclass(frozen=True, eq=False)
class BlockSchedules:
    """A schedule for each block, with the resulting peak and time."""

    regions: BlockRegions
    schedules: tuple[Schedule, ...]
    """By block, in the order of `regions.blocks`."""
    peak_bytes: int
    """Peak after every later pass."""
    recompute_s: float
    """Seconds of recomputation."""
    budget_bytes: int
    plain_bytes: int
    smallest_bytes: int
    """Smallest peak of all plans; computed only if the budget is not met."""

    @property
    def is_within(self) -> bool:
        """True if the budget is met."""
        return self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, eq=False)
class _Background:
    """Live bytes other than the blocks' own values on the plain step after every later pass; (blocks, ops of
    its class) each.
    """

    while_op: tuple[I64, ...]
    after_op: tuple[I64, ...]
    """Until the next op of the blocks; far below 0 if that follows at once."""
    held_bytes: tuple[int, ...]
    """By block: bytes of its own values between its forward and its backward."""
    between_bytes: int
    """Between the last block's forward and its backward, without the blocks' values."""
    rest_bytes: int


class BlockSearch:
    """Plans for the blocks of one step, by row of their frontier; true peaks are computed on demand.

    Args:
        place: The step and the later passes.
        regions: Regions of its blocks.
        sources: Policies and planners that propose options.
    """

    def __init__(self, place: Placement, regions: BlockRegions, sources: tuple[Source, ...]) -> None:
        self._place, self._regions, self._sources = place, regions, sources
        self._peaks: dict[int, int] = {}

    @cached_property
    def options(self) -> tuple[tuple[BlockOption, ...], ...]:
        """Options of each class of blocks."""
        place, graph_indices = self._place, range(len(self._regions.graphs))
        return tuple(
            options_of(place.step, self._regions, graph_index, place.hardware, self._sources)
            for graph_index in graph_indices
        )

    @cached_property
    def _background(self) -> _Background:
        return _background(self._place, self._regions)

    @cached_property
    def frontier(self) -> Frontier:
        """All undominated plans."""
        regions, background = self._regions, self._background
        options = [self.options[graph_index] for graph_index in regions.graph_index.tolist()]
        shape = len(options), max(map(len, options))
        held, own, seconds = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        before = 0
        for block, mine in enumerate(options):
            for number in range(shape[1]):
                # Blocks with fewer options repeat their last one, so that the columns are as long for all.
                option = mine[min(number, len(mine) - 1)]
                held[block, number], seconds[block, number] = option.held_bytes, option.seconds
                own[block, number] = (
                    _own_bytes(option, background.while_op[block], background.after_op[block]) - before
                )
            # `live` includes what earlier blocks hold on the plain step; the frontier adds what they hold as
            # planned.
            before += background.held_bytes[block]
        problem = Problem(
            held, own, seconds, regions.graph_index, background.between_bytes, background.rest_bytes
        )
        return solve(problem, _WIDTH)

    def schedules(self, row: int) -> tuple[Schedule, ...]:
        """Return the schedule of each block in plan `row`."""
        options = (self.options[graph_index] for graph_index in self._regions.graph_index.tolist())
        pairs = zip(options, self.frontier.choice(row).tolist(), strict=True)
        return tuple(mine[min(number, len(mine) - 1)].schedule for mine, number in pairs)

    def peak_of(self, row: int) -> int:
        """Return the peak of plan `row` after every pass."""
        if row not in self._peaks:
            step = apply_block_schedules(self._place.step, self.schedules(row))
            self._peaks[row] = int(live_bytes(self._place.after(step), self._place.hardware).max(initial=0))
        return self._peaks[row]


def _own_bytes(option: BlockOption, while_op: I64, after_op: I64) -> int:
    return int(
        max(
            (while_op[option.anchor] + option.bytes).max(),
            (after_op[option.anchor] + option.left_bytes).max(),
        )
    )


def _background(place: Placement, regions: BlockRegions) -> _Background:
    together = regions.together
    marks = np.zeros(place.step.ops.n, np.int32)
    marks[together.rows] = 1
    # Marks in `ops.match` find the region's ops again after the later passes have inserted theirs.
    after = place.after(place.step.with_ops(match=marks))
    rows = np.flatnonzero(after.ops.match).astype(np.int32)
    live = live_bytes(after, place.hardware)
    n_forward, own = together.graph.n_forward, together.outside_until < 0
    # Later passes insert ops, such as gathers and loads, whose bytes live between two ops of a block.
    gaps = np.full(len(rows), -_MUCH)
    for op in np.flatnonzero(np.diff(rows) > 1).tolist():
        if op != n_forward - 1:  # the gap after forward belongs to no block
            gaps[op] = live[rows[op] + 1 : rows[op + 1]].max()
    held, while_op, after_op = [], [], []
    for ops, values in zip(regions.ops, regions.values, strict=True):
        mine = _live_of(after, together.storages[values[own[values]]], place.hardware)
        # After the last op of forward, a block's live bytes are those that it holds for backward.
        held.append(int(mine[rows[n_forward - 1] + 1]))
        here = rows[ops]
        # A schedule replaces the block's own values and their scratch; all else stays as on the plain step.
        while_op.append(live[here] - mine[here] - together.scratch_bytes[ops])
        after_op.append(gaps[ops] - mine[np.minimum(here + 1, after.ops.n - 1)])
    # Head and loss run between the last block's forward and its backward.
    middle = slice(int(rows[n_forward - 1]) + 1, int(rows[n_forward]))
    between = int(live[middle].max(initial=0)) - sum(held)
    rest = max(int(live[: rows[0]].max(initial=0)), int(live[rows[-1] + 1 :].max(initial=0)))
    return _Background(tuple(while_op), tuple(after_op), tuple(held), between, rest)


def _live_of(step: Step, storages: I32, hardware: Hardware) -> I64:
    rounding = hardware.allocation_rounding_bytes
    # As `live_bytes` counts them: rounded up to whole allocations.
    n_bytes = -(-step.storages.bytes[storages] // rounding) * rounding
    delta = np.zeros(step.ops.n + 1, np.int64)
    np.add.at(delta, step.storages.producer[storages], n_bytes)
    np.add.at(delta, np.minimum(step.freed_after[storages], step.ops.n - 1) + 1, -n_bytes)
    return np.cumsum(delta[:-1])


@lru_cache(maxsize=32)
def search_blocks(place: Placement, sources: tuple[Source, ...]) -> BlockSearch | LevelSearch:
    """Return the plans for the blocks of a step that has regions (see `cannot_schedule_blocks`)."""
    regions = block_regions_of(place.step)
    assert not isinstance(regions, str), regions
    # Only then does a block's own held value stay on the device from forward to backward.
    if not any(each.effects.layer_major or each.slot == "offload.activations" for each in place.later):
        return BlockSearch(place, regions, sources)
    graph_indices = range(len(regions.graphs))
    options = [
        options_of(place.step, regions, graph_index, place.hardware, sources) for graph_index in graph_indices
    ]
    return LevelSearch(
        place,
        regions,
        [options[graph_index] for graph_index in regions.graph_index.tolist()],
        apply_block_schedules,
    )


@lru_cache(maxsize=64)
def solve_block_schedules(
    place: Placement, sources: tuple[Source, ...], budget_bytes: int | None, share: float = 0.0
) -> BlockSchedules:
    """Return the fastest plan within the budget, or the plan with the smallest peak if none is.

    Args:
        place: The program without recompute, and the later passes.
        sources: Policies and planners that propose schedules of a block.
        budget_bytes: Largest peak of the whole step; None: given by `share`.
        share: Position of the budget between the smallest peak found (0) and the plain one (1).
    """
    search = search_blocks(place, sources)
    if budget_bytes is None:
        # Row 0 of a frontier has the smallest peak.
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


def is_surely_slower(
    place: Placement, sources: tuple[Source, ...], budget_bytes: int, seconds: float
) -> bool:
    """Return True if no plan priced near the budget takes less than `seconds`; no step is rewritten
    for it.
    """
    frontier = search_blocks(place, sources).frontier
    # Prices are approximate: within 1/128 of the budget a plan may still turn out to fit.
    return float(frontier.seconds[max(frontier.at(budget_bytes + (budget_bytes >> 7)), 0)]) >= seconds


def cannot_schedule_blocks(program: Program, target: Target) -> Reason | None:
    """Return why the blocks cannot each run by a schedule of their own; None if they can."""
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
    """Return why blocks cannot run pack by pack, before schedules are searched."""
    packs = layer_major_technique(target)
    return None if packs is None else packs.fits(program, target)


@memoized
def apply_block_schedules(step: Step, schedules: tuple[Schedule, ...]) -> Step:
    """Return `step` with each block run by its schedule."""
    regions = block_regions_of(step)
    assert not isinstance(regions, str), regions
    return run_blocks(step, regions, schedules)


class BlockSchedulesPlan(Plan):
    """A schedule for each block."""

    block_schedules: tuple[ScheduleField, ...]
    """The different schedules."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `block_schedules` of each block."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("block_schedules", self.block_schedules, self.blocks)
        return self

    @property
    def schedule_calls(self) -> int:
        """One call of each block."""
        return len(self.blocks)

    def schedules(self, kind: str) -> list[Schedule]:
        """Return the schedule of each row of `step.blocks`, attributed to the technique `kind`."""
        different = [replace(each, made_by=kind) for each in self.block_schedules]
        return [different[number] for number in self.blocks]


class BudgetBlocksPlan(BlockSchedulesPlan):
    """A schedule for each block, together within a budget."""

    budget_bytes: Bytes
    """Largest peak allowed."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without schedules."""
    recompute_s: float
    """Seconds of recomputation in a micro-batch."""


def to_block_plan(found: BlockSchedules) -> BudgetBlocksPlan:
    """Return `found` as a plan: the different schedules, the one of each block, the resulting peak
    and time.
    """
    return BudgetBlocksPlan(
        **block_plan_fields(found.regions, found.schedules),
        budget_bytes=found.budget_bytes,
        peak_bytes=found.peak_bytes,
        plain_bytes=found.plain_bytes,
        recompute_s=round(found.recompute_s, 9),
    )


def block_plan_fields(regions: BlockRegions, schedules: tuple[Schedule, ...]) -> dict[str, Any]:
    """Return the plan fields for `schedules` (in the order of `regions.blocks`): the different ones, and each
    block's.
    """
    different = tuple(dict.fromkeys(schedules))
    of_block = dict(zip(regions.blocks, (different.index(each) for each in schedules), strict=True))
    return {"block_schedules": different, "blocks": tuple(of_block[block] for block in range(len(of_block)))}


def rewrite_by_block_schedules(plan: BlockSchedulesPlan, program: Program, kind: str) -> Program:
    """Return `program` with each block's ops in the order of its schedule.

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
            # Most blocks are alike: each pair of a graph and a schedule is checked once.
            pairs = {
                (int(graph_index), each)
                for graph_index, each in zip(regions.graph_index, ordered, strict=True)
            }
            wrong = next(
                (
                    why
                    for graph_index, each in pairs
                    if (why := find_block_schedule_error(regions.graphs[graph_index], each))
                ),
                "",
            )
    if wrong:
        raise refusals.plan_of_other_model("recompute", f"{wrong}.", "recompute: {kind: full}")
    return program.with_step(apply_block_schedules(program.step, ordered))


def install_blocks(plan: BlockSchedulesPlan, context: Context, kind: str) -> None:
    """Replace each block's forward by the executor of its schedule, and add an audit check that the schedules
    ran.

    Raises:
        ApplyError: The schedules are for another number of blocks.
    """
    schedules = plan.schedules(kind)
    if len(schedules) != len(context.blocks):
        raise refusals.plan_of_other_model(
            f"recompute: {{kind: {kind}}}",
            f"It is for {len(schedules)} blocks, the model has {len(context.blocks)}.",
        )
    # Whether a block's parameters are whole in its calls is known only when they have been sharded.
    context.events.states_sharded.subscribe(
        partial(require_whole_layers, context, f"recompute: {{kind: {kind}}}")
    )
    found = {}
    for name, schedule in zip(context.blocks, schedules, strict=True):
        found[name] = ScheduledRegion(context.model.get_submodule(name), schedule, context.device)
        found[name].install()
    context.checks["recompute"] = lambda: _check(found)


def require_schedule_ran(region: ScheduledRegion, name: str, kind: str) -> None:
    """Check that `region` ran by its schedule, at least once.

    Args:
        region: The region.
        name: Name of its module, for messages.
        kind: As in `_instead_of_schedule`.

    Raises:
        ApplyError: The schedule never ran, or another component replaced the forward.
    """
    runs = region.runs
    if not region.is_installed:
        raise ApplyError(f"{name} should run by a schedule, but its forward was replaced.", code="MT313")
    if runs.plain and not runs.frozen:
        raise ApplyError(
            f"{name} ran without its schedule.",
            evidence=f"{runs.why_plain[:1].upper()}{runs.why_plain[1:]}.",
            fix=_instead_of_schedule(runs.why_plain, kind),
            code="MT313",
        )


def _instead_of_schedule(why: str, kind: str) -> str:
    """Return the fix for a schedule that did not run because of `why`.

    The technique `kind` needs no schedule, but would run a collective a second time.
    """
    if why.endswith(COLLECTIVE_INSIDE):
        return "move it out of the model, or choose recompute: {kind: none}"
    return f"search again with the model as it is now, or choose recompute: {{kind: {kind}}}"


def _check(regions: Mapping[str, ScheduledRegion]) -> dict[str, Any]:
    """Return facts for the audit: runs by schedule, and runs of the plain block instead."""
    for name, each in regions.items():
        require_schedule_ran(each, name, "planned")
    runs = [each.runs for each in regions.values()]
    fewest: dict[str, Any] = {
        "frozen_runs": min(each.frozen for each in runs),
        "plain_runs": max(each.plain for each in runs),
    }
    return fewest | {
        "blocks_by_schedule": len(runs),
        "why_plain": next((each.why_plain for each in runs if each.why_plain), ""),
    }


def explain_block_schedules(plan: BudgetBlocksPlan) -> tuple[str, ...]:
    """Return the peak and the time, then one line per schedule with the number of blocks that it runs."""
    schedules = plan.schedules("planned")
    peak, budget, plain = (
        format_bytes(each) for each in (plan.peak_bytes, plan.budget_bytes, plan.plain_bytes)
    )
    again = format_seconds(plan.recompute_s)
    lines = [
        f"peak {peak} by a schedule for each block for a budget of {budget}; {plain} without; costs {again} a"
        " micro-batch"
    ]
    for each in dict.fromkeys(schedules):
        # An op that is listed twice is computed again.
        computes = each.computes()
        lines.append(
            f"{schedules.count(each)} blocks: {len(computes)} ops, {len(computes) - len(set(computes))} of"
            " them again"
        )
    return tuple(lines)
