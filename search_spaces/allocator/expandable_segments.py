"""Segments that grow: memory is mapped into one address range as needed, so freed parts rejoin."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.device import Capability
from memtune.program import Program
from memtune.search_spaces.allocator import environment, not_remapped
from memtune.technique import Exactness, Reason, Target, Technique


class ExpandableSegments(Technique):
    """Uses torch's allocator over the CUDA driver's virtual memory: reserved bytes come close to allocated
    ones.

    Mapping pages costs time while the pool still grows, in the first steps.
    """

    kind: Literal["expandable_segments"] = "expandable_segments"
    title: ClassVar[str] = "Expandable segments"
    clause: ClassVar[str] = "lets PyTorch's allocator grow its segments (expandable_segments)"
    source: ClassVar[str] = "PyTorch, CUDA semantics: expandable_segments of PYTORCH_ALLOC_CONF"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    @property
    def needs(self) -> tuple[Capability, ...]:
        return (Capability.EXPANDABLE_SEGMENTS,)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse CPU, and NCCL that registers torch's memory."""
        return not_remapped(target)

    def env(self) -> dict[str, str]:
        # Read when CUDA starts.
        return environment({"expandable_segments": True})

    def record(self, target: Target) -> dict[str, Any]:
        # On CPU the option has no effect.
        return {} if target.device == "cpu" else {"allocator": {"expandable_segments": True}}
