"""MegTaiChi: the score of a tensor counts the free bytes next to it.

Distinguishing test: of two equal tensors, the one next to a hole is evicted.
"""

from __future__ import annotations

from typing import ClassVar

from support.zoo_paths import ZOO

from memtune.search_spaces.recompute._schedule_planner.policy_schedule import solve_policy
from memtune.search_spaces.recompute._schedule_planner.region_placement import placement_of
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.testing import TechniqueSuite
from memtune.testing.drift_check import plain_program, target_of


class TestMegtaichi(TechniqueSuite):
    technique = Megtaichi
    models: ClassVar = {name: ZOO[name] for name in ("cnn_bn", "lora")}
    variants = (Megtaichi(ratio=0.2), Megtaichi(ratio=0.5, foresight=True))
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
