"""The null technique: every rank computes every layer on its own samples."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class DataParallelOnly(NullTechnique):
    """Divides no layer, sequence or stage over ranks; ranks differ in their data only."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "No model parallelism"
    clause: ClassVar[str] = "divides no layer over ranks"
    source: ClassVar[str] = "PyTorch eager execution"
