"""A schedule for each block, if parameters are available during a block's own calls only.

Hooks of a block's module unshard or load its parameters before its forward and its backward, and free them
after. A schedule of the block alone runs inside both, so the ops that it runs again find the parameters, and
no extra all-gather or load is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

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
from memtune.parallel.ranks import require_whole_layers
from memtune.program import Program, Schedule, Step, memoized
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Index, ScheduleField, require_entries
from memtune.search_spaces._support import effects_conflict
from memtune.search_spaces.recompute._schedule_planner.region_placement import SCHEDULED
from memtune.technique import Plan, Reason, Target


def cannot_schedule_blocks(program: Program, target: Target) -> Reason | None:
    """Return why the blocks cannot each run by a schedule of their own; None if they can."""
    if target.compiled:
        return Reason(SCHEDULED.eager_only, "execution.compile: false")
    slots = "sharding.parallel", "split", "offload.states"
    if (reason := effects_conflict("recompute", SCHEDULED, target, *slots)) is not None:
        return reason
    step, regions = program.step, block_regions_of(program.step)
    if isinstance(regions, str):
        return Reason(f"blocks cannot run by schedules of their own: {regions}", "recompute: {kind: planned}")
    odd = not_foreseen(step, regions.together)
    if odd:
        return Reason(odd, "recompute: {kind: planned}")
    return None


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


def block_plan_fields(regions: BlockRegions, schedules: tuple[Schedule, ...]) -> dict[str, Any]:
    """Return the plan fields for `schedules` of `regions.blocks`: the different ones, and each block's."""
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
    refusals.require_blocks(len(schedules), len(context.blocks), f"recompute: {{kind: {kind}}}")
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
    """Require that `region` ran by its schedule, at least once, and that its forward is still in place.

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
    """Return the fix for a schedule that did not run because of `why`."""
    # The technique `kind` needs no schedule, but would run a collective a second time.
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
