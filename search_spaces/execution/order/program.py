"""Run ops in the order of the user's code, micro-batch after micro-batch."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class ProgramOrder(NullTechnique):
    """Runs ops in the order of the user's code."""

    kind: Literal["program"] = "program"
    title: ClassVar[str] = "Program order"
    clause: ClassVar[str] = "runs ops in the order of your code"
    source: ClassVar[str] = "PyTorch"
