"""The context of a schedule of the whole model: the recorded step and the passes of other techniques after
it.

On several ranks later passes average gradients or shard states. A schedule is evaluated on the step after
those passes, so that a budget is that of one rank. Ops that they insert between the model's ops keep their
place: where gradients are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtune.activations.eviction import least_bytes
from memtune.activations.schedules import Region, not_foreseen, region_among, region_of, run_schedule
from memtune.effects import SCHEDULE, Effects
from memtune.hardware import Hardware
from memtune.program import Program, RankClass, Schedule, Step, Tier, memoized
from memtune.search_spaces import active
from memtune.search_spaces._plan_fields import ScheduleField
from memtune.search_spaces._support import effects_conflict, needs_calls_of_blocks
from memtune.search_spaces.recompute._block_planner.budget import (
    NO_PASS_INPUTS,
    PassInputs,
    apply_later_passes,
    later_pass_inputs,
    later_techniques,
)
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes

SCHEDULED = Effects(calls="schedule", activations="block", eager_only=SCHEDULE)
"""Effects of techniques that run the model, or each block, by a schedule."""
MODEL_SCHEDULED = Effects(calls="schedule", activations="model", eager_only=SCHEDULE)
"""Effects of techniques that run the model by one schedule, planned for its budget."""
_ONE_SCHEDULE_FOR = (
    "split",
    "sharding.parallel",
    "sharding.communication",
    "sharding.states",
    "offload.states",
    "offload.activations",
)
"""Slots whose technique may exclude one schedule of the whole model."""
_MARK = -1
"""A value of `ops.match` that no pass uses for ops that wait for each other."""


@dataclass(frozen=True, eq=False)
class Placement:
    """A step whose region a schedule is to run, and the later passes."""

    step: Step
    hardware: Hardware
    ranks: int = 1
    micro_batch: int = 1
    accumulate: int = 1
    later: tuple[Technique, ...] = ()
    pass_inputs: PassInputs = NO_PASS_INPUTS
    """Inputs of the later passes besides the techniques themselves."""

    @property
    def region(self) -> Region:
        """The model's forward and backward; exists if `cannot_schedule_model` returned None."""
        found = region_of(self.step)
        assert not isinstance(found, str), found
        return found

    @cached_property
    def region_after_passes(self) -> Region:
        """The region with the bytes outside it after all passes."""
        if not self.later:
            return self.region
        after = self._marked_after
        return region_among(self.region, after, np.flatnonzero(after.ops.match == _MARK).astype(np.int32))

    @cached_property
    def _marked_after(self) -> Step:
        """The plain step after all passes, with the region's ops marked."""
        marks = np.zeros(self.step.ops.n, np.int32)
        marks[self.region.rows] = _MARK
        return self.after_later_passes(self.step.with_ops(match=marks))

    @cached_property
    def more_bytes(self) -> int:
        """Largest growth, at any op, of the bytes outside the region through the later passes."""
        return (
            int((self.region_after_passes.background_bytes - self.region.background_bytes).max())
            if self.later
            else 0
        )

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes that later passes keep throughout the step, such as gradient buckets."""
        if not self.later:
            return 0
        after = self._marked_after
        new = np.arange(after.storages.n) >= self.step.storages.n
        return int(
            after.storages.bytes[
                new & (after.storages.producer < 0) & (after.storages.tier == Tier.DEVICE)
            ].sum()
        )

    @cached_property
    def least_bytes(self) -> int:
        """A peak that no schedule gets below."""
        return least_bytes(self.region_after_passes)

    @cached_property
    def plain_bytes(self) -> int:
        """Peak without a schedule."""
        return (self._marked_after if self.later else self.step).peak_bytes()

    def reason_below(self, budget_bytes: int) -> Reason | None:
        """Return a reason if no schedule stays within `budget_bytes`, without a search for one."""
        if budget_bytes >= self.least_bytes:
            return None
        return Reason(
            f"no schedule stays within {format_bytes(budget_bytes)}: no recompute gets below"
            f" {format_bytes(self.least_bytes)}",
            "a larger budget, a smaller micro-batch, or sharding or offload of states",
        )

    def step_under(self, schedule: Schedule) -> Step:
        """Return the step under `schedule`, before the later passes."""
        return apply_schedule(self.step, schedule)

    def peak_bytes(self, schedule: Schedule) -> int:
        """Return the peak of the step under `schedule`, after all passes."""
        return self.after_later_passes(self.step_under(schedule)).peak_bytes()

    def after_later_passes(self, step: Step) -> Step:
        """Return `step` after the later passes."""
        if not self.later:
            return step
        program = Program((RankClass(self.ranks, step),), self.micro_batch, self.accumulate)
        return apply_later_passes(program, self.later, self.hardware, self.pass_inputs).step


class SchedulePlan(Plan):
    """A schedule of the whole model."""

    schedule: ScheduleField
    """Order of the ops, repeated ones included, and the points at which values are freed."""

    @property
    def schedule_calls(self) -> int:
        """One call of the model."""
        return 1


@memoized
def apply_schedule(step: Step, schedule: Schedule) -> Step:
    """Return `step` under a schedule that is valid for it; cached, since `rewrite` follows `plan`."""
    region = region_of(step)
    assert not isinstance(region, str), region
    return run_schedule(step, region, schedule)


def placement_of(program: Program, target: Target) -> Placement:
    """Return the context of a schedule of `program`; the same object for equal inputs."""
    changes_bytes = any(active(target, slot) is not None for slot in ("execution.order", "offload.states"))
    if program.ranks == 1 and not changes_bytes and not needs_calls_of_blocks(target):
        # No other pass changes the bytes outside the region, so that all these targets share one Placement.
        return _placement(program.step, target.hardware, 1, 1, 1, (), NO_PASS_INPUTS)
    later = later_techniques(target)
    run = program.ranks, program.micro_batch, program.accumulate
    return _placement(program.step, target.hardware, *run, later, later_pass_inputs(target))


@memoized
def _placement(
    step: Step,
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    later: tuple[Technique, ...],
    pass_inputs: PassInputs,
) -> Placement:
    return Placement(step, hardware, ranks, micro_batch, accumulate, later, pass_inputs)


def cannot_schedule_model(program: Program, target: Target, *, online: bool = False) -> Reason | None:
    """Return why no schedule (with `online`, nor the online runtime) can replace forward and backward."""
    reason = schedules_nothing(target, *_ONE_SCHEDULE_FOR)
    if reason is not None:
        return reason
    region = region_of(program.step)
    if isinstance(region, str):
        return Reason(region, "recompute: {kind: planned}")
    odd = "" if online else not_foreseen(program.step, region)
    if odd:
        return Reason(odd, "recompute: {kind: planned}")
    return None


def schedules_nothing(target: Target, *slots: str) -> Reason | None:
    """Return why no schedule runs: the model is compiled, or a technique in `slots` excludes it."""
    if target.compiled:
        return Reason(SCHEDULED.eager_only, "execution.compile: false")
    return effects_conflict("recompute", MODEL_SCHEDULED, target, *slots)


def needs_own_budget(target: Target, kind: str) -> Reason | None:
    """Return a reason if `kind` has no budget of its own but runs with updates inside backward."""
    # A search would solve for the target's budget under each micro-batch, which takes seconds.
    if (other := active(target, "execution.order")) is None:
        return None
    fix = f"recompute: {{kind: {kind}, budget_bytes: {target.budget_bytes or 20_000_000_000}}}"
    return Reason(f"with {other.kind} it needs a budget of its own", fix)
