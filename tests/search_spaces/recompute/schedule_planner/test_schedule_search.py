"""Schedules of a whole step by values freed after forward: the cut in an order whose peak rises again towards
its end.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.activations.eviction import policy_schedule_planner
from memtune.activations.eviction.policy import Policy, Replay, Trace, replay
from memtune.program.step import Program, RankClass
from memtune.search_spaces.recompute._schedule_planner import schedule_search
from memtune.search_spaces.recompute._schedule_planner.region_placement import placement_of
from memtune.search_spaces.recompute._schedule_planner.schedule_search import (
    FastestSchedule,
    _FreeSearch,
    fastest_schedule,
)
from memtune.technique import Target
from memtune.testing.drift_check import recording_of


@pytest.mark.parametrize("model", ["gpt", "hf_llama"])
def test_search_meets_every_budget_that_freeing_in_order_meets(model: str) -> None:
    program, target = (
        Program((RankClass(1, recording_of(ZOO[model]).at(4)),), 4),
        Target(hardware.detect("cpu"), 1, None),
    )
    search = _FreeSearch(placement_of(program, target))
    counts = range(len(search.order) + 1)
    each = [search.evaluate(frozenset(search.order[:count])) for count in counts]
    lowest = list(accumulate((found.peak_bytes for found in each), min))
    assert (
        lowest[-1] < each[-1].peak_bytes
    )  # all gone is not the least: what runs again for the last ones is more
    for found, least in zip(each, lowest, strict=True):
        if found.peak_bytes == least:
            met = search.within(least, math.inf)
            assert met is not None
            assert met.peak_bytes <= least
            assert (
                met.seconds <= found.seconds * 1.15
            )  # halving may go past one place where the peak is a little higher


def test_fastest_schedule_is_searched_below_the_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((RankClass(1, recording_of(ZOO["gpt"]).at(4)),), 4)
    target = Target(hardware.find("h100-80g"), 1, None)
    budget = int(0.8 * placement_of(program, target).plain_bytes)
    found = fastest_schedule(program, target, budget)
    assert isinstance(found, FastestSchedule)
    near = fastest_schedule(program, target, budget, 1.001 * found.seconds)
    assert isinstance(near, FastestSchedule)
    assert (near.seconds, near.peak_bytes) == (found.seconds, found.peak_bytes)
    evaluated: list[FastestSchedule] = []
    evaluate = schedule_search._evaluate

    def counted(*given: object) -> FastestSchedule:
        evaluated.append(evaluate(*given))  # type: ignore[arg-type]
        return evaluated[-1]

    monkeypatch.setattr(schedule_search, "_evaluate", counted)
    assert fastest_schedule(program, target, budget, 0.0) is None
    assert len(evaluated) <= 2, "those of the integer program and of no value freed"


def test_policies_play_a_region_without_writes_in_place_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((RankClass(1, recording_of(ZOO["hf_llama"]).at(4)),), 4)
    target = Target(hardware.find("h100-80g"), 1, None)
    place = placement_of(program, target)
    assert not any(place.region.graph.writes)
    played: list[tuple[Policy, int]] = []

    def noted(trace: Trace, policy: Policy, budget_bytes: int, **limits: Any) -> Replay:
        played.append((policy, budget_bytes))
        return replay(trace, policy, budget_bytes, **limits)

    monkeypatch.setattr(policy_schedule_planner, "replay", noted)
    fastest_schedule(program, target, int(0.8 * place.plain_bytes))
    assert played
    assert len(played) == len(set(played))
