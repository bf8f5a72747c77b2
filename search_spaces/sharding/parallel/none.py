"""Every rank computes every layer on its own samples."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class DataParallelOnly(Technique):
    """No layer, sequence or stage is cut over the ranks; the ranks differ in their data alone."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "sharding.parallel"
    title: ClassVar[str] = "No model parallelism"
    source: ClassVar[str] = "PyTorch eager execution"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def record(self, target: Target) -> dict[str, Any]:
        """No mechanism is used."""
        return {}
