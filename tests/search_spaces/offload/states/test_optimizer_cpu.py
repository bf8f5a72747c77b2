"""Optimizer on the host: its state is there, gradients go down once, weights come up once."""

from __future__ import annotations

import pytest
from zoo_paths import ZOO

from memtune._apply import Tuned
from memtune.program import Kind, Resource, Tier
from memtune.runtime.tiers import DEVICE, mark
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.testing import TechniqueSuite, rewritten


class TestOptimizerCpu(TechniqueSuite):
    technique = OptimizerCpu
    models = ZOO
    quick = ("tied",)

    def sabotage(self, tuned: Tuned) -> bool:
        for state in tuned.optimizer.state.values():
            mark(state["exp_avg"], DEVICE)
        return True

    @pytest.mark.parametrize("model", ZOO)
    def test_bytes_on_the_links_and_nothing_left_behind(self, model: str) -> None:
        plain, step = rewritten(ZOO[model]), rewritten(ZOO[model], self.default())
        mine = [p for p in plain.parameters if p.gradient >= 0]
        batch = int(plain.op_traffic_bytes[plain.op_resource == Resource.HOST_TO_DEVICE].sum())
        down = int(step.op_traffic_bytes[step.op_resource == Resource.DEVICE_TO_HOST].sum())
        up = int(step.op_traffic_bytes[step.op_resource == Resource.HOST_TO_DEVICE].sum())
        assert down == sum(int(plain.bytes[p.gradient]) for p in mine)
        assert up - batch == sum(int(plain.bytes[p.storage]) for p in mine)
        assert (step.tier[step.kind == Kind.OPTIMIZER] == Tier.HOST).all()
        assert step.peak_bytes() < plain.peak_bytes()
