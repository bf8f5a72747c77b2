"""The null technique keeps activations on the device."""

from __future__ import annotations

from typing import ClassVar

from support.zoo_paths import ZOO

from memtune.program.step import Resource
from memtune.search_spaces.offload.activations.none import OnDevice
from memtune.testing import TechniqueSuite, rewritten


class TestOnDevice(TechniqueSuite):
    technique = OnDevice
    models: ClassVar = {name: ZOO[name] for name in ("gpt",)}

    def test_activations_are_not_offloaded(self) -> None:
        assert not (rewritten(ZOO["gpt"], self.default()).ops.resource == Resource.DEVICE_TO_HOST).any()
