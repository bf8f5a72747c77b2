"""MegTaiChi: the score of a tensor counts the free bytes next to it.

Distinguishing test: of two equal tensors, the one next to a hole is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from fixed_cpu import CPU
from support.zoo_paths import ZOO

from memtune.activations.eviction import HostLink, PolicySchedule
from memtune.program import Action, OpGraph, Schedule
from memtune.search_spaces.recompute._schedule_planner import policy_schedule
from memtune.search_spaces.recompute._schedule_planner.policy_schedule import solve_policy
from memtune.search_spaces.recompute._schedule_planner.region_placement import placement_of
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.testing import TechniqueSuite
from memtune.testing.drift_check import drift, fresh_programs, plain_program, planned, target_of


class TestMegtaichi(TechniqueSuite):
    technique = Megtaichi
    models: ClassVar = {name: ZOO[name] for name in ("cnn_bn", "lora")}
    variants = (
        Megtaichi(ratio=0.2),
        Megtaichi(ratio=0.5, foresight=True),
        Megtaichi(ratio=0.2, swap=False),
    )
    quick = ("cnn_bn",)

    @classmethod
    def default(cls) -> Megtaichi:
        return Megtaichi(ratio=0.5)

    def test_powers_reach_the_policy(self) -> None:
        """An exponent of 0 removes its term from the score: the plans differ."""
        program = plain_program(ZOO["lora"])
        plans = set()
        for knobs in ({}, {"size_power": 0.0}, {"time_power": 0.0}, {"cost_power": 0.0}):
            technique = Megtaichi(ratio=0.3, **knobs)
            if technique.fits(program, target_of(technique)) is None:
                plans.add(technique.plan(program, target_of(technique)).sha256)
        assert len(plans) >= 2

    def test_alternatives_recompute_less_near_thrashing(self) -> None:
        program, technique = plain_program(ZOO["gpt"], 16), Megtaichi(ratio=0.2)
        target = target_of(technique)
        place, plan = placement_of(program, target), technique.plan(program, target)
        alone = solve_policy(place, (technique.policy(),), technique._budget_bytes(place, target))
        assert alone is not None
        assert plan.recompute_s < alone.recompute_s
        assert plan.option not in ("", technique.options()[0].option)


GPT, BATCH = ZOO["gpt"], 16


def solved(bytes_per_s: float, *, swap: bool = True) -> PolicySchedule:
    """Return the schedule for the GPT with a link of this rate, at a third of what recompute can free."""
    technique = Megtaichi(ratio=0.3, swap=swap)
    place = placement_of(plain_program(GPT, BATCH), target_of(technique))
    rates = {"device_to_host_bytes_per_s": bytes_per_s, "host_to_device_bytes_per_s": bytes_per_s}
    linked = replace(place, hardware=replace(CPU, device="cuda", **rates))
    found = solve_policy(linked, technique.options(), technique._budget_bytes(place, target_of(technique)))
    assert found is not None
    return found


def swapped(schedule: Schedule) -> list[int]:
    return [step.target for step in schedule.steps if step.action == Action.TO_HOST]


def test_tensors_are_swapped_on_a_fast_link_and_recomputed_on_a_slow_one() -> None:
    without = solved(1e9, swap=False)
    fast, slow = solved(64e9), solved(1e7)
    assert swapped(fast.schedule)
    assert fast.recompute_s < without.recompute_s
    assert len(fast.schedule.computes()) < len(without.schedule.computes())
    assert not swapped(slow.schedule)
    assert slow.recompute_s <= without.recompute_s


def test_part_of_the_tensors_is_swapped_and_part_recomputed() -> None:
    found = solved(1e9)
    assert swapped(found.schedule)
    assert (
        len(found.schedule.computes())
        > placement_of(plain_program(GPT, BATCH), target_of()).region.graph.n_ops
    )


def reads_next(graph: OpGraph, schedule: Schedule) -> Iterator[bool]:
    """Yield for each reload whether the op that follows reads the value."""
    steps = [step for step in schedule.steps if step.action in (Action.COMPUTE, Action.FROM_HOST)]
    for step, following in pairwise(steps):
        if step.action == Action.FROM_HOST and following.action == Action.COMPUTE:
            yield step.target in following.reads(graph)


@pytest.mark.parametrize("hides", [False, True])
def test_swapped_steps_are_predicted_to_the_byte(hides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reloads just before their reads, and with those that begin behind other ops."""

    def link(*rates: float, **_: Any) -> HostLink:
        return HostLink(*rates, hides_copies=hides)

    monkeypatch.setattr(policy_schedule, "HostLink", link)
    technique = Megtaichi(ratio=0.3)
    with fresh_programs():
        program, plans = planned(GPT, technique, micro_batch=BATCH)
        schedule = plans["recompute"].schedule  # type: ignore[attr-defined]
        graph = placement_of(plain_program(GPT, BATCH), target_of(technique)).region.graph
        assert swapped(schedule)
        assert all(reads_next(graph, schedule)) != hides
        assert program.step.peak_bytes() == plans["recompute"].peak_bytes  # type: ignore[attr-defined]
        assert drift(GPT, technique, micro_batch=BATCH) == ""


def test_online_decisions_do_not_swap() -> None:
    technique = Megtaichi(ratio=0.3, online=True)
    plan = technique.plan(plain_program(GPT, BATCH), target_of(technique))
    assert not swapped(plan.schedule)
    assert "swap" not in plan.option
