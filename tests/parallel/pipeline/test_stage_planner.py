"""Stages by dynamic programming, held against all divisions of small chains."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from memtune.parallel.pipeline.stage_planner import balanced


def worst(costs: np.ndarray, starts: tuple[int, ...], end: int) -> float:
    bounds = [*starts, end]
    return max(costs[s, bounds[s] : bounds[s + 1]].sum() for s in range(len(starts)))


@pytest.mark.parametrize("seed", range(20))
def test_stage_planner_equals_brute_force(seed: int) -> None:
    """The slowest stage is the fastest possible within 1 %, and no division that is as fast needs less in its
    fullest stage.
    """
    draw = np.random.default_rng(seed)
    n, count = int(draw.integers(4, 9)), int(draw.integers(2, 4))
    seconds, n_bytes = draw.random(n), draw.random((count, n))
    cuts = [c for c in range(1, n) if draw.random() < 0.8]
    every = [(0, *chosen) for chosen in combinations(cuts, count - 1)]
    found = balanced(seconds, n_bytes, cuts, count)
    if not every:
        assert found is None
        return
    assert found in every
    times = np.broadcast_to(seconds, (count, n))
    fastest = min(worst(times, each, n) for each in every)
    assert worst(times, found, n) <= 1.01 * fastest * (1 + 1e-12)
    fast = [each for each in every if worst(times, each, n) <= 1.01 * fastest]
    assert worst(n_bytes, found, n) == pytest.approx(min(worst(n_bytes, each, n) for each in fast))


def test_stage_planner_returns_none_with_too_few_cuts() -> None:
    assert balanced(np.ones(4), np.ones((3, 4)), [2], 3) is None
