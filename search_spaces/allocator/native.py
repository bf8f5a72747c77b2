"""The caching allocator as torch ships it, with the knobs that bound how it splits, rounds and collects its
blocks.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from memtune.program import Program
from memtune.search_spaces.allocator import NO_EFFECT_ON_CPU, environment
from memtune.technique import Exactness, Reason, Target, Technique


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _divisions(value: int | str | None) -> int | str | None:
    """A power of two up to 64, or one by size in MiB as `[256:1,512:2,>:8]`; `>` stands for all larger
    sizes.
    """
    if isinstance(value, str) and not re.fullmatch(r"\[(\d+:\d+,)*(\d+|>):\d+\]", value):
        raise ValueError(
            "must be a power of two, or a list of sizes in MiB with one each as [256:1,512:2,>:8]"
        )
    for number in [value] if isinstance(value, int) else map(int, re.findall(r"\d+", value or "")):
        if number < 1 or number & (number - 1):
            raise ValueError(f"must be powers of two, and {number} is none")
    if isinstance(value, int) and value > 64:
        raise ValueError("must be 64 at most")
    return value


class Native(Technique):
    """torch's allocator; every knob trades fragmentation (reserved minus allocated bytes) for time in the
    allocator.

    All of `PYTORCH_ALLOC_CONF` but what chooses another allocator (`backend`, `expandable_segments`), under
    torch's names. A torch that does not know one of them says so when CUDA starts. A search tries three of
    them; the others can be written down.
    """

    kind: Literal["native"] = "native"
    slot: ClassVar[str] = "allocator"
    title: ClassVar[str] = "PyTorch's caching allocator"
    source: ClassVar[str] = "PyTorch, CUDA semantics: optimizing memory usage with PYTORCH_ALLOC_CONF"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    max_split_size_mb: Annotated[int, Field(gt=10)] | None = None
    """Blocks above this many MiB are not split: less fragmentation by large blocks, more calls into the
    driver.
    """
    roundup_power2_divisions: Annotated[int | str | None, AfterValidator(_divisions)] = None
    """Sizes are rounded up to a power of two cut into this many parts (one number, or one by size as
    `[256:1,512:2,>:8]`): fits more reuse, wastes the rounding.
    """
    garbage_collection_threshold: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Above this share of the memory limit, unused blocks are given back: avoids a full flush, costs driver
    calls.
    """

    max_non_split_rounding_mb: Annotated[int, Field(gt=10)] | None = None
    """How many MiB larger than the request a block above `max_split_size_mb` may be: fewer driver calls, more
    waste in it.
    """
    large_segment_size_mb: Annotated[int, Field(gt=10)] | None = None
    """Segment in MiB for requests of 1 to 10 MiB: small ones lose less at their ends, large ones need fewer
    driver calls.
    """
    per_process_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """The most of the device's memory that the process takes, for others beside it; a trial's memory limit
    overrides it.
    """
    throw_on_cudamalloc_oom: bool | None = None
    """Out of memory as soon as the driver refuses, without giving cached blocks back first."""
    release_lock_on_cudamalloc: bool | None = None
    """Other threads allocate while one waits for the driver."""
    graph_capture_record_stream_reuse: bool | None = None
    """Blocks recorded on other streams are reused within a CUDA graph; memtune captures none, the user's code
    may.
    """
    pinned_use_cuda_host_register: bool | None = None
    """Pinned host memory is malloc's, registered: faster to make, by `pinned_num_register_threads`."""
    pinned_num_register_threads: Annotated[int, AfterValidator(_power_of_two), Field(ge=1, le=128)] | None = (
        None
    )
    pinned_use_background_threads: bool | None = None
    """Copies out of pinned memory are waited for by a thread of their own."""
    pinned_reserve_segment_size_mb: Annotated[int, Field(ge=0)] | None = None
    """MiB of pinned memory that are made at once and handed out in parts."""
    pinned_max_round_threshold_mb: Annotated[int, Field(ge=0)] | None = None
    """Pinned requests above so many MiB are not rounded up to a power of two: less host memory, less reuse.
    """
    pinned_max_cached_size_mb: Annotated[int, Field(ge=0)] | None = None
    """Pinned blocks above so many MiB are given back when they are freed."""
    pinned_free_catch_all: bool | None = None
    """See torch's documentation; written as it is."""

    @model_validator(mode="after")
    def _blocks_are_not_smaller_than_segments(self) -> Self:
        segment = self.large_segment_size_mb or 20
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < segment:
                raise ValueError(f"{name}: {value} must be at least {segment}, the size of a large segment")
        return self

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Its knobs act on CUDA only, and the threshold only under a memory limit."""
        if target.device == "cpu" and self._options():
            return Reason(NO_EFFECT_ON_CPU)
        if self.garbage_collection_threshold is not None and target.budget_bytes is None:
            return Reason(
                "garbage_collection_threshold is a share of the memory limit, and there is none",
                "set --max-memory",
            )
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
