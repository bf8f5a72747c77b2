"""Run ops in the order of the user's code, micro-batch after micro-batch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class ProgramOrder(Technique):
    """Runs ops in the order of the user's code."""

    kind: Literal["program"] = "program"
    slot: ClassVar[str] = "execution.order"
    title: ClassVar[str] = "Program order"
    source: ClassVar[str] = "PyTorch"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "runs ops in the order of your code"

    def record(self, target: Target) -> dict[str, Any]:
        """Return nothing: no mechanism is used."""
        return {}
