"""The null technique: every rank computes every layer on its own samples."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class DataParallelOnly(Technique):
    """Divides no layer, sequence or stage over ranks; ranks differ in their data only."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "sharding.parallel"
    title: ClassVar[str] = "No model parallelism"
    source: ClassVar[str] = "PyTorch eager execution"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "divides no layer over ranks"

    def record(self, target: Target) -> dict[str, Any]:
        """Return no settings: no mechanism is used."""
        return {}
