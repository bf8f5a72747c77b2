"""Run every op on its whole input, as the model calls it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class Whole(Technique):
    """Runs every op on its whole input; temporaries have their full size."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "split"
    title: ClassVar[str] = "Run every op whole"
    source: ClassVar[str] = "PyTorch eager execution"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "runs every op whole"

    def record(self, target: Target) -> dict[str, Any]:
        """Return nothing: no mechanism is used."""
        return {}
