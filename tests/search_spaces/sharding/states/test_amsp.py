"""AMSP: factors by hand and by plan, within the budget. On real ranks:
tests/parallel/sharding/test_nested_sharding.py.

Distinguishing test: a rank holds 1/p of the parameters, 1/g of the sums and 1/o of the optimizer state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.sharding_programs import program, target
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.parallel.sharding.factors import Factors, held_bytes, seconds
from memtune.program.step import Program
from memtune.search_spaces.sharding.states._nested import schedule_of, whole_bytes
from memtune.search_spaces.sharding.states.amsp import Amsp, AmspPlan
from memtune.search_spaces.sharding.states.paro import Paro

RANKS = 16


def factors(p: int, g: int, o: int) -> dict[str, int]:
    return Factors(p, g, o).document()


@pytest.mark.parametrize(
    ("knobs", "ranks", "accumulate", "reason"),
    [
        ({}, 1, 4, "only one rank"),
        ({"parameters": 2}, 16, 4, "some factors are given but not all"),
        (factors(3, 3, 3), 16, 4, "the 16 ranks are no multiple of optimizer=3"),
        (factors(2, 4, 32), 16, 4, "the 16 ranks are no multiple of optimizer=32"),
        (factors(1, 1, 16), 16, 4, "(1, 1, 16) is zero1"),
        (factors(1, 16, 16), 16, 4, "(1, 16, 16) is zero2"),
        (factors(16, 16, 16), 16, 4, "is fsdp"),
        (factors(4, 4, 4), 16, 1, "is fsdp, degree: 4"),
        (factors(2, 4, 8), 16, 1, "it equals (2, 2, 8) (gradients: 2)"),
        (factors(2, 4, 8), 16, 4, ""),
        (factors(2, 2, 8), 16, 1, ""),
        (factors(16, 1, 16), 16, 4, ""),
    ],
)
def test_amsp_fits_or_gives_the_reason(
    knobs: dict[str, Any], ranks: int, accumulate: int, reason: str
) -> None:
    found = str(Amsp(**knobs).fits(program(ranks=ranks, accumulate=accumulate), target(ranks)) or "")
    assert reason in found
    assert bool(reason) == bool(found)


def planned(budget_bytes: int | None, before: Program) -> Factors:
    where = replace(target(RANKS), budget_bytes=budget_bytes)
    return Factors(**Amsp().plan(before, where).document())


def test_plan_fits_the_budget_and_less_memory_never_saves_time() -> None:
    before, where = program(ranks=RANKS, accumulate=4), target(RANKS)
    whole, schedule = whole_bytes(before.step), schedule_of(before, where, gathers=2)
    other_bytes = before.step.peak_bytes() - whole.total
    times = []
    for share in (1.1, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1):
        found = planned(int(other_bytes + share * whole.total), before)
        assert held_bytes(found, whole).total <= share * whole.total
        times.append(seconds(found, whole, schedule, where.hardware))
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_plan_shards_over_all_ranks_if_nothing_fits() -> None:
    assert planned(1, program(ranks=RANKS, accumulate=4)) == Factors(RANKS, RANKS, RANKS)


def test_plan_is_applied_and_explained() -> None:
    technique, before = Amsp(), program(ranks=RANKS, accumulate=4)
    plan = AmspPlan(parameters=2, gradients=2, optimizer=16)
    by_hand = Amsp(**factors(2, 2, 16)).rewrite(before, AmspPlan(), target(RANKS)).step
    by_plan = technique.rewrite(before, plan, target(RANKS)).step
    assert by_plan.live_bytes().tolist() == by_hand.live_bytes().tolist()
    assert technique.explain(plan) == (
        "parameters over 2 ranks",
        "gradients over 2 ranks",
        "optimizer over 16 ranks",
    )


def test_large_buckets_are_tried_and_send_fewer_messages_between_many_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message between copies is one shard of a bucket, and 2 · 127 latencies are its least time."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks"))
    import sharding_published
    from published import amsp
    from published.paper import Shape

    assert Amsp().choices()["bucket_cap_mb"] == Paro().choices_on(target(RANKS))["bucket_cap_mb"] == (25, 200)
    claim = replace(amsp.PAPER.claims[0], shape=Shape(8, 1024, 16, 2048, 8000, ""))
    small, large = (
        sharding_published.predicted(
            claim, {"states": {**claim.fast["states"], "bucket_cap_mb": cap}}, amsp.PAPER.hardware
        )
        for cap in (25, 200)
    )
    assert large.busy_s["inter_link"] < 0.6 * small.busy_s["inter_link"]
    assert large.step_s < small.step_s


def test_equal_factors_are_one_candidate() -> None:
    assert Amsp(**factors(8, 8, 16)).record(target(RANKS)) == Paro(strategy="IIG").record(target(RANKS))
    assert Amsp(**factors(1, 8, 16)).record(target(RANKS)) == Paro(strategy="NIG").record(target(RANKS))


class TestAmsp(ShardedSuite):
    """Parameters and optimizer state sharded over both ranks, sums of gradients unsharded."""

    technique = Amsp
    accumulate, peak_rel, briefly = 2, 0.02, False
    models: ClassVar[dict[str, Path]] = {"lora": ZOO["lora"]}

    @classmethod
    def default(cls) -> Amsp:
        return Amsp(parameters=2, gradients=1, optimizer=2)
