"""Where a schedule of the whole model is put: the recorded step, and the passes of other techniques that come
after it.

On several ranks gradients are averaged, or states divided, by passes that come later. A schedule is judged on
the step that they make of it, so that a budget is that of a rank. What they put between the model's ops stays
where gradients are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtune.activations.eviction import least_bytes
from memtune.activations.schedules import Region, not_foreseen, region_among, region_of, run_schedule
from memtune.effects import SCHEDULE, Effects
from memtune.hardware import Hardware
from memtune.program import Program, RankClass, Schedule, Step, Tier, remembered
from memtune.search_spaces._plan_fields import ScheduleField
from memtune.search_spaces._support import (
    active,
    effects_conflict,
    follows_calls,
    is_gathered,
    needs_calls_of_blocks,
)
from memtune.search_spaces.recompute._block_planner import (
    NOTHING_TOLD,
    Told,
    after_later,
    later_techniques,
    packs_of,
    plain_bytes,
    told_later,
)
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes

SCHEDULED = Effects(calls="schedule", activations="block", eager_only=SCHEDULE)
"""The effects of techniques that run the model, or each block, by a schedule."""
_MARK = -1
"""No pass numbers ops that wait for each other so."""


@dataclass(frozen=True, eq=False)
class Place:
    """A step whose region a schedule is to run, and what comes after it."""

    step: Step
    hardware: Hardware
    ranks: int = 1
    micro_batch: int = 1
    accumulate: int = 1
    later: tuple[Technique, ...] = ()
    told: Told = NOTHING_TOLD
    """What these look at besides each other."""

    @property
    def region(self) -> Region:
        """The model's forward and backward; `cannot_freeze` has seen to it that there is one."""
        found = region_of(self.step)
        assert not isinstance(found, str), found
        return found

    @cached_property
    def among(self) -> Region:
        """The region with the bytes that are besides it after all passes."""
        if not self.later:
            return self.region
        after = self._marked_after
        return region_among(self.region, after, np.flatnonzero(after.ops.match == _MARK).astype(np.int32))

    @cached_property
    def _marked_after(self) -> Step:
        """The plain step after all passes; the region's ops are marked."""
        marks = np.zeros(self.step.ops.n, np.int32)
        marks[self.region.rows] = _MARK
        return self.after(self.step.with_ops(match=marks))

    @cached_property
    def more_bytes(self) -> int:
        """By how much what is besides the region grows most through the later passes; less than 0 where it
        shrinks.
        """
        return int((self.among.background_bytes - self.region.background_bytes).max()) if self.later else 0

    @cached_property
    def buffer_bytes(self) -> int:
        """What later passes keep throughout, beside the model's own: buckets of gradients."""
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
        return least_bytes(self.among)

    @cached_property
    def plain_bytes(self) -> int:
        """The peak without a schedule."""
        return (self._marked_after if self.later else self.step).peak_bytes()

    @property
    def plain_live_bytes(self) -> int:
        """The same as the allocator counts them."""
        return plain_bytes(self.program(self.step), self.later, self.hardware, self.told)

    def below(self, budget_bytes: int) -> Reason | None:
        """Why no schedule at all stays within `budget_bytes`: known before any is looked for."""
        if budget_bytes >= self.least_bytes:
            return None
        return Reason(
            f"no schedule stays within {format_bytes(budget_bytes)}: no recompute gets below"
            f" {format_bytes(self.least_bytes)}",
            "a larger budget, a smaller micro-batch, or sharding or offload of what is not an activation",
        )

    def run(self, schedule: Schedule) -> Step:
        """The step under `schedule`, before the later passes."""
        return under_schedule(self.step, schedule)

    def peak_bytes(self, schedule: Schedule) -> int:
        """Of the step under `schedule`, after all passes."""
        return self.after(self.run(schedule)).peak_bytes()

    def after(self, step: Step) -> Step:
        """`step` after the later passes."""
        if not self.later:
            return step
        return self.program_after(step).step

    def program_after(self, step: Step) -> Program:
        """The program with `step` after the later passes."""
        return after_later(self.program(step), self.later, self.hardware, self.told)

    def program(self, step: Step) -> Program:
        return Program((RankClass(self.ranks, step),), self.micro_batch, self.accumulate)


class SchedulePlan(Plan):
    """A schedule of the whole model."""

    schedule: ScheduleField
    """In which order ops run, again and again, and when values are freed."""


@remembered
def under_schedule(step: Step, schedule: Schedule) -> Step:
    """`step` under a schedule that is right for it; what a plan was made with is what its rewrite asks for
    next.
    """
    region = region_of(step)
    assert not isinstance(region, str), region
    return run_schedule(step, region, schedule)


def place_of(program: Program, target: Target) -> Place:
    """Where a schedule of `program` is put: the same object for equal ones."""
    if program.ranks == 1 and not comes_and_goes(program, target):
        return _place(program.step, target.hardware, 1, 1, 1, (), NOTHING_TOLD)
    later = later_techniques(target)
    run = program.ranks, program.micro_batch, program.accumulate
    return _place(program.step, target.hardware, *run, later, told_later(target))


@remembered
def _place(
    step: Step,
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    later: tuple[Technique, ...],
    told: Told,
) -> Place:
    return Place(step, hardware, ranks, micro_batch, accumulate, later, told)


def cannot_freeze(program: Program, target: Target, *, online: bool = False) -> Reason | None:
    """Why no schedule can take the place of the model's forward and backward, nor, if asked for, the online
    runtime.
    """
    reason = schedules_nothing(target, "split", "sharding.parallel", "sharding.communication")
    if reason is not None:
        return reason
    if comes_and_goes(program, target):
        return not_of_all_blocks(
            program, target, "a frozen schedule runs ops of all blocks", "recompute: {kind: planned}"
        )
    region = region_of(program.step)
    if isinstance(region, str):
        return Reason(region, "recompute: {kind: planned}")
    odd = "" if online else not_foreseen(program.step, region)
    if odd:
        return Reason(odd, "recompute: {kind: planned}")
    return None


def schedules_nothing(target: Target, *slots: str) -> Reason | None:
    """Why no schedule runs in eager mode with what is chosen in `slots`."""
    if target.compiled:
        return Reason(SCHEDULED.eager_only, "execution.compile: false")
    return effects_conflict("recompute", SCHEDULED, target, *slots)


def comes_and_goes(program: Program, target: Target) -> bool:
    """Whether parameters, their gradients, or what a block keeps come and go with a block's own calls.

    That is by hooks, which nothing else calls; so each block has a schedule of its own.
    """
    return needs_calls_of_blocks(target)


def not_asked_for(program: Program, target: Target, kind: str) -> Reason | None:
    """Why `kind`, without a budget of its own, is not solved for beside packs, or what moves with the calls
    of whole blocks.

    Searches ask for the target's budget under each micro-batch and each such technique, which takes seconds.
    """
    offload = (
        packs_of(target)
        or (None if is_gathered(target) else follows_calls(target))
        or active(target, "offload.activations")
    )
    if offload is None:
        return None
    fix = f"recompute: {{kind: {kind}, budget_bytes: {target.budget_bytes or 20_000_000_000}}}"
    return Reason(f"beside {offload.kind} it is planned for a budget of its own", fix)


def not_of_all_blocks(program: Program, target: Target, what: str, otherwise: str) -> Reason:
    """Why `what` is impossible, where `comes_and_goes`; `otherwise` it could be."""
    if is_gathered(target):
        kind = target.chosen["sharding.states"].kind
        why = f"{what}, and {kind} gathers a block's parameters for its own calls alone"
        return Reason(why, f"{otherwise}, or sharding.states: {{kind: zero1}}")
    offload, moves = follows_calls(target), active(target, "offload.activations")
    if offload is None:
        assert moves is not None, "the caller has asked `comes_and_goes`"
        return Reason(
            f"{what}, and {moves.kind} moves what each block keeps",
            f"{otherwise}, or offload.activations: {{kind: none}}",
        )
    why = f"{what}, and {offload.kind} moves a block's parameters or gradients with its own calls alone"
    return Reason(why, f"{otherwise}, or offload.states: {{kind: optimizer_cpu}}")
