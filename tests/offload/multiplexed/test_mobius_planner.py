"""Stages on one device: the dynamic program against every partition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

from memtune.offload.layer_major.packs import Span
from memtune.offload.multiplexed.mobius_planner import StageCosts, fastest_stages, memory_bytes, step_s


def drawn(draw: random.Random, blocks: int) -> StageCosts:
    numbers = [[draw.randrange(1, 20) for _ in range(blocks)] for _ in range(6)]
    return StageCosts(*numbers)


def partitions(blocks: int) -> Iterator[tuple[Span, ...]]:
    for count in range(blocks):
        for inner in combinations(range(1, blocks), count):
            yield tuple(pairwise((0, *inner, blocks)))


def test_fastest_stages_is_the_fastest_partition_within_the_budget() -> None:
    """Up to 12 blocks, any number of stages and a given one."""
    draw = random.Random(5)
    for blocks in (1, 2, 3, 5, 7, 9, 12):
        for _ in range(3 if blocks < 12 else 1):
            costs = drawn(draw, blocks)
            budget = draw.choice([30, 60, 120, 10_000])
            fitting = [each for each in partitions(blocks) if memory_bytes(costs, each) <= budget]
            found = fastest_stages(costs, budget)
            assert (found is None) == (not fitting)
            if found is not None:
                assert found in fitting
                assert abs(step_s(costs, found) - min(step_s(costs, each) for each in fitting)) < 1e-9
            count = draw.randrange(1, blocks + 1)
            best = min((step_s(costs, each) for each in fitting if len(each) == count), default=None)
            found = fastest_stages(costs, budget, count)
            assert (found is None) == (best is None)
            if found is not None and best is not None:
                assert len(found) == count
                assert abs(step_s(costs, found) - best) < 1e-9


def test_step_s_of_a_hidden_prefetch_is_compute_only() -> None:
    """Two equal stages: the second's load overlaps with the first's compute, and the reload of the first with
    the second's.
    """
    costs = StageCosts([4, 4], [8, 8], [3, 3], [1, 1], [1, 1], [1, 1])
    assert step_s(costs, ((0, 1), (1, 2))) == 3 + 4 + (4 + 8) + (4 + 8)
    slow = StageCosts([4, 4], [8, 8], [30, 30], [1, 1], [1, 1], [1, 1])
    assert step_s(slow, ((0, 1), (1, 2))) == 30 + 30 + 30 + (4 + 8)
    assert fastest_stages(slow) == ((0, 2),)
    assert fastest_stages(slow, 4) == ((0, 1), (1, 2))
