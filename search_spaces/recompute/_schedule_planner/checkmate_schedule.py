"""Checkmate's schedule for a program and a byte budget: solved on a few nodes, judged op by op on the
rewritten program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memtune.activations.schedules import region_of, solve_exactly, solve_rounded
from memtune.hardware import op_costs
from memtune.program import Schedule, plain_schedule, wrong_with
from memtune.search_spaces.recompute._schedule_planner.coarse_graph import Stages, stages_of
from memtune.search_spaces.recompute._schedule_planner.placement import Place

_TRIES = 5
"""Budgets that the coarse nodes are given, until the peak of the ops is just within the real one."""


@dataclass(frozen=True)
class CheckmateSchedule:
    """A schedule and what it comes to."""

    schedule: Schedule
    peak_bytes: int
    """Of the rewritten program."""
    again_s: float
    """Of what runs again."""
    budget_bytes: int
    plain_bytes: int
    """The peak without it."""
    n_nodes: int

    @property
    def is_within(self) -> bool:
        """Whether the budget is met."""
        return self.peak_bytes <= self.budget_bytes


@lru_cache(maxsize=128)
def schedule_for(
    place: Place, budget_bytes: int | None, share: float, nodes: int, exact_s: float
) -> CheckmateSchedule | str:
    """The cheapest schedule found whose peak is within the budget, else the one with the smallest peak; or
    why there is none.

    Args:
        place: The program without recompute, and what comes after it.
        budget_bytes: Peak of the whole step; None: by `share`.
        share: Where the budget lies between the smallest peak found and the plain one.
        nodes: How many nodes the ops are joined to.
        exact_s: Seconds for the integer program; 0: the relaxation alone.
    """
    region = region_of(place.step)
    if isinstance(region, str):
        return region
    plain = plain_schedule(region.graph)
    wrong = wrong_with(region.graph, plain)
    if wrong:
        return f"the recorded step cannot be repeated: {wrong}"
    stages = stages_of(place.among, op_costs(place.step, place.hardware).op_s[region.rows], nodes)
    plain_bytes = place.peak_bytes(plain)
    if budget_bytes is None:
        smallest = _judged(place, stages, 0, plain_bytes, exact_s=0.0)
        budget_bytes = int(smallest.peak_bytes + share * (plain_bytes - smallest.peak_bytes))
    if plain_bytes <= budget_bytes:
        return CheckmateSchedule(plain, plain_bytes, 0.0, budget_bytes, plain_bytes, len(stages.nodes))
    return _best(place, stages, budget_bytes, plain_bytes, exact_s)


def _best(
    place: Place, stages: Stages, budget_bytes: int, plain_bytes: int, exact_s: float
) -> CheckmateSchedule:
    """Give the nodes more or less than the budget by what the last schedule's ops left of it or were over."""
    given, best = budget_bytes, None
    enough, too_much = 0, 0  # given to the nodes, with a peak within the budget and above it
    for _ in range(_TRIES):
        found = _judged(place, stages, given, plain_bytes, exact_s, budget_bytes)
        if best is None or _rank(found) < _rank(best):
            best = found
        spare = budget_bytes - found.peak_bytes
        if found.again_s == 0 or 0 <= spare <= budget_bytes // 200:
            break
        if spare >= 0:
            enough = max(enough, given)
        else:
            too_much = min(too_much or given, given)
        given = (enough + too_much) // 2 if enough and too_much else given + spare
    assert best is not None
    return best


def _rank(found: CheckmateSchedule) -> tuple[int, float]:
    return max(found.peak_bytes - found.budget_bytes, 0), found.again_s


def _judged(
    place: Place,
    stages: Stages,
    given_bytes: int,
    plain_bytes: int,
    exact_s: float,
    budget_bytes: int | None = None,
) -> CheckmateSchedule:
    problem = stages.problem(given_bytes)
    solution = solve_rounded(problem)
    if exact_s and not solution.proven:
        exact = solve_exactly(problem, time_limit_s=exact_s)
        if exact is not None and (solution.over_bytes > 0 or exact.cost_s < solution.cost_s):
            solution = exact
    schedule = stages.schedule(solution)
    wrong = wrong_with(place.region.graph, schedule)
    assert not wrong, wrong
    peak = place.peak_bytes(schedule)
    budget = given_bytes if budget_bytes is None else budget_bytes
    return CheckmateSchedule(schedule, peak, stages.again_s(schedule), budget, plain_bytes, len(stages.nodes))
