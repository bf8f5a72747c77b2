"""The null technique: parameters, gradients and optimizer state are resident and updated on the device."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class OnDevice(Technique):
    """Runs the optimizer as the user wrote it."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Keep states on the device"
    source: ClassVar[str] = "PyTorch optimizers"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "keeps weights, gradients and optimizer state on the device"

    def record(self, target: Target) -> dict[str, Any]:
        """Return no settings: no mechanism is used."""
        return {}
