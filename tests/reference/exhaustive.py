"""Checkmate's optimum by brute force: Dijkstra over all schedules of a small graph, independent of the
planner.
"""

from __future__ import annotations

import heapq
from functools import cache

from memtune.activations.schedules.checkmate_planner import Problem


def exhaustive_cost(problem: Problem) -> float | None:
    """Return the least cost within the budget, by Dijkstra over (frontier, last node of the stage, live set).

    A step runs a node that is not live and whose inputs are, then frees any subset of the live nodes. Nodes
    beyond the frontier run only after it; values that are live at the end do not count. In a stage, which
    ends with the frontier's own node, nodes run in ascending order, as in the paper.
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
            now_live = live | {node}
            n_bytes = sum(problem.bytes[each] for each in now_live)
            if n_bytes + problem.scratch(node) > problem.budget_bytes[0]:
                continue
            for left in subsets(now_live):
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
