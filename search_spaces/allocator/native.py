"""The caching allocator as torch ships it, with the knobs to split, round and collect blocks."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from memtune.device import Capability
from memtune.program import Program
from memtune.search_spaces.allocator import NO_EFFECT_ON_CPU, environment
from memtune.technique import Exactness, Reason, Target, Technique


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _divisions(value: int | str | None) -> int | str | None:
    """Validate a power of two up to 64, or one by size in MiB: `[256:1,512:2,>:8]`; `>`: larger sizes."""
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
    """Uses torch's allocator; every knob trades fragmentation (reserved minus allocated bytes) for time in
    the allocator.

    The knobs are all options of `PYTORCH_ALLOC_CONF`, under torch's names, except those that choose another
    allocator (`backend`, `expandable_segments`). A torch that does not know one of them raises when CUDA
    starts. A search tries three of them; a config may set the others.
    """

    kind: Literal["native"] = "native"
    title: ClassVar[str] = "PyTorch's caching allocator"
    clause: ClassVar[str] = "uses PyTorch's caching allocator"
    source: ClassVar[str] = "PyTorch, CUDA semantics: optimizing memory usage with PYTORCH_ALLOC_CONF"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    max_split_size_mb: Annotated[int, Field(gt=10)] | None = None
    """Blocks above this many MiB are not split: less fragmentation by large blocks, more driver calls."""
    roundup_power2_divisions: Annotated[int | str | None, AfterValidator(_divisions)] = None
    """Round sizes up to a power of two cut into this many parts (one number, or one by size as
    `[256:1,512:2,>:8]`): more reuse, bytes lost to rounding.
    """
    garbage_collection_threshold: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Above this fraction of the memory limit, unused blocks are returned to the driver: avoids a full flush,
    costs driver calls.
    """

    max_non_split_rounding_mb: Annotated[int, Field(gt=10)] | None = None
    """Most MiB by which a block above `max_split_size_mb` may exceed the request: fewer driver calls, more
    waste in it.
    """
    large_segment_size_mb: Annotated[int, Field(gt=10)] | None = None
    """Segment in MiB for requests of 1 to 10 MiB: small ones lose less at their ends, large ones need fewer
    driver calls.
    """
    per_process_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Most device memory that the process takes if others share it; a trial's memory limit overrides it."""
    throw_on_cudamalloc_oom: bool | None = None
    """Raise out of memory as soon as the driver refuses, without freeing cached blocks first."""
    release_lock_on_cudamalloc: bool | None = None
    """Other threads can allocate while one waits for the driver."""
    graph_capture_record_stream_reuse: bool | None = None
    """Reuse blocks recorded on other streams within a CUDA graph; only the user's code captures any."""
    pinned_use_cuda_host_register: bool | None = None
    """Pin memory of malloc: faster to allocate, with `pinned_num_register_threads`."""
    pinned_num_register_threads: Annotated[int, AfterValidator(_power_of_two), Field(ge=1, le=128)] | None = (
        None
    )
    """Threads that register pinned host memory, a power of two."""
    pinned_use_background_threads: bool | None = None
    """A separate thread waits for copies out of pinned memory."""
    pinned_reserve_segment_size_mb: Annotated[int, Field(ge=0)] | None = None
    """MiB of pinned memory that are allocated at once and served in parts."""
    pinned_max_round_threshold_mb: Annotated[int, Field(ge=0)] | None = None
    """Pinned requests above this many MiB are not rounded up to a power of two: less host memory, less reuse.
    """
    pinned_max_cached_size_mb: Annotated[int, Field(ge=0)] | None = None
    """Pinned blocks above this many MiB are returned when they are freed."""
    pinned_free_catch_all: bool | None = None
    """Passed to torch unchanged; see its documentation."""

    @model_validator(mode="after")
    def _blocks_are_not_smaller_than_segments(self) -> Self:
        segment = self.large_segment_size_mb or 20
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < segment:
                raise ValueError(f"{name}: {value} must be at least {segment}, the size of a large segment")
        return self

    @property
    def needs(self) -> tuple[Capability, ...]:
        return (Capability.ALLOCATOR_SETTINGS,) if self._options() else ()

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse knobs on CPU, where they have no effect, and the threshold without a memory limit."""
        if target.device == "cpu" and self._options():
            return Reason(NO_EFFECT_ON_CPU)
        if self.garbage_collection_threshold is not None and target.budget_bytes is None:
            return Reason(
                "garbage_collection_threshold is a share of the memory limit, and there is none",
                "set --max-memory",
            )
        return None

    def env(self) -> dict[str, str]:
        return environment(self._options())

    def record(self, target: Target) -> dict[str, Any]:
        # On CPU the options have no effect.
        options = self._options()
        return {"allocator": options} if options and target.device != "cpu" else {}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Values that published runs found worth trying.
        return {
            "max_split_size_mb": (None, 128, 512),
            "roundup_power2_divisions": (None, 4, 8),
            "garbage_collection_threshold": (None, 0.8),
        }

    def _options(self) -> dict[str, object]:
        return {name: value for name, value in self.knobs() if value is not None}
