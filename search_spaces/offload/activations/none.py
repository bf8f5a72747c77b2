"""The null technique: saved activations are resident until backward."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class OnDevice(NullTechnique):
    """Keeps every saved tensor in device memory."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "Keep activations on the device"
    clause: ClassVar[str] = "keeps saved activations on the device"
    source: ClassVar[str] = "PyTorch autograd"
