"""Keep every activation that autograd saves until backward has used it: the fastest choice where it fits."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class KeepAll(Technique):
    """Keeps all that backward needs in device memory, as autograd does."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Keep every activation"
    source: ClassVar[str] = "PyTorch autograd"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "keeps every activation for backward"

    def record(self, target: Target) -> dict[str, Any]:
        """Return nothing: no mechanism is used."""
        return {}
