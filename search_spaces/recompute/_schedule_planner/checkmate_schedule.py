"""Checkmate's schedule for a program and a byte budget: solved on a few nodes, evaluated op by op on the
rewritten program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from memtune.activations.schedules import region_of, solve_exactly, solve_rounded
from memtune.hardware import op_costs
from memtune.program import Schedule, find_schedule_error, plain_schedule
from memtune.search_spaces.recompute._schedule_planner.coarse_graph import Stages, stages_of
from memtune.search_spaces.recompute._schedule_planner.region_placement import Placement

_TRIES = 5
"""Budgets tried on the coarse nodes, until the peak of the ops is just within the real budget."""


@dataclass(frozen=True)
class CheckmateSchedule:
    """A schedule with its peak and time."""

    schedule: Schedule
    peak_bytes: int
    """Peak of the rewritten program."""
    recompute_s: float
    """Seconds of recomputation."""
    budget_bytes: int
    plain_bytes: int
    """Peak without the schedule."""
    n_nodes: int

    @property
    def is_within(self) -> bool:
        """True if the budget is met."""
        return self.peak_bytes <= self.budget_bytes


@lru_cache(maxsize=128)
def schedule_for(
    place: Placement, budget_bytes: int | None, share: float, nodes: int, exact_s: float
) -> CheckmateSchedule | str:
    """Return the cheapest schedule found with a peak within the budget, else the one with the smallest peak,
    or why there is none.

    Args:
        place: The program without recompute, and the later passes.
        budget_bytes: Largest peak of the whole step; None: given by `share`.
        share: Position of the budget between the smallest peak found (0) and the plain one (1).
        nodes: Number of nodes that the ops are joined to.
        exact_s: Time limit of the integer program in seconds; 0: the relaxation alone.
    """
    region = region_of(place.step)
    if isinstance(region, str):
        return region
    plain = plain_schedule(region.graph)
    wrong = find_schedule_error(region.graph, plain)
    if wrong:
        return f"the recorded step cannot be repeated: {wrong}"
    stages = stages_of(
        place.region_after_passes, op_costs(place.step, place.hardware).op_s[region.rows], nodes
    )
    plain_bytes = place.peak_bytes(plain)
    if budget_bytes is None:
        smallest = _evaluate(place, stages, 0, plain_bytes, exact_s=0.0)
        budget_bytes = int(smallest.peak_bytes + share * (plain_bytes - smallest.peak_bytes))
    if plain_bytes <= budget_bytes:
        return CheckmateSchedule(plain, plain_bytes, 0.0, budget_bytes, plain_bytes, len(stages.nodes))
    return _best(place, stages, budget_bytes, plain_bytes, exact_s)


def _best(
    place: Placement, stages: Stages, budget_bytes: int, plain_bytes: int, exact_s: float
) -> CheckmateSchedule:
    """Return the best schedule over budgets corrected by the last peak's distance from the budget."""
    given, best = budget_bytes, None
    enough, too_much = 0, 0  # largest node budget that met the budget, smallest that did not
    for _ in range(_TRIES):
        found = _evaluate(place, stages, given, plain_bytes, exact_s, budget_bytes)
        if best is None or _rank(found) < _rank(best):
            best = found
        spare = budget_bytes - found.peak_bytes
        # Stop when nothing is recomputed, or within 0.5 % of the budget.
        if found.recompute_s == 0 or 0 <= spare <= budget_bytes // 200:
            break
        if spare >= 0:
            enough = max(enough, given)
        else:
            too_much = min(too_much or given, given)
        # Bisection once the budget is enclosed; before that the last error is the correction.
        given = (enough + too_much) // 2 if enough and too_much else given + spare
    assert best is not None
    return best


def _rank(found: CheckmateSchedule) -> tuple[int, float]:
    return max(found.peak_bytes - found.budget_bytes, 0), found.recompute_s


def _evaluate(
    place: Placement,
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
    wrong = find_schedule_error(place.region.graph, schedule)
    assert not wrong, wrong
    peak = place.peak_bytes(schedule)
    budget = given_bytes if budget_bytes is None else budget_bytes
    return CheckmateSchedule(
        schedule, peak, stages.recompute_s(schedule), budget, plain_bytes, len(stages.nodes)
    )
