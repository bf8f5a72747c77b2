"""The null technique: saved activations are resident until backward."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class OnDevice(Technique):
    """Keeps every saved tensor in device memory."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "offload.activations"
    title: ClassVar[str] = "Keep activations on the device"
    source: ClassVar[str] = "PyTorch autograd"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "keeps saved activations on the device"

    def record(self, target: Target) -> dict[str, Any]:
        """Return no settings: no mechanism is used."""
        return {}
