"""Parameters in chunks (PatrickStar, Elixir) and in pages (Angel-PTM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.chunks.chunk_planner import (
        ChunkPlan,
        as_few_as_used,
        chunk_sizes,
        fewest_bytes_moved,
        least_waste,
        slots_in,
    )
    from memtune.offload.chunks.grads_in_chunks import GradientsInPlace
    from memtune.offload.chunks.lock_free import LockFreeOptimizer
    from memtune.offload.chunks.lock_free_pass import sweep_in_next_step
    from memtune.offload.chunks.page_planner import PagePlan, count_pages, in_frames, schedule
    from memtune.offload.chunks.paged_offloader import PagedOffloader
    from memtune.offload.chunks.resident_chunks_planner import (
        OnDevice,
        Seconds,
        cheapest_split,
        most_in_margin,
        resident_counts,
        with_resident_first,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "ChunkPlan",
    "GradientsInPlace",
    "LockFreeOptimizer",
    "OnDevice",
    "PagePlan",
    "PagedOffloader",
    "Seconds",
    "as_few_as_used",
    "cheapest_split",
    "chunk_sizes",
    "count_pages",
    "fewest_bytes_moved",
    "in_frames",
    "least_waste",
    "most_in_margin",
    "resident_counts",
    "schedule",
    "slots_in",
    "sweep_in_next_step",
    "with_resident_first",
]
