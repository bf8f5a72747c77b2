"""Base of the dynamic recompute techniques: a policy is simulated on the recorded step, and its decisions
become a schedule.
"""

from __future__ import annotations

import abc
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from memtune import refusals
from memtune.activations.eviction import OnlineRegion, Policy, PolicySchedule, online_policy, with_peak
from memtune.activations.recompute import states_online
from memtune.activations.schedules import not_foreseen, region_of
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.parallel.ranks import require_whole_parameters
from memtune.program import Program, Step
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces._support import conflict
from memtune.search_spaces.recompute._schedule_planner.online_budget import (
    OnlinePlan,
    online_peak_bytes,
    online_plan_fields,
    online_settings,
    online_shortfall,
    sufficient_online_bytes,
)
from memtune.search_spaces.recompute._schedule_planner.policy_schedule import (
    FitsOnline,
    check_schedule,
    install_region,
    solve_policy,
)
from memtune.search_spaces.recompute._schedule_planner.region_placement import (
    MODEL_SCHEDULED,
    Placement,
    SchedulePlan,
    apply_schedule,
    cannot_schedule_model,
    needs_own_budget,
    placement_of,
)
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes

_LOOKS = 4
"""Attempts at a budget that policy and online runtime meet, each from the other's last result."""
BUDGET_KNOBS = ("budget_bytes", "ratio", "online", "freeze_after")
"""Knobs that set the budget and the time of the decisions; all others are the policy's."""


class DynamicPlan(SchedulePlan):
    """A schedule of the whole model, its peak and time, and inputs of the online runtime if that decides."""

    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without recompute."""
    recompute_s: float
    """Seconds of recomputation in a micro-batch."""
    option: str = ""
    """Name of the policy that decided, if the technique has several; empty for its only one."""
    online: OnlinePlan | None = None
    """Inputs of the runtime that decides while the model runs; None if the schedule decides."""


class DynamicPolicy(Technique):
    """Base of the dynamic policies; `policy` selects the victims."""

    plan_types: ClassVar[tuple[type[Plan], ...]] = (DynamicPlan,)
    by_budget: ClassVar[bool] = True

    effects: ClassVar[Effects] = MODEL_SCHEDULED

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest peak allowed; less evicts and recomputes more. Default: all the memory that the target gives.
    """
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of bytes: 1 is the peak without recompute, 0 a peak that no recompute gets below."""

    online: bool | None = None
    """true: decide while the model runs, op by op, until `freeze_after`; false: only by a schedule made
    beforehand. Default: online if the model's ops depend on its data, or draw from a generator passed to it.
    """
    freeze_after: Annotated[int, Field(ge=0)] = 3
    """Online only: after this many consecutive runs of the same ops on the same shapes, the decisions run as
    a schedule, without the cost of deciding; 0: never.
    """

    @abc.abstractmethod
    def policy(self) -> Policy:
        """Return the policy that selects which tensors are evicted."""

    def options(self) -> tuple[Policy, ...]:
        """Return the policies to play; the one that recomputes least within the budget decides."""
        return (self.policy(),)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse a model that is not whole or is shared, and a budget that is met plainly or not at all."""
        if (reason := conflict(self, target, "execution.order")) is not None:
            return reason
        online = self.online is not False
        reason = cannot_schedule_model(program, target, online=online) or self._ddp_finds_unused(
            program, target
        )
        if reason is not None:
            return reason
        reason = self._no_budget(target)
        if reason is None and self.budget_bytes is None and self.ratio is None:
            reason = needs_own_budget(target, self.kind)
        if reason is not None:
            return reason
        place = placement_of(program, target)
        least = place.least_bytes
        # Then no eviction lowers the peak, whatever the policy.
        if place.plain_bytes <= least:
            return Reason(
                "the tensors that the model's forward saves do not set the peak", "recompute: {kind: none}"
            )
        budget_bytes = self._budget_bytes(place, target)
        # A ratio never gives more than the plain peak.
        if self.ratio is None and place.plain_bytes <= budget_bytes:
            return refusals.fits_already("recompute: {kind: none}")
        # A lower bound first: the policy would be played in vain.
        frozen = None if budget_bytes < least else self._frozen(program, target)
        if frozen is None:
            return self._too_little(place, budget_bytes)
        if self._is_online(program.step):
            return online_shortfall(
                program.step, frozen.policy, budget_bytes, target.hardware, place.more_bytes
            )
        return None

    def _no_budget(self, target: Target) -> Reason | None:
        if self.budget_bytes is not None and self.ratio is not None:
            return refusals.two_budgets("ratio")
        if self._has_no_budget(target):
            fix = f"--max-memory 20GiB, or recompute: {{kind: {self.kind}, ratio: 0.5}}"
            return Reason("there is no budget to evict for", fix)
        return None

    def plan(self, program: Program, target: Target) -> DynamicPlan:
        frozen = self._frozen(program, target)
        if frozen is None:
            raise ApplyError(
                f"recompute: {{kind: {self.kind}}} has no schedule within its budget.",
                fix="give a larger budget",
                code="MT317",
            )
        place, online = placement_of(program, target), None
        if self._is_online(program.step):
            online = self._online(program, target, frozen.policy)
            # The schedule predicts the ops of the runtime, so it holds no more than they do.
            if 0 < (peak_bytes := online.peak_bytes + place.more_bytes) < frozen.peak_bytes:
                check = _online_check(True)
                frozen = solve_policy(place, (frozen.policy,), peak_bytes, check) or frozen
        return DynamicPlan(
            schedule=frozen.schedule,
            peak_bytes=frozen.peak_bytes,
            plain_bytes=place.plain_bytes,
            recompute_s=round(frozen.recompute_s, 9),
            option=frozen.policy.option,
            online=online,
        )

    def rewrite(self, program: Program, plan: DynamicPlan, target: Target) -> Program:
        """Return the program under the schedule; online, with as many values kept as the budget allows."""
        region, schedule = region_of(program.step), plan.schedule
        if isinstance(region, str) or schedule.graph != region.graph.sha256:
            return program  # the executor also runs the plain model if the graph differs
        step = apply_schedule(program.step, schedule)
        if plan.online is not None:
            # Online decisions may differ from the schedule's, so the pass takes the peak that the simulated
            # runtime has.
            step = states_online(with_peak(step, plan.online.peak_bytes))
        return program.with_step(step)

    def apply(self, context: Context, plan: DynamicPlan) -> None:
        """Replace the model's forward by the executor of the schedule."""
        if plan.online is not None:
            self._apply_online(context, plan.online, self._option(plan.option))
            return
        region = install_region(context, replace(plan.schedule, made_by=self.kind), self.kind)
        context.checks["recompute"] = lambda: check_schedule(region)

    def _option(self, name: str) -> Policy:
        """Return the policy of that name; plans from before there were options name none."""
        by_name = {each.option: each for each in self.options()} | {"": self.policy()}
        if name not in by_name:
            raise ApplyError(
                f"the plan of recompute: {{kind: {self.kind}}} names the policy '{name}', which the settings"
                " do not have.",
                fix="plan again: memtune search, or memtune plan",
                code="MT316",
            )
        return by_name[name]

    def _apply_online(self, context: Context, plan: OnlinePlan, policy: Policy) -> None:
        """Replace the model's forward by the online runtime."""
        settings = online_settings(plan, online_policy(policy), self.freeze_after)
        region = OnlineRegion(context.model, context.optimizer, settings, context.device)
        region.install()
        context.events.states_sharded.subscribe(
            # Known only when states have been sharded.
            partial(require_whole_parameters, context, f"recompute: {{kind: {self.kind}}}", hides_graph=True)
        )
        context.checks["recompute"] = lambda: _check_online(region)

    def _ddp_finds_unused(self, program: Program, target: Target) -> Reason | None:
        """Return why DDP cannot search for unused parameters: the graph exists in backward only."""
        states = target.chosen.get("sharding.states") if program.ranks > 1 else None
        if states is None or not states.effects.finds_unused or not self._is_online(program.step):
            return None
        return refusals.hidden_graph(f"recompute: {{kind: {self.kind}}}")

    def _is_online(self, step: Step) -> bool:
        region = region_of(step)
        return bool(self.online) or (
            self.online is None and not isinstance(region, str) and bool(not_foreseen(step, region))
        )

    def _online(self, program: Program, target: Target, policy: Policy) -> OnlinePlan:
        """Return the runtime's inputs: the budget, bytes that it does not see, and fixed rates."""
        place = placement_of(program, target)
        budget_bytes = self._budget_bytes(place, target)
        peak = online_peak_bytes(place.step, policy, budget_bytes - place.more_bytes, target.hardware)
        fields = online_plan_fields(place.step, target.hardware, place.buffer_bytes)
        return OnlinePlan(budget_bytes=budget_bytes, peak_bytes=peak or 0, **fields)

    def record(self, target: Target) -> dict[str, Any]:
        # The budget is listed below by its value: the target's is the same as one that is given.
        settings = {name: value for name, value in self.knobs() if name not in BUDGET_KNOBS}
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

    def _budget_bytes(self, place: Placement, target: Target) -> int:
        if self.ratio is not None:
            least = place.least_bytes
            return least + int(self.ratio * max(place.plain_bytes - least, 0))
        found = self.budget_bytes or target.budget_bytes
        assert found is not None  # the caller checked `_has_no_budget`
        return found

    def _frozen(self, program: Program, target: Target) -> PolicySchedule | None:
        region = region_of(program.step)
        if isinstance(region, str) or self._has_no_budget(target):
            return None
        place = placement_of(program, target)
        return solve_policy(
            place,
            self.options(),
            self._budget_bytes(place, target),
            _online_check(self._is_online(program.step)),
        )

    def _too_little(self, place: Placement, budget_bytes: int) -> Reason:
        """Return a reason, with a sufficient budget if a config gave one."""
        # A search asks often and gets no such hint.
        why = f"the policy finds no way to stay within {format_bytes(budget_bytes)} without thrashing"
        rest = "a smaller micro-batch, or recompute: {kind: planned}"
        enough = None
        if self.budget_bytes is not None:
            enough = self._sufficient_bytes(place, budget_bytes)
        if enough is None:
            return Reason(
                f"{why}; no recompute gets below {format_bytes(place.least_bytes)}",
                f"a larger budget, {rest}",
            )
        return Reason(f"{why}; {format_bytes(enough)} are enough", f"budget_bytes: {enough}, {rest}")

    def _sufficient_bytes(self, place: Placement, too_little_bytes: int) -> int | None:
        """Return a budget that the policy meets, and the online runtime if that decides; None if none."""
        online, found = self._is_online(place.step), too_little_bytes
        # Each side may need more than the other allows; a few rounds usually agree.
        for _ in range(_LOOKS):
            by_policy = _sufficient_bytes(place, self.options(), found, online)
            if by_policy is None or not online:
                return by_policy
            frozen = solve_policy(place, self.options(), by_policy, _online_check(online))
            assert frozen is not None  # `by_policy` has a schedule
            found = (
                sufficient_online_bytes(
                    place.step, frozen.policy, by_policy, place.hardware, place.more_bytes
                )
                or 0
            )
            if not found or solve_policy(place, self.options(), found, _online_check(online)) is not None:
                return found or None
        return None


def _fits_online(place: Placement, policy: Policy, budget_bytes: int) -> bool:
    budget_online = budget_bytes - place.more_bytes
    return online_peak_bytes(place.step, policy, budget_online, place.hardware) is not None


def _online_check(online: bool) -> FitsOnline | None:
    return _fits_online if online else None


@lru_cache(maxsize=16)
def _sufficient_bytes(
    place: Placement, options: tuple[Policy, ...], too_little_bytes: int, online: bool
) -> int | None:
    """Return a budget for which `options` have a schedule, within 1 % of one for which it has none; None if
    not even the plain peak is enough.
    """
    # A policy may fail above a budget that it meets, so bisection finds some budget that it meets, not the
    # smallest.
    fits_online = _online_check(online)
    low, high, least = too_little_bytes, place.plain_bytes, place.least_bytes
    if low < least:
        if solve_policy(place, options, least, fits_online) is not None:
            return least
        low = least
    if solve_policy(place, options, high, fits_online) is None:
        return None
    # `low` has no schedule and `high` has one, before and after each round.
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (
            (middle, high) if solve_policy(place, options, middle, fits_online) is None else (low, middle)
        )
    return high


def _check_online(region: OnlineRegion) -> dict[str, Any]:
    """Return facts for the audit: steps, evictions, recomputations and the largest simulated bytes."""
    if not region.is_installed:
        raise ApplyError(
            "the model should run within a budget, but its forward is not the runtime's.", code="MT313"
        )
    facts: dict[str, Any] = {f"online_{name}": value for name, value in asdict(region.runs).items()}
    return facts | {"frozen_runs": region.frozen_steps, "why_online": region.why_online}
