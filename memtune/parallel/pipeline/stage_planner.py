"""Planner that divides blocks into contiguous stages, exactly: least time of the slowest stage, then least
bytes of the fullest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memtune.program import F64

_ROOM = 1.01
"""Allowed slowdown of the slowest stage for a division that needs less memory: times are predictions."""


def balanced(seconds: F64, n_bytes: F64, cuts: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Return the first block of each of `count` stages, None if there are too few `cuts`.

    Args:
        seconds: (b,) of each block; what runs before the first one is in its seconds, what runs after the
            last one in that one's.
        n_bytes: (count, b) what each block holds in each stage.
        cuts: Blocks that may begin a stage.
        count: Stages.
    """
    ends = np.array([0, *cuts, len(seconds)])
    time = np.diff(np.concatenate([[0.0], np.cumsum(seconds)])[ends])
    room = np.diff(np.concatenate([np.zeros((count, 1)), np.cumsum(n_bytes, 1)], 1)[:, ends], axis=1)
    if len(time) < count:
        return None
    times = np.broadcast_to(time, (count, len(time)))
    slowest, _ = _least_worst(times, times, count, np.inf)
    _, begins = _least_worst(room, times, count, slowest * _ROOM)
    return tuple(int(ends[at]) for at in begins)


def _least_worst(costs: F64, limited: F64, count: int, limit: float) -> tuple[float, list[int]]:
    """Return the smallest largest sum of `costs` over stages whose sums of `limited` stay within `limit`, and
    the starts of the stages.
    """
    # best[s, j] is the value for the first j pieces in s stages; n² · count sums.
    n = costs.shape[1]
    sums, bounds = (
        np.concatenate([np.zeros((count, 1)), np.cumsum(each, 1)], 1) for each in (costs, limited)
    )
    best = np.full((count + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((count + 1, n + 1), np.int64)
    for stage in range(1, count + 1):
        for j in range(stage, n + 1):
            last = sums[stage - 1, j] - sums[stage - 1, :j]
            within = bounds[stage - 1, j] - bounds[stage - 1, :j] <= limit
            worst = np.where(within, np.maximum(best[stage - 1, :j], last), np.inf)
            came[stage, j] = int(worst.argmin())
            best[stage, j] = worst[came[stage, j]]
    # From the end: the choices say where each stage begins.
    begins, j = [], n
    for stage in range(count, 0, -1):
        j = int(came[stage, j])
        begins.append(j)
    return float(best[count, n]), begins[::-1]
