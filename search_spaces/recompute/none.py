"""Keep every activation that autograd saves until backward has used it: the fastest choice where it fits."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class KeepAll(NullTechnique):
    """Keeps all that backward needs in device memory, as autograd does."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "Keep every activation"
    clause: ClassVar[str] = "keeps every activation for backward"
    source: ClassVar[str] = "PyTorch autograd"
