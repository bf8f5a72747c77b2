"""Saved activations wait for backward where they were computed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class OnDevice(Technique):
    """No saved tensor leaves device memory."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "offload.activations"
    title: ClassVar[str] = "Keep activations on the device"
    source: ClassVar[str] = "PyTorch autograd"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def record(self, target: Target) -> dict[str, Any]:
        """No mechanism is used."""
        return {}
