"""What the dynamic recompute techniques share: a policy is played on the recorded step, what it did becomes a
schedule.
"""

from __future__ import annotations

import abc
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from memtune.activations.eviction import (
    Frozen,
    OnlineRegion,
    Policy,
    Trace,
    freeze,
    online_policy,
    region_trace,
    with_peak,
)
from memtune.activations.recompute import states_online
from memtune.activations.schedules import FrozenRegion, elements_of, not_foreseen, region_of
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.hardware import Hardware, op_costs
from memtune.parallel.ranks import require_whole_parameters
from memtune.program import Program, Schedule, Step
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces.recompute._schedule_planner.block_options import is_cheap
from memtune.search_spaces.recompute._schedule_planner.block_schedules import (
    BlockSchedules,
    BudgetBlocksPlan,
    cannot_run_blocks,
    found_by_blocks,
    install_blocks,
    instead_of_schedule,
    plan_by_blocks,
    rewritten_by_blocks,
)
from memtune.search_spaces.recompute._schedule_planner.online_budget import (
    OnlinePlan,
    enough_online,
    peak_online,
    settings_online,
    told_online,
    too_little_online,
)
from memtune.search_spaces.recompute._schedule_planner.placement import (
    SCHEDULED,
    Place,
    SchedulePlan,
    cannot_freeze,
    comes_and_goes,
    not_asked_for,
    not_of_all_blocks,
    place_of,
    under_schedule,
)
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes

_LOOKS = 4
"""For a budget that both a policy and the online runtime meet, each from where the other has got to."""
NOT_THE_POLICYS = ("budget_bytes", "ratio", "online", "freeze_after")
"""Knobs that say for which budget and when to decide, not how."""


class DynamicPlan(SchedulePlan):
    """A schedule of the whole model, what it comes to, and what the online runtime is told where that
    decides.
    """

    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without recompute."""
    replay_s: float
    """Seconds of what runs again in a micro-batch."""
    online: OnlinePlan | None = None
    """Of the runtime that decides while the model runs; none where the schedule decides."""


class DynamicPolicy(Technique):
    """Base of the dynamic policies: `policy` says which one."""

    plan_types: ClassVar[tuple[type[Plan], ...]] = (DynamicPlan, BudgetBlocksPlan)

    effects: ClassVar[Effects] = SCHEDULED

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within; less evicts more and runs more again. Left out: all the memory that the target
    gives.
    """
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """In place of bytes: 1 is the peak without recompute, 0 a peak that no recompute gets below."""

    online: bool | None = None
    """true: decide while the model runs, op by op, until `freeze_after`; false: only by a schedule made
    before. Left out: online where what the model runs depends on its data, or draws from a generator that it
    is given.
    """
    freeze_after: Annotated[int, Field(ge=0)] = 3
    """Online, runs of the same ops on the same shapes, one after the other, after which what was decided runs
    as a schedule, without what deciding costs; 0: never.
    """

    @abc.abstractmethod
    def policy(self) -> Policy:
        """Who is evicted."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs the model to itself, whole on every rank, and a budget that plain training exceeds and the
        policy meets.
        """
        if comes_and_goes(program, target):
            return self._fits_by_blocks(program, target)
        online = self.online is not False
        reason = cannot_freeze(program, target, online=online) or self._looked_through(program, target)
        if reason is not None:
            return reason
        reason = self._no_budget(target)
        if reason is not None:
            return reason
        place = place_of(program, target)
        least = place.least_bytes
        if place.plain_bytes <= least:
            return Reason("the peak is not made of what the model's forward saves", "recompute: {kind: none}")
        budget_bytes = self._budget_bytes(place, target)
        if self.ratio is None and place.plain_bytes <= budget_bytes:
            return Reason("everything fits into the budget as it is", "recompute: {kind: none}")
        if budget_bytes < least or self._frozen(program, target) is None:
            return self._too_little(place, budget_bytes)
        if self._is_online(program.step):
            return too_little_online(
                program.step, self.policy(), budget_bytes, target.hardware, place.more_bytes
            )
        return None

    def _no_budget(self, target: Target) -> Reason | None:
        if self.budget_bytes is not None and self.ratio is not None:
            return Reason("budget_bytes and ratio both say what the budget is", "give one of them")
        if self._has_no_budget(target):
            fix = f"--max-memory 20GiB, or recompute: {{kind: {self.kind}, ratio: 0.5}}"
            return Reason("there is no budget to evict for", fix)
        return None

    def _fits_by_blocks(self, program: Program, target: Target) -> Reason | None:
        """Where parameters or gradients come and go with a block's own calls: the policy is played on each
        block beforehand.
        """
        if self.online:
            return not_of_all_blocks(
                program, target, "online it evicts and runs ops of all blocks", "online: false"
            )
        reason = cannot_run_blocks(program, target) or self._no_budget(target)
        if reason is not None:
            return reason
        if (
            self.budget_bytes is None
            and self.ratio is None
            and (reason := not_asked_for(program, target, self.kind))
        ):
            return reason
        place, budget = place_of(program, target), self._budget_of(target)
        if budget is not None and place.plain_live_bytes <= budget:
            return Reason("everything fits into the budget as it is", "recompute: {kind: none}")
        found = self._found_by_blocks(program, target)
        if not found.is_within:
            return Reason(
                f"the policy finds no way to stay within {format_bytes(found.budget_bytes)}; the smallest"
                f" that it finds is {format_bytes(found.smallest_bytes)}",
                "a larger budget, a smaller micro-batch, or recompute: {kind: planned}",
            )
        return (
            None
            if found.again_s > 0
            else Reason("nothing could be let go that is worth having again", "recompute: {kind: none}")
        )

    def _found_by_blocks(self, program: Program, target: Target) -> BlockSchedules:
        return found_by_blocks(
            place_of(program, target), (self.policy(),), self._budget_of(target), self.ratio or 0.0
        )

    def _budget_of(self, target: Target) -> int | None:
        """In bytes; None where `ratio` says it."""
        return None if self.ratio is not None else self.budget_bytes or target.budget_bytes

    def plan(self, program: Program, target: Target) -> DynamicPlan | BudgetBlocksPlan:
        """The schedule that the policy's decisions make, its peak, and the seconds of what runs again."""
        if comes_and_goes(program, target) and not self._has_no_budget(target):
            return plan_by_blocks(self._found_by_blocks(program, target))
        frozen = self._frozen(program, target)
        if frozen is None:
            raise ApplyError(
                f"recompute: {{kind: {self.kind}}} has no schedule within its budget.",
                fix="give a larger budget",
                code="MT317",
            )
        return DynamicPlan(
            schedule=frozen.schedule,
            peak_bytes=frozen.peak_bytes,
            plain_bytes=place_of(program, target).plain_bytes,
            replay_s=round(frozen.replay_s, 9),
            online=self._online(program, target) if self._is_online(program.step) else None,
        )

    def rewrite(self, program: Program, plan: DynamicPlan | BudgetBlocksPlan, target: Target) -> Program:
        """The model's forward and backward run as the schedule says; online as much stays as the
        budget lets.
        """
        if isinstance(plan, BudgetBlocksPlan):
            return rewritten_by_blocks(plan, program, self.kind)
        region, schedule = region_of(program.step), plan.schedule
        if isinstance(region, str) or schedule.graph != region.graph.sha256:
            return program  # as the executor does: the plain model runs
        step = under_schedule(program.step, schedule)
        if plan.online is not None:
            step = states_online(with_peak(step, plan.online.peak_bytes))
        return program.with_step(step)

    def apply(self, context: Context, plan: DynamicPlan | BudgetBlocksPlan) -> None:
        """Put the executor of the schedule in the place of the model's forward."""
        if isinstance(plan, BudgetBlocksPlan):
            install_blocks(plan, context, self.kind)
            return
        if plan.online is not None:
            self._apply_online(context, plan.online)
            return
        region = install_region(context, replace(plan.schedule, made_by=self.kind), self.kind)
        context.checks["recompute"] = lambda: check_schedule(region)

    def _apply_online(self, context: Context, plan: OnlinePlan) -> None:
        """Put the online runtime in the place of the model's forward."""
        settings = settings_online(plan, online_policy(self.policy()), self.freeze_after)
        region = OnlineRegion(context.model, context.optimizer, settings, context.device)
        region.install()
        context.events.states_sharded.subscribe(
            partial(require_whole_parameters, context, f"recompute: {{kind: {self.kind}}}", ahead=True)
        )
        context.checks["recompute"] = lambda: _check_online(region)

    def _looked_through(self, program: Program, target: Target) -> Reason | None:
        """DDP would look for unused parameters in a graph that is there in backward alone."""
        states = target.chosen.get("sharding.states") if program.ranks > 1 else None
        if states is None or not states.effects.finds_unused or not self._is_online(program.step):
            return None
        return Reason(
            "DDP cannot look for unused parameters in a graph that is made in backward", "online: false"
        )

    def _is_online(self, step: Step) -> bool:
        region = region_of(step)
        return bool(self.online) or (
            self.online is None and not isinstance(region, str) and bool(not_foreseen(step, region))
        )

    def _online(self, program: Program, target: Target) -> OnlinePlan:
        """What the runtime is told: the budget, what is outside of it, and rates that make costs the same in
        every run.
        """
        place = place_of(program, target)
        budget_bytes = self._budget_bytes(place, target)
        peak = peak_online(place.step, self.policy(), budget_bytes - place.more_bytes, target.hardware)
        told = told_online(place.step, target.hardware, place.buffer_bytes)
        return OnlinePlan(budget_bytes=budget_bytes, peak_bytes=peak or 0, **told)

    def record(self, target: Target) -> dict[str, Any]:
        """The policy and its budget."""
        settings = {name: value for name, value in self.knobs() if name not in NOT_THE_POLICYS}
        return {
            "activations.recompute": {
                "policy": self.kind,
                "online": self.online,
                **settings,
                "budget": self.budget_bytes or target.budget_bytes,
                "ratio": self.ratio,
            }
        }

    def _has_no_budget(self, target: Target) -> bool:
        return self.ratio is None and self.budget_bytes is None and target.budget_bytes is None

    def _budget_bytes(self, place: Place, target: Target) -> int:
        if self.ratio is not None:
            least = place.least_bytes
            return least + int(self.ratio * max(place.plain_bytes - least, 0))
        found = self.budget_bytes or target.budget_bytes
        assert found is not None  # `_has_no_budget` was asked
        return found

    def _frozen(self, program: Program, target: Target) -> Frozen | None:
        region = region_of(program.step)
        if isinstance(region, str) or self._has_no_budget(target):
            return None
        place = place_of(program, target)
        return solved(place, self.policy(), self._budget_bytes(place, target), self._is_online(program.step))

    def _too_little(self, place: Place, budget_bytes: int) -> Reason:
        """Says what would be enough where a config asks for these bytes; a search, which asks of many, does
        not look for it.
        """
        why = f"the policy finds no way to stay within {format_bytes(budget_bytes)}"
        rest = "a smaller micro-batch, or recompute: {kind: planned}"
        enough = None
        if self.budget_bytes is not None:
            enough = self._enough_bytes(place, budget_bytes)
        if enough is None:
            return Reason(
                f"{why}; no recompute gets below {format_bytes(place.least_bytes)}",
                f"a larger budget, {rest}",
            )
        return Reason(f"{why}; {format_bytes(enough)} are enough", f"budget_bytes: {enough}, {rest}")

    def _enough_bytes(self, place: Place, too_little_bytes: int) -> int | None:
        """A budget that the policy meets, and the online runtime as well where that decides; None where none
        is found.
        """
        online, found = self._is_online(place.step), too_little_bytes
        for _ in range(_LOOKS):
            by_policy = _enough_bytes(place, self.policy(), found, online)
            if by_policy is None or not online:
                return by_policy
            found = enough_online(place.step, self.policy(), by_policy, place.hardware, place.more_bytes) or 0
            if not found or solved(place, self.policy(), found, online) is not None:
                return found or None
        return None


@lru_cache(maxsize=32)
def solved(place: Place, policy: Policy, budget_bytes: int, online: bool = False) -> Frozen | None:
    """Solved once for a place, policy and budget."""
    traces = [
        partial(_trace, place.step, place.hardware, online, keep_written) for keep_written in (False, True)
    ]
    return freeze(place.among, traces, policy, budget_bytes, place.peak_bytes)


@lru_cache(maxsize=16)
def _enough_bytes(place: Place, policy: Policy, too_little_bytes: int, online: bool) -> int | None:
    """A budget for which the policy has a schedule, within 1 % of one for which it has none; None: not even
    the peak.

    A policy may fail above a budget that it meets: what is found, by bisection, is one that it does meet.
    """
    low, high, least = too_little_bytes, place.plain_bytes, place.least_bytes
    if low < least:
        if solved(place, policy, least, online) is not None:
            return least
        low = least
    if solved(place, policy, high, online) is None:
        return None
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (middle, high) if solved(place, policy, middle, online) is None else (low, middle)
    return high


@lru_cache(maxsize=16)
def _trace(step: Step, hardware: Hardware, online: bool, keep_written: bool) -> Trace:
    """The same for all policies and budgets."""
    region = region_of(step)
    assert not isinstance(region, str)  # `cannot_freeze` has seen to it
    op_s = op_costs(step, hardware).op_s[region.rows]
    return region_trace(
        region, op_s, is_cheap, elements_of(step, region), keep_written=keep_written, online=online
    )


def install_region(context: Context, schedule: Schedule, kind: str) -> FrozenRegion:
    """Put the executor of `schedule` in the place of the model's forward, for the technique `kind`."""
    region = FrozenRegion(context.model, schedule, context.device)
    region.install()
    context.events.states_sharded.subscribe(
        partial(require_whole_parameters, context, f"recompute: {{kind: {kind}}}")
    )
    return region


def check_schedule(region: FrozenRegion) -> dict[str, Any]:
    """Facts for the audit: how often the schedule ran, and the plain model in its place.

    Raises:
        ApplyError: It never ran, or something else has taken its place.
    """
    runs = region.runs
    if not region.is_installed:
        raise ApplyError("the model should run by a schedule, but its forward was replaced.", code="MT313")
    if runs.plain and not runs.frozen:
        raise ApplyError(
            "the model ran without its schedule.",
            evidence=f"{runs.why_plain[:1].upper()}{runs.why_plain[1:]}.",
            fix=instead_of_schedule(runs.why_plain, "selective"),
            code="MT313",
        )
    return {"frozen_runs": runs.frozen, "plain_runs": runs.plain, "why_plain": runs.why_plain}


def _check_online(region: OnlineRegion) -> dict[str, Any]:
    """Facts for the audit: steps, what was evicted and run again, the most bytes that were on the books."""
    if not region.is_installed:
        raise ApplyError(
            "the model should run within a budget, but its forward is not the runtime's.", code="MT313"
        )
    facts: dict[str, Any] = {f"online_{name}": value for name, value in asdict(region.runs).items()}
    return facts | {
        "frozen_runs": region.frozen_steps,
        "why_online": region.why_online,
        "why_under_mode": region.why_under_mode,
    }
