"""Checkmate's optimum found the slow way: every schedule of a small graph, by Dijkstra. It shares no code
with the planner.
"""

from __future__ import annotations

import heapq
from functools import cache

from memtune.activations.schedules.checkmate_planner import Problem


def exhaustive_cost(problem: Problem) -> float | None:
    """The least cost within the budget, by Dijkstra over (frontier, what ran last in its stage, what is
    live).

    A step runs a node that is not live and whose inputs are, then lets go of any of what is live. A node past
    the frontier is run only once the frontier is there; what is kept at the end does not count. In a stage,
    which ends with the frontier's own node, nodes run in ascending order: that is the paper's space.
    """
    n = problem.n
    start = (0, -1, frozenset[int]())
    best, waiting = {start: 0.0}, [(0.0, 0, start)]
    ticket = 0
    while waiting:
        cost, _, (frontier, latest, live) = heapq.heappop(waiting)
        if cost > best[frontier, latest, live]:
            continue
        if frontier == n:
            return cost
        for node in range(latest + 1, frontier + 1):
            if (
                node in live
                or (node < frontier and node in problem.once)
                or not live.issuperset(problem.reads[node])
            ):
                continue
            there = live | {node}
            if sum(problem.bytes[each] for each in there) + problem.scratch(node) > problem.budget_bytes[0]:
                continue
            for left in subsets(there):
                state = (frontier, node, left) if node < frontier else (frontier + 1, -1, left)
                total = cost + problem.cost_s[node]
                if total < best.get(state, float("inf")):
                    best[state] = total
                    ticket += 1
                    heapq.heappush(waiting, (total, ticket, state))
    return None


@cache
def subsets(of: frozenset[int]) -> tuple[frozenset[int], ...]:
    found = [frozenset[int]()]
    for each in of:
        found += [other | {each} for other in found]
    return tuple(found)
