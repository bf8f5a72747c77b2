"""The null technique: parameters, gradients and optimizer state are resident and updated on the device."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class OnDevice(NullTechnique):
    """Runs the optimizer as the user wrote it."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "Keep states on the device"
    clause: ClassVar[str] = "keeps weights, gradients and optimizer state on the device"
    source: ClassVar[str] = "PyTorch optimizers"
