"""Run every op on its whole input, as the model calls it."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class Whole(NullTechnique):
    """Runs every op on its whole input; temporaries have their full size."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "Run every op whole"
    clause: ClassVar[str] = "runs every op whole"
    source: ClassVar[str] = "PyTorch eager execution"
