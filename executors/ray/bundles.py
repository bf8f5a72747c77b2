"""Bundles of a trial's devices on the nodes of a cluster.

Rules:

1. A bundle is as large as a node allows: a trial that fills nodes has them to itself, and a smaller one has
  all of its ranks on one node.
2. Trials placed side by side have disjoint devices.
"""

from __future__ import annotations

from collections.abc import Sequence


def bundles(ranks: int, nodes: Sequence[int]) -> list[int]:
    """Return the ranks of each bundle of one trial, largest first; empty if the cluster is too small.

    Args:
        ranks: Of the trial.
        nodes: Devices of each node.
    """
    for size in range(min(ranks, max(nodes, default=0)), 0, -1):
        whole, rest = divmod(ranks, size)
        wanted = [size] * whole + [rest] * (rest > 0)
        if _fit(wanted, nodes) >= 1:
            return wanted
    return []


def side_by_side(ranks: int, nodes: Sequence[int]) -> int:
    """Return the number of trials of `ranks` that the nodes hold at the same time."""
    wanted = bundles(ranks, nodes)
    return _fit(wanted, nodes) if wanted else 0


def _fit(wanted: Sequence[int], nodes: Sequence[int]) -> int:
    """Return how many times the bundles fit, each placed on the node with the least room that holds it."""
    free, count = list(nodes), 0
    while True:
        for size in wanted:
            holding = [(room, i) for i, room in enumerate(free) if room >= size]
            if not holding:
                return count
            free[min(holding)[1]] -= size
        count += 1
