"""Bytes and traffic of divided states: special cases of the papers, brute force over an independent count,
monotony in memory.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from memtune.hardware.spec import find
from memtune.parallel.sharding.factors import (
    Bytes,
    Factors,
    Schedule,
    all_factors,
    cheapest,
    held_bytes,
    seconds,
    traffic,
)

WHOLE = Bytes(2.0, 2.0, 12.0)
HARDWARE = replace(find("h100-80g"), inter_link_bytes_per_s=10e9)


def counted(factors: Factors, schedule: Schedule) -> float:
    """Bytes that one rank receives per step, counted state by state without hops."""
    p, g, o = factors.parameters, factors.gradients, factors.optimizer
    weights = schedule.micro_batches * schedule.gathers * WHOLE.parameters * (1 - 1 / p)
    after = WHOLE.parameters / p - WHOLE.parameters / o
    often = schedule.micro_batches * WHOLE.gradients * (1 - 1 / g)
    once = WHOLE.gradients / g - WHOLE.gradients / o + 2 * WHOLE.gradients / o * (1 - o / schedule.ranks)
    return weights + after + often + once


@pytest.mark.parametrize(
    ("factors", "micro_batches", "wanted"),
    [
        ((1, 1, 1), 1, 4.0),  # DDP, ZeRO-1 and ZeRO-2: 2Ψ; ZeRO-3: 3Ψ
        ((1, 1, 64), 4, 4.0),
        ((1, 64, 64), 1, 4.0),
        ((64, 64, 64), 1, 6.0),
        ((64, 64, 64), 4, 24.0),
        ((1, 64, 64), 4, 10.0),  # a reduction a micro-batch, one gather a step
    ],
)
def test_factors_traffic_of_zero(factors: tuple[int, int, int], micro_batches: int, wanted: float) -> None:
    found = traffic(Factors(*factors), WHOLE, Schedule(64, 8, micro_batches))
    assert found.total == pytest.approx(wanted * 63 / 64)


def test_factors_held_bytes_of_zero_equal_paper() -> None:
    n = 64
    for factors, wanted in {
        (1, 1, 1): 16,
        (1, 1, n): 4 + 12 / n,
        (1, n, n): 2 + 14 / n,
        (n, n, n): 16 / n,
    }.items():
        assert held_bytes(Factors(*factors), WHOLE).total == pytest.approx(wanted)


def test_factors_mics_sends_one_shard_between_groups_per_step() -> None:
    for micro_batches in (1, 4):
        found = traffic(Factors(8, 8, 8), WHOLE, Schedule(64, 8, micro_batches))
        assert found.inter_bytes == pytest.approx(2 * 2.0 / 8 * (1 - 8 / 64))
        assert found.intra_bytes == pytest.approx(micro_batches * 6.0 * 7 / 8)


def test_frequent_hops_are_inside_nodes() -> None:
    one, four = (traffic(Factors(8, 8, 64), WHOLE, Schedule(64, 8, a)) for a in (1, 4))
    assert one.inter_bytes == four.inter_bytes == pytest.approx(4.0 / 8 * (1 - 8 / 64))
    assert four.intra_bytes == 4 * one.intra_bytes


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 12, 64])
def test_factors_every_yields_each_once(ranks: int) -> None:
    found = all_factors(ranks)
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    wanted = {
        Factors(*each) for each in itertools.product(divisors, repeat=3) if not Factors(*each).problem(ranks)
    }
    assert set(found) == wanted
    assert len(found) == len(wanted)
    for factors, a in itertools.product(found, (1, 3)):
        schedule = Schedule(ranks, 4, a)
        assert traffic(factors, WHOLE, schedule).total == pytest.approx(counted(factors, schedule)), factors


@pytest.mark.parametrize(
    ("factors", "problem"),
    [
        ((3, 3, 3), "no multiple of optimizer=3"),
        ((2, 2, 32), "no multiple of optimizer=32"),
        ((4, 4, 2), "no multiple of gradients=4"),
        ((4, 1, 2), "no multiple of parameters=4"),
        ((4, 2, 8), "neither 1 nor a multiple"),
        ((2, 1, 4), ""),
    ],
)
def test_factors_problem_gives_reason(factors: tuple[int, int, int], problem: str) -> None:
    found = Factors(*factors).problem(16)
    assert problem in found
    assert bool(found) == bool(problem)


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.sampled_from([2, 4, 8, 12, 16, 48, 64]),
    node=st.sampled_from([2, 4, 8]),
    a=st.integers(1, 8),
    limits=st.tuples(st.floats(0.1, 20.0), st.floats(0.1, 20.0)),
)
def test_cheapest_equals_brute_force_and_never_slows_with_memory(
    ranks: int, node: int, a: int, limits: tuple[float, float]
) -> None:
    schedule = Schedule(ranks, node, a)

    def best(limit: float) -> float:
        found = cheapest(WHOLE, schedule, HARDWARE, limit_bytes=limit)
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        times = [
            seconds(factors, WHOLE, schedule, HARDWARE)
            for factors in itertools.starmap(Factors, itertools.product(divisors, repeat=3))
            if not factors.problem(ranks) and held_bytes(factors, WHOLE).total <= limit
        ]
        assert (found is None) == (not times)
        time = float("inf") if found is None else seconds(found, WHOLE, schedule, HARDWARE)
        assert time == min(times, default=float("inf"))
        return time

    tight, loose = sorted(limits)
    assert best(loose) <= best(tight)
