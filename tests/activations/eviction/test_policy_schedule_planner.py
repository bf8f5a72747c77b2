"""Schedules from eviction policies: the budgets that are tried, and the work that they may take."""

from __future__ import annotations

import pytest
from support.zoo_paths import ZOO

from memtune.activations.eviction import MEGTAICHI, dtr_options, megtaichi_options, policy_schedule_planner
from memtune.activations.eviction.policy import Policy, Replay, replay
from memtune.program import Schedule
from memtune.search_spaces.recompute._schedule_planner.policy_schedule import solve_policy
from memtune.search_spaces.recompute._schedule_planner.region_placement import Placement, placement_of
from memtune.testing.drift_check import plain_program, target_of


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Every play of a policy, in order."""
    done: list[Replay] = []

    def noted(*given: object, **how: object) -> Replay:
        done.append(replay(*given, **how))  # type: ignore[arg-type]
        return done[-1]

    monkeypatch.setattr(policy_schedule_planner, "replay", noted)
    return done


@pytest.mark.parametrize("options", [dtr_options(), megtaichi_options(MEGTAICHI)], ids=["dtr", "megtaichi"])
def test_freeze_begins_at_the_values_peak(
    options: tuple[Policy, ...], plays: list[Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other bytes may set the peak, far above what the region's values need."""
    place, n_ops = placement_of(plain_program(ZOO["gpt"]), target_of()), []

    def peak_bytes(self: Placement, schedule: Schedule) -> int:
        n_ops.append(len(schedule.computes()))
        return budget + 1 if n_ops[-1] <= place.region.graph.n_ops else budget

    monkeypatch.setattr(Placement, "peak_bytes", peak_bytes)
    budget = 100 * place.plain_bytes
    found = solve_policy(place, options, budget)
    assert found is not None
    assert found.recompute_s > 0
    without = sum(not each.evictions for each in plays)
    assert without <= 8  # not once for each option


def test_freeze_ends_when_its_work_is_done(plays: list[Replay], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "peak_bytes", lambda self, schedule: budget + 1)
    place = placement_of(plain_program(ZOO["gpt"], 16), target_of())
    budget = place.plain_bytes - 1
    assert solve_policy(place, megtaichi_options(MEGTAICHI), budget) is None
    every, work = len(plays), sum(each.work for each in plays)
    plays.clear()
    solve_policy.cache_clear()
    monkeypatch.setattr(policy_schedule_planner, "_WORK_LIMIT", work // 4)
    assert solve_policy(place, megtaichi_options(MEGTAICHI), budget) is None
    assert sum(each.work for each in plays) < work // 2
    assert len(plays) < every
