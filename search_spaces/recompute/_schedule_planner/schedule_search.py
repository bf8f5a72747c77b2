"""A schedule of single ops instead of a plan by blocks, where it is faster within the same budget.

A plan by blocks runs a block again as a unit, before the first of its backward ops that needs it. A schedule
decides op by op what to recompute and what to free early, across blocks, so it meets smaller budgets and
takes less time near the plain peak. In return it runs the whole model itself, and mechanisms inside the model
do not run.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product

from memtune import refusals
from memtune.activations.eviction import COOP, DTR, MEGTAICHI, Policy
from memtune.activations.schedules import region_of
from memtune.hardware import Hardware, op_costs
from memtune.program import (
    F64,
    I32,
    I64,
    OpGraph,
    Program,
    Schedule,
    Step,
    build_schedule,
    find_schedule_error,
)
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces.recompute._block_planner.measured_options import schedule_s
from memtune.search_spaces.recompute._schedule_planner.checkmate_schedule import schedule_for
from memtune.search_spaces.recompute._schedule_planner.policy_schedule import (
    check_schedule,
    install_region,
    solve_policy,
)
from memtune.search_spaces.recompute._schedule_planner.region_placement import (
    Placement,
    SchedulePlan,
    apply_schedule,
    cannot_schedule_model,
    placement_of,
)
from memtune.technique import Reason, Target
from memtune.units import format_bytes, format_seconds


class FreeAfterForwardPlanner:
    """Values of one region that may be freed after forward, each recomputed once, just before backward first
    reads it, and the schedules that do so.

    It does what a compiler's partitioner does (torch's `activation_memory_budget`), over the ops of a whole
    region. Freed values are recomputed one by one, so that a block's second run is never resident as a whole.
    Values are selected in the order of seconds per byte, which include the ops that must run again for them
    and do not run again already.

    If a whole block is recomputed, freeing its output costs no additional time. But without that output the
    next block's recomputation waits for this block's, and all blocks are resident at once. So there is a
    second order, which never frees what a block passes to another.

    Args:
        graph: Ops of the region.
        n_bytes: (m,) bytes of each value.
        op_s: (n,) seconds of each op.
        outside_until: (m,) op during which a value is still held outside, -1 for never.
        op_block: (n,) block of each op, -1 for none.
    """

    def __init__(self, graph: OpGraph, n_bytes: I64, op_s: F64, outside_until: I32, op_block: I32) -> None:
        self._graph, self._op_s = graph, op_s.tolist()
        self._bytes: list[int] = n_bytes.tolist()
        # Not recomputed: outputs of ops that write in place, run once, or read a value that is written later.
        fixed = [
            op in graph.once
            or bool(graph.writes[op])
            or any(value in graph.writers for value in graph.makes[op])
            or any(graph.writers.get(value, (-1,))[-1] > op for value in graph.reads[op])
            for op in range(graph.n_ops)
        ]
        self._again = [not fixed[maker] and maker < graph.n_forward for maker in graph.maker]
        # Values that backward does not read end in forward anyway.
        asked = {value for op in range(graph.n_forward, graph.n_ops) for value in graph.reads[op]}
        self._saved = frozenset(value for value in asked if self._again[value])
        held = (outside_until >= graph.n_forward).tolist()
        self.candidates = [value for value in sorted(self._saved) if not held[value] and self._bytes[value]]
        block = op_block.tolist()
        forward = range(graph.n_forward)
        self.block_outputs = frozenset(
            v for op in forward for v in graph.reads[op] if block[graph.maker[v]] != block[op]
        )

    def order(self, but: Set[int] = frozenset()) -> list[int]:
        """Return the candidates not in `but`, the cheapest per byte first, then the one read last."""
        kept, found = set(self._saved), list[int]()
        running: set[int] = set()  # ops that run again for freed values
        priced_with: defaultdict[int, set[int]] = defaultdict(set)  # op → candidates whose price includes it
        heap: list[tuple[float, int]] = []
        price: dict[int, float] = {}

        def put(value: int) -> None:
            ops = self._chain(value, kept) - running
            for op in ops:
                priced_with[op].add(value)
            price[value] = sum(self._op_s[op] for op in ops) / self._bytes[value]
            heapq.heappush(heap, (price[value], value))

        for value in self.candidates:
            if value not in but:
                put(value)
        while heap:
            cost, value = heapq.heappop(heap)
            if value not in kept or cost != price[value]:
                continue  # an outdated entry: the value has a lower price by now
            new = self._chain(value, kept) - running
            found.append(value)
            kept.remove(value)
            running |= new
            # Their price falls: they share the ops that run again by now.
            for other in {other for op in new for other in priced_with[op]} & kept:
                put(other)
        return found

    def _chain(self, value: int, kept: Set[int]) -> set[int]:
        """Return the ops that run again for `value` if only `kept` of the recomputable ones are resident."""
        found: set[int] = set()
        stack = [value]
        while stack:
            op = self._graph.maker[stack.pop()]
            if op not in found:
                found.add(op)
                stack += [read for read in self._graph.reads[op] if self._again[read] and read not in kept]
        return found

    def schedule(self, gone: Set[int]) -> Schedule:
        """Return the schedule that frees `gone` after forward and recomputes them in backward."""
        graph = self._graph
        there = set(self._saved - gone)
        backward: list[int] = []
        for op in range(graph.n_forward, graph.n_ops):
            for value in graph.reads[op]:
                if self._again[value]:
                    self._recompute(value, there, backward)
            backward.append(op)
        return build_schedule(graph, range(graph.n_forward), backward, made_by="planned")

    def _recompute(self, value: int, there: set[int], order: list[int]) -> None:
        stack = [value]
        while stack:
            # An explicit stack: a chain may be as long as the model is deep.
            at = stack[-1]
            missing = [
                read
                for read in self._graph.reads[self._graph.maker[at]]
                if self._again[read] and read not in there
            ]
            if at in there:
                stack.pop()
            elif missing:
                stack += missing
            else:
                order.append(self._graph.maker[at])
                there.update(made for made in self._graph.makes[self._graph.maker[at]] if self._again[made])
                stack.pop()


_POLICIES = (replace(DTR, neighbours="closure"), replace(DTR, neighbours="own"), MEGTAICHI, COOP)
_SWAPPING = (replace(MEGTAICHI, swap="exposed"), replace(MEGTAICHI, neighbours="ancestors", swap="exposed"))
"""Tried as well where tensors may be copied to the host."""
_LEVELS = 16
"""Budgets, as fractions of the plain peak, that every policy is asked for besides the real one."""
_LEVELS_ON_RANKS = 2
"""The same on several ranks, where each sharding is a place and each schedule passes its passes."""
_NODES = 16
NOT_FASTER = Reason("no schedule is faster than the plan by blocks", "by_schedule: false")
_BACK = 24
"""Freed values for which keeping is tried again."""
_BACK_ON_RANKS = 6
"""The same on several ranks, for the reason above: those that take longest to recompute."""
_PROBES = 12
"""Points of an order at which its peak is computed, to find the lowest."""
_MOST_OPS = 4000
"""Programs with more ops are left to the policies: milliseconds instead of the integer program's seconds."""


@dataclass(frozen=True)
class FastestSchedule:
    """A schedule with its peak and time."""

    schedule: Schedule
    peak_bytes: int
    seconds: float
    """Seconds added to the plain step."""


def fastest_schedule(
    program: Program, target: Target, budget_bytes: int, below_s: float = math.inf, *, swaps: bool = False
) -> FastestSchedule | Reason | None:
    """Return the fastest schedule of the dynamic policies and of Checkmate within a peak of the step; with
    `swaps` one that may copy tensors to the host.
    """
    reason = cannot_schedule_model(program, target)
    if reason is not None:
        return reason
    place = placement_of(program, target)
    if program.ranks > 1 and (reason := place.reason_below(budget_bytes)) is not None:
        return reason
    return _fastest(place, budget_bytes, below_s, swaps)


@lru_cache(maxsize=16)
def sufficient_bytes(place: Placement, too_little_bytes: int, by_blocks_bytes: int) -> int | None:
    """Return a budget, near the smallest, that a schedule meets and no plan by blocks does; None if none is
    found.

    Args:
        place: The program without recompute, and the later passes.
        too_little_bytes: A budget that no schedule meets.
        by_blocks_bytes: The smallest peak of a plan by blocks.
    """

    def is_met(budget_bytes: int) -> bool:
        tried = chain(
            (_free_after_forward(place, budget_bytes),),
            (
                _policy_schedule(place, policy, given)
                for given, policy in product(_budgets(place, budget_bytes), _POLICIES)
            ),
        )
        return any(each is not None and each.peak_bytes <= budget_bytes for each in tried)

    # Not below the least bytes that any schedule can have: each probe costs seconds.
    low, high = max(too_little_bytes, place.least_bytes - 1), by_blocks_bytes - 1
    if high <= low or not is_met(high):
        return None
    # One percent: the number is for a message, and the search itself is a heuristic.
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high


@lru_cache(maxsize=64)
def _fastest(place: Placement, budget_bytes: int, below_s: float, swaps: bool) -> FastestSchedule | None:
    """Return the fastest schedule found within the budget and below `below_s`."""
    # Each source only looks for schedules that are faster than those before it.
    best: FastestSchedule | None = None

    def offer(found: FastestSchedule | None) -> None:
        nonlocal best, below_s
        if found is not None and found.peak_bytes <= budget_bytes and found.seconds < below_s:
            best, below_s = found, found.seconds

    policies = (*_POLICIES, *(_SWAPPING if swaps else ()))
    for given, policy in product(_budgets(place, budget_bytes), policies):
        offer(_policy_schedule(place, policy, given, below_s))
    if place.step.ops.n <= _MOST_OPS:
        exact = schedule_for(place, budget_bytes, 0.0, _NODES, 0.0)
        offer(None if isinstance(exact, str) else _evaluate(place, exact.schedule))
    offer(_free_after_forward(place, budget_bytes, below_s))
    return best


def _budgets(place: Placement, budget_bytes: int) -> tuple[int, ...]:
    """Return the budgets that policies are asked for."""
    # A policy with more memory may do worse, so smaller budgets are tried as well: on a grid that does not
    # depend on the budget, so that a larger budget has all grid points of a smaller one.
    plain, levels = place.plain_bytes, _LEVELS if place.ranks == 1 else _LEVELS_ON_RANKS
    grid = (plain * level // levels for level in range(levels - 1, 0, -1))
    return (budget_bytes, *(each for each in grid if each < budget_bytes))


@lru_cache(maxsize=256)
def _policy_schedule(
    place: Placement, policy: Policy, budget_bytes: int, below_s: float = math.inf
) -> FastestSchedule | None:
    frozen = solve_policy(place, (policy,), budget_bytes, below_s=below_s)
    return None if frozen is None else _evaluate(place, frozen.schedule)


class _FreeSearch:
    """Schedules of one step by the values that they free after forward, evaluated on demand."""

    def __init__(self, place: Placement) -> None:
        region, costs = place.region_after_passes, op_costs(place.step, place.hardware)
        op_s = costs.op_s.clip(min=costs.issue_s)[region.rows]
        self._place, self._graph, self._op_s = place, region.graph, op_s
        self._free_after_forward = FreeAfterForwardPlanner(
            region.graph, region.bytes, op_s, region.outside_until, place.step.ops.block[region.rows]
        )
        self.order = self._free_after_forward.order()
        self._known: dict[frozenset[int], FastestSchedule] = {}
        self._lowest_peak_counts: dict[tuple[int, ...], int] = {}

    def evaluate(self, freed: frozenset[int]) -> FastestSchedule:
        """Return the schedule that frees `freed`, with peak and time."""
        if freed not in self._known:
            schedule = _freeing(self._place.step, self._place.hardware, freed)
            self._known[freed] = _evaluate(self._place, schedule)
        return self._known[freed]

    def within(self, budget_bytes: int, below_s: float) -> FastestSchedule | None:
        """Return the faster of both orders' schedules within the budget that may take less than `below_s`."""
        order = self._faster(self.order, below_s)
        first = self._cut(order, budget_bytes)
        # The second order leaves out the blocks' outputs; without one here it begins with the same values.
        if not self._free_after_forward.block_outputs.intersection(order[:first]):
            return self._within(order[:first], budget_bytes)
        second = self._faster(self._free_after_forward.order(self._free_after_forward.block_outputs), below_s)
        both = order[:first], second[: self._cut(second, budget_bytes)]
        found = [each for each in (self._within(freed, budget_bytes) for freed in both) if each is not None]
        return min(found, key=lambda each: (each.seconds, each.peak_bytes), default=None)

    def _faster(self, order: list[int], below_s: float) -> list[int]:
        """Return the longest beginning of `order` that recomputes for less than `below_s`."""

        def recompute_s(count: int) -> float:
            runs = _freeing(self._place.step, self._place.hardware, frozenset(order[:count])).computes()
            return float(self._op_s[runs].sum() - self._op_s.sum())

        if recompute_s(len(order)) < below_s:
            return order
        return order[: bisect_left(range(len(order)), below_s, key=recompute_s)]

    def _cut(self, order: list[int], budget_bytes: int) -> int:
        """Return the fewest values of `order` to free for the budget, else the number of lowest peak."""
        # Up to that number the peak falls, so bisection is valid; it also is where all of them are enough.
        enough = self._peak_bytes(order, len(order)) <= budget_bytes
        low, high = 0, len(order) if enough else self._lowest_peak_count(order)
        while low < high:
            middle = (low + high) // 2
            found = self.evaluate(frozenset(order[:middle]))
            low, high = (low, middle) if found.peak_bytes <= budget_bytes else (middle + 1, high)
        return low

    def _lowest_peak_count(self, order: list[int]) -> int:
        """Return the number of values to free for a low peak."""
        # Freeing more can cost more memory in recomputation than it frees.
        known_as = tuple(order)
        if known_as not in self._lowest_peak_counts:
            # The peak is not convex in the number freed; probes find the right valley, halved steps its
            # bottom.
            step = max(len(order) // _PROBES, 1)
            counts = {*range(step, len(order), step), len(order)}
            best = min(counts, key=lambda count: (self._peak_bytes(order, count), count), default=0)
            while step > 1:
                step = (step + 1) // 2
                near = {min(max(best + way, 0), len(order)) for way in (-step, 0, step)}
                best = min(near, key=lambda count: (self._peak_bytes(order, count), count))
            self._lowest_peak_counts[known_as] = best
        return self._lowest_peak_counts[known_as]

    def _peak_bytes(self, order: list[int], count: int) -> int:
        return self.evaluate(frozenset(order[:count])).peak_bytes

    def _within(self, going: list[int], budget_bytes: int) -> FastestSchedule | None:
        """Free `going`, then keep again, from the most expensive value on, what the budget allows."""
        freed = frozenset(going)
        best = self.evaluate(freed)
        if best.peak_bytes > budget_bytes:
            return None
        # From the end: the cheapest per byte come first, so the last ones save most seconds when kept.
        last = going[: -_BACK - 1 : -1]
        if self._place.ranks > 1:
            longest = sorted(last, key=lambda value: -self._op_s[self._graph.maker[value]])
            last = longest[:_BACK_ON_RANKS]
        for value in last:
            found = self.evaluate(freed - {value})
            if found.peak_bytes <= budget_bytes and found.seconds < best.seconds:
                freed, best = freed - {value}, found
        return None if find_schedule_error(self._graph, best.schedule) else best


@lru_cache(maxsize=4)
def _freeing_planner(step: Step, hardware: Hardware) -> FreeAfterForwardPlanner:
    region, costs = region_of(step), op_costs(step, hardware)
    assert not isinstance(region, str), region
    op_s = costs.op_s.clip(min=costs.issue_s)[region.rows]
    return FreeAfterForwardPlanner(
        region.graph, region.bytes, op_s, region.outside_until, step.ops.block[region.rows]
    )


@lru_cache(maxsize=128)
def _freeing(step: Step, hardware: Hardware, freed: frozenset[int]) -> Schedule:
    """Return the schedule that frees `freed`; cached, so that later passes share the step under it."""
    return _freeing_planner(step, hardware).schedule(freed)


@lru_cache(maxsize=4)
def _free_search(place: Placement) -> _FreeSearch:
    return _FreeSearch(place)


@lru_cache(maxsize=64)
def _free_after_forward(
    place: Placement, budget_bytes: int, below_s: float = math.inf
) -> FastestSchedule | None:
    return _free_search(place).within(budget_bytes, below_s)


def _evaluate(place: Placement, schedule: Schedule) -> FastestSchedule:
    run = place.step_under(schedule)
    seconds = _seconds(run, place.hardware) - _seconds(place.step, place.hardware)
    # A schedule runs the model in Python, op by op; that host time is part of its price.
    seconds += schedule_s(run, 1, place.hardware)
    return FastestSchedule(schedule, place.after_later_passes(run).peak_bytes(), seconds)


def _seconds(step: Step, hardware: Hardware) -> float:
    """Return seconds as in plans by blocks: an op shorter than its launch costs the launch time."""
    costs = op_costs(step, hardware)
    return float(costs.op_s.clip(min=costs.issue_s).sum())


class BudgetSchedulePlan(SchedulePlan):
    """A schedule of the whole model within a budget."""

    budget_bytes: Bytes
    """Largest peak allowed."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without a schedule."""
    recompute_s: float
    """Seconds of recomputation in a micro-batch."""


def to_schedule_plan(found: FastestSchedule, budget_bytes: int, plain_bytes: int) -> BudgetSchedulePlan:
    """Return `found` as a plan."""
    return BudgetSchedulePlan(
        schedule=found.schedule,
        budget_bytes=budget_bytes,
        peak_bytes=found.peak_bytes,
        plain_bytes=plain_bytes,
        recompute_s=round(found.seconds, 9),
    )


def rewrite_by_schedule(plan: SchedulePlan, program: Program) -> Program:
    """Return `program` with the model's ops in the order of the plan's schedule.

    Raises:
        ApplyError: The schedule is for another model.
    """
    region, schedule = region_of(program.step), plan.schedule
    wrong = region if isinstance(region, str) else find_schedule_error(region.graph, schedule)
    if isinstance(region, str) or wrong:
        raise refusals.plan_of_other_model("recompute", f"{wrong}.", "recompute: {kind: full}")
    return program.with_step(apply_schedule(program.step, schedule))


def install_schedule(plan: SchedulePlan, context: Context, *, made_by: str = "planned") -> None:
    """Replace the model's forward by the executor of the schedule, and audit that it ran."""
    region = install_region(context, replace(plan.schedule, made_by=made_by), made_by)
    context.checks["recompute"] = lambda: check_schedule(region)


def explain_schedule(plan: BudgetSchedulePlan) -> tuple[str, ...]:
    """Return one line with the schedule's peak and time."""
    peak, budget, plain = (
        format_bytes(each) for each in (plan.peak_bytes, plan.budget_bytes, plan.plain_bytes)
    )
    again, runs = format_seconds(plan.recompute_s), len(plan.schedule.computes())
    return (
        (
            f"peak {peak} by a schedule of {runs} ops for a budget of {budget}; {plain} without it; costs"
            f" {again} a micro-batch"
        ),
    )
