"""A frozen schedule in the place of a plan by blocks, where it is faster within the same budget.

A plan by blocks runs a block again as one piece, before the first of its backward ops that needs it. A
schedule says op by op what runs again and what is let go early, across blocks, so it meets smaller budgets
and takes less time near the plain peak. In return it runs the whole model itself, without what other
mechanisms do inside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from memtune.activations.eviction import COOP, DTR, MEGTAICHI, Policy
from memtune.activations.schedules import Late, region_of
from memtune.errors import ApplyError
from memtune.hardware import Hardware, op_costs
from memtune.program import Program, Schedule, Step, wrong_with
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces.recompute._block_planner import Solution
from memtune.search_spaces.recompute._schedule_planner.block_options import LATE
from memtune.search_spaces.recompute._schedule_planner.block_schedules import (
    BlockSchedules,
    cannot_run_blocks,
    found_by_blocks,
    surely_slower,
)
from memtune.search_spaces.recompute._schedule_planner.checkmate_schedule import schedule_for
from memtune.search_spaces.recompute._schedule_planner.frozen_policy import (
    check_schedule,
    install_region,
    solved,
)
from memtune.search_spaces.recompute._schedule_planner.placement import (
    Place,
    SchedulePlan,
    cannot_freeze,
    place_of,
    under_schedule,
)
from memtune.technique import Reason, Target
from memtune.units import format_bytes, format_seconds

_POLICIES = (replace(DTR, neighbours="closure"), replace(DTR, neighbours="own"), MEGTAICHI, COOP)
_LEVELS = 16
"""Budgets, as parts of the plain peak, that every policy is asked for besides the real one."""
_LEVELS_ON_RANKS = 2
"""The same where each way to divide states is a place of its own, and each schedule is judged after its
passes.
"""
_NODES = 16
_SOURCES = (LATE, *_POLICIES)
"""Who is asked for schedules of single blocks; on so few ops the integer program finds none that these do not
have.
"""
NOT_FASTER = Reason("no schedule is faster than the plan by blocks", "by_schedule: false")
_BACK = 24
"""Values that are tried once more whether they can stay."""
_PROBES = 12
"""Places of an order where its peak is looked at, to know where the lowest is."""
_MOST_OPS = 4000
"""Programs with more ops are left to the policies: they take milliseconds where the integer program takes
seconds.
"""


@dataclass(frozen=True)
class FastestSchedule:
    """A schedule and what it comes to."""

    schedule: Schedule
    peak_bytes: int
    seconds: float
    """On top of the plain step."""


def fastest_schedule(program: Program, target: Target, budget_bytes: int) -> FastestSchedule | Reason | None:
    """The fastest schedule of the dynamic policies and of Checkmate within the budget; None if they find
    none.

    Args:
        program: Without recompute.
        target: What it is for.
        budget_bytes: Peak of the whole step.
    """
    reason = cannot_freeze(program, target)
    if reason is not None:
        return reason
    place = place_of(program, target)
    if program.ranks > 1 and (reason := place.below(budget_bytes)) is not None:
        return reason
    return _fastest(place, budget_bytes)


@lru_cache(maxsize=16)
def enough_bytes(place: Place, too_little_bytes: int, by_blocks_bytes: int) -> int | None:
    """A budget that a schedule meets and no plan by blocks, near the least one; None where none is found.

    Args:
        place: Of the program without recompute.
        too_little_bytes: A budget that no schedule meets.
        by_blocks_bytes: The smallest peak of a plan by blocks.
    """

    def is_met(budget_bytes: int) -> bool:
        tried = chain((_late(place, budget_bytes),), _by_policies(place, budget_bytes))
        return any(each is not None and each.peak_bytes <= budget_bytes for each in tried)

    low, high = max(too_little_bytes, place.least_bytes - 1), by_blocks_bytes - 1
    if high <= low or not is_met(high):
        return None
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high


def fastest_by_blocks(program: Program, target: Target, solution: Solution) -> BlockSchedules | Reason:
    """The same where parameters are there for a block's own calls alone: a schedule for each block.

    Where none is within the budget and no plan by blocks either, it is the smallest one that was found.
    """
    reason = cannot_run_blocks(program, target)
    if reason is not None:
        return reason
    place, budget_bytes = place_of(program, target), solution.budget_bytes
    if solution.is_within and surely_slower(place, _SOURCES, budget_bytes, solution.seconds):
        return NOT_FASTER
    found = found_by_blocks(place, _SOURCES, budget_bytes)
    slower = not found.is_within or found.again_s >= solution.seconds
    return NOT_FASTER if solution.is_within and slower else found


@lru_cache(maxsize=64)
def _fastest(place: Place, budget_bytes: int) -> FastestSchedule | None:
    """The fastest of all that were found within the budget."""
    found = list(_by_policies(place, budget_bytes))
    if place.step.ops.n <= _MOST_OPS:
        exact = schedule_for(place, budget_bytes, 0.0, _NODES, 0.0)
        found.append(None if isinstance(exact, str) else _judged(place, exact.schedule))
    found.append(_late(place, budget_bytes))
    within = [each for each in found if each is not None and each.peak_bytes <= budget_bytes]
    return min(within, key=lambda each: (each.seconds, each.peak_bytes), default=None)


def _by_policies(place: Place, budget_bytes: int) -> Iterator[FastestSchedule | None]:
    """What the dynamic policies find.

    A policy that has more memory may do worse, so what it does with less is looked at as well: on a grid that
    does not depend on the budget, so that a larger budget has all that a smaller one has of it.
    """
    plain, levels = place.plain_bytes, _LEVELS if place.ranks == 1 else _LEVELS_ON_RANKS
    budgets = [
        plain * level // levels for level in range(1, levels) if plain * level // levels < budget_bytes
    ]
    for given in (*budgets, budget_bytes):
        for policy in _POLICIES:
            yield _played(place, policy, given)


@lru_cache(maxsize=256)
def _played(place: Place, policy: Policy, budget_bytes: int) -> FastestSchedule | None:
    frozen = solved(place, policy, budget_bytes)
    return None if frozen is None else _judged(place, frozen.schedule)


class _LateSearch:
    """Schedules of one step by what they let go after forward (`activations.schedules.late_free_planner`),
    judged as far as they were asked for.
    """

    def __init__(self, place: Place) -> None:
        region = place.among
        costs = op_costs(place.step, place.hardware)
        op_s = costs.op_s.clip(min=costs.issue_s)[region.rows]
        self._place, self._graph = place, region.graph
        self._late = Late(
            region.graph, region.bytes, op_s, region.outside_until, place.step.ops.block[region.rows]
        )
        self.order = self._late.order()
        self._known: dict[frozenset[int], FastestSchedule | None] = {}
        self._turns: dict[int, int] = {}

    def judged(self, gone: frozenset[int]) -> FastestSchedule | None:
        """What it comes to; None where it is not right."""
        if gone not in self._known:
            schedule = self._late.schedule(gone)
            wrong = wrong_with(self._graph, schedule)
            self._known[gone] = None if wrong else _judged(self._place, schedule)
        return self._known[gone]

    def within(self, budget_bytes: int) -> FastestSchedule | None:
        """The faster one of both orders' schedules within the budget."""
        first = self._cut(self.order, budget_bytes)
        if not self._late.handed_on.intersection(self.order[:first]):
            return self._within(self.order[:first], budget_bytes)  # the other order begins alike
        second = self._late.order(self._late.handed_on)
        both = self.order[:first], second[: self._cut(second, budget_bytes)]
        found = [each for each in (self._within(gone, budget_bytes) for gone in both) if each is not None]
        return min(found, key=lambda each: (each.seconds, each.peak_bytes), default=None)

    def _cut(self, order: list[int], budget_bytes: int) -> int:
        """How many of `order` go, as few as meet the budget; as many as give the lowest peak where
        none do.
        """
        low, high = 0, self._turn(order)
        while low < high:
            middle = (low + high) // 2
            found = self.judged(frozenset(order[:middle]))
            low, high = (
                (low, middle)
                if found is not None and found.peak_bytes <= budget_bytes
                else (middle + 1, high)
            )
        return low

    def _turn(self, order: list[int]) -> int:
        """How many of `order` go for a low peak: with more gone, what runs again for each can be more than it
        freed.
        """
        if len(order) not in self._turns:
            step = max(len(order) // _PROBES, 1)
            counts = {*range(step, len(order), step), len(order)}
            best = min(counts, key=lambda count: (self._peak_bytes(order, count), count), default=0)
            while step > 1:
                step = (step + 1) // 2
                near = {min(max(best + way, 0), len(order)) for way in (-step, 0, step)}
                best = min(near, key=lambda count: (self._peak_bytes(order, count), count))
            self._turns[len(order)] = best
        return self._turns[len(order)]

    def _peak_bytes(self, order: list[int], count: int) -> float:
        found = self.judged(frozenset(order[:count]))
        return math.inf if found is None else found.peak_bytes

    def _within(self, going: list[int], budget_bytes: int) -> FastestSchedule | None:
        """As `going` says; then what turns out not to be needed for that comes back, the dearest first."""
        gone = frozenset(going)
        best = self.judged(gone)
        if best is None or best.peak_bytes > budget_bytes:
            return None
        for value in going[: -_BACK - 1 : -1]:
            found = self.judged(gone - {value})
            if found is not None and found.peak_bytes <= budget_bytes and found.seconds < best.seconds:
                gone, best = gone - {value}, found
        return best


@lru_cache(maxsize=4)
def _late_search(place: Place) -> _LateSearch:
    return _LateSearch(place)


@lru_cache(maxsize=64)
def _late(place: Place, budget_bytes: int) -> FastestSchedule | None:
    return _late_search(place).within(budget_bytes)


def _judged(place: Place, schedule: Schedule) -> FastestSchedule:
    run = place.run(schedule)
    seconds = _seconds(run, place.hardware) - _seconds(place.step, place.hardware)
    return FastestSchedule(schedule, place.after(run).peak_bytes(), seconds)


def _seconds(step: Step, hardware: Hardware) -> float:
    """As plans by blocks are priced: an op that is shorter than it takes to issue costs the host as much."""
    costs = op_costs(step, hardware)
    return float(costs.op_s.clip(min=costs.issue_s).sum())


class BudgetSchedulePlan(SchedulePlan):
    """A schedule of the whole model within a budget."""

    budget_bytes: Bytes
    """Peak to stay within."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without a schedule."""
    again_s: float
    """Seconds of what runs again in a micro-batch."""


def plan_of(found: FastestSchedule, budget_bytes: int, plain_bytes: int) -> BudgetSchedulePlan:
    """The plan that holds a schedule."""
    return BudgetSchedulePlan(
        schedule=found.schedule,
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        plain_bytes=plain_bytes,
        again_s=round(found.seconds, 9),
    )


def rewritten_by(plan: SchedulePlan, program: Program) -> Program:
    """The model's ops in the order of the plan's schedule.

    Raises:
        ApplyError: The schedule is for another model.
    """
    region, schedule = region_of(program.step), plan.schedule
    wrong = region if isinstance(region, str) else wrong_with(region.graph, schedule)
    if isinstance(region, str) or wrong:
        raise ApplyError(
            "the plan's schedule is for another model.", evidence=f"{wrong}.", fix=_SEARCH, code="MT316"
        )
    return program.with_step(under_schedule(program.step, schedule))


def install_schedule(plan: SchedulePlan, context: Context, *, made_by: str = "planned") -> None:
    """Put the executor of the plan's schedule in the place of the model's forward; the audit asks whether it
    ran.
    """
    region = install_region(context, replace(plan.schedule, made_by=made_by), made_by)
    context.checks["recompute"] = lambda: check_schedule(region)


def explained_schedule(plan: BudgetSchedulePlan) -> tuple[str, ...]:
    """What the plan's schedule comes to, in a line."""
    peak, budget, plain = (
        format_bytes(each) for each in (plan.peak_bytes, plan.budget_bytes, plan.plain_bytes)
    )
    again, runs = format_seconds(plan.again_s), len(plan.schedule.computes())
    return (
        (
            f"peak {peak} by a schedule of {runs} ops for a budget of {budget}; {plain} without it; costs"
            f" {again} a micro-batch"
        ),
    )


_SEARCH = (
    "memtune search  or  memtune trial --config  makes one and says the least budget; or recompute: {kind:"
    " full}"
)
