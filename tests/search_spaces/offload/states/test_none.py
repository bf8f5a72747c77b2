"""The null technique keeps states on the device."""

from __future__ import annotations

from typing import ClassVar

from support.zoo_paths import ZOO

from memtune.program.step import Kind, Tier
from memtune.search_spaces.offload.states.none import OnDevice
from memtune.testing import TechniqueSuite, rewritten


class TestOnDevice(TechniqueSuite):
    technique = OnDevice
    models: ClassVar = {name: ZOO[name] for name in ("gpt",)}

    def test_state_is_resident(self) -> None:
        step = rewritten(ZOO["gpt"], self.default())
        assert (step.storages.tier[step.storages.kind == Kind.OPTIMIZER] == Tier.DEVICE).all()
