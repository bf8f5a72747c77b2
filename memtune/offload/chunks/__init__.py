"""Parameters in chunks (PatrickStar, Elixir) and in pages (Angel-PTM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.chunks.chunk_planner import (
        ChunkPlan as ChunkPlan,
        as_few_as_used as as_few_as_used,
        chunk_sizes as chunk_sizes,
        fewest_bytes_moved as fewest_bytes_moved,
        least_waste as least_waste,
        slots_in as slots_in,
    )
    from memtune.offload.chunks.grads_in_chunks import GradientPlaces as GradientPlaces
    from memtune.offload.chunks.lock_free import LockFreeOptimizer as LockFreeOptimizer
    from memtune.offload.chunks.lock_free_pass import sweep_in_next_step as sweep_in_next_step
    from memtune.offload.chunks.page_planner import (
        PagePlan as PagePlan,
        count_pages as count_pages,
        in_frames as in_frames,
        schedule as schedule,
    )
    from memtune.offload.chunks.paged_offloader import PagedUnits as PagedUnits
    from memtune.offload.chunks.resident_chunks_planner import (
        OnDevice as OnDevice,
        Seconds as Seconds,
        cheapest_split as cheapest_split,
        most_in_margin as most_in_margin,
        resident_counts as resident_counts,
        with_resident_first as with_resident_first,
    )
else:
    __getattr__ = open_door(__name__)
