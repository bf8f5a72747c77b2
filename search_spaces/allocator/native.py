"""The caching allocator as torch ships it, with the knobs that bound how it splits, rounds and collects its blocks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from memtune.program import Program
from memtune.search_spaces.allocator import NO_EFFECT_ON_CPU, environment
from memtune.technique import Exactness, Reason, Target, Technique


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


class Native(Technique):
    """torch's allocator; every knob trades fragmentation (reserved minus allocated bytes) for time in the allocator."""

    kind: Literal["native"] = "native"
    slot: ClassVar[str] = "allocator"
    title: ClassVar[str] = "PyTorch's caching allocator"
    source: ClassVar[str] = "PyTorch, CUDA semantics: optimizing memory usage with PYTORCH_ALLOC_CONF"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    max_split_size_mb: int | None = Field(default=None, ge=20)
    """Blocks above this many MiB are not split: less fragmentation by large blocks, more calls into the driver."""
    roundup_power2_divisions: Annotated[int, AfterValidator(_power_of_two), Field(ge=1, le=64)] | None = None
    """Sizes are rounded up to a power of two cut into this many parts: fits more reuse, wastes the rounding."""
    garbage_collection_threshold: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Above this share of the memory limit, unused blocks are given back: avoids a full flush, costs driver calls."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Its knobs act on CUDA only, and the threshold only under a memory limit."""
        if target.device == "cpu" and self._options():
            return Reason(NO_EFFECT_ON_CPU)
        if self.garbage_collection_threshold is not None and target.budget_bytes is None:
            return Reason("garbage_collection_threshold is a share of the memory limit, and there is none", "set --max-memory")
        return None

    def env(self) -> dict[str, str]:
        """The knobs that are set, in the allocator's syntax; nothing when none is."""
        return environment(self._options())

    def record(self, target: Target) -> dict[str, Any]:
        """The allocator's options; none on CPU, where they change nothing."""
        options = self._options()
        return {"allocator": options} if options and target.device != "cpu" else {}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Values that published runs found worth trying."""
        return {
            "max_split_size_mb": (None, 128, 512),
            "roundup_power2_divisions": (None, 4, 8),
            "garbage_collection_threshold": (None, 0.8),
        }

    def _options(self) -> dict[str, object]:
        return {name: value for name, value in self.knobs() if value is not None}
