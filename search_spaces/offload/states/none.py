"""Parameters, gradients and optimizer state live in device memory and are updated there."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class OnDevice(Technique):
    """The optimizer as the user wrote it."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Keep states on the device"
    source: ClassVar[str] = "PyTorch optimizers"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def record(self, target: Target) -> dict[str, Any]:
        """No mechanism is used."""
        return {}
