"""Rules and plans that several techniques of `offload.states` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.search_spaces.offload.states._common.chunk_technique import (
        ChunksPlan,
        apply_chunks,
        are_rows,
        beside,
        can_stay,
        cannot_chunk,
        chunk_plan_from,
        chunk_plan_of,
        in_chunks,
    )
    from memtune.search_spaces.offload.states._common.deferred_stages import late_in_stages, no_such_block
    from memtune.search_spaces.offload.states._common.grad_offload_technique import (
        apply_as_they_land,
        native_of,
        not_as_they_land,
        replicas_of,
    )
    from memtune.search_spaces.offload.states._common.layer_offload import (
        EAGER_ONLY,
        apply_layers,
        cannot_run_on_ranks,
        compute_s_of_moments,
        in_layers,
        replicas,
        window_of,
    )
    from memtune.search_spaces.offload.states._common.multiplexed_technique import (
        StagesPlan,
        apply_in_turn,
        costs_of,
        fields_of,
        for_other_ranks,
        not_in_turn,
        on_ranks,
        partitions,
        within,
    )
    from memtune.search_spaces.offload.states._common.native_update_rules import no_native_update, not_rows
    from memtune.search_spaces.offload.states._common.pack_technique import (
        PacksPlan,
        apply_packs,
        backward_packs,
        block_bytes,
        in_packs,
        not_in_packs,
        within_budget,
    )
    from memtune.search_spaces.offload.states._common.page_technique import (
        OnSsd,
        PagesPlan,
        apply_pages,
        in_pages,
        page_bytes_for,
        page_plan_from,
        page_plan_of,
        solved,
    )
    from memtune.search_spaces.offload.states._common.resident_chunks import split, with_margin
    from memtune.search_spaces.offload.states._common.state_ratio import Found, smallest_ratio
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "EAGER_ONLY",
    "ChunksPlan",
    "Found",
    "OnSsd",
    "PacksPlan",
    "PagesPlan",
    "StagesPlan",
    "apply_as_they_land",
    "apply_chunks",
    "apply_in_turn",
    "apply_layers",
    "apply_packs",
    "apply_pages",
    "are_rows",
    "backward_packs",
    "beside",
    "block_bytes",
    "can_stay",
    "cannot_chunk",
    "cannot_run_on_ranks",
    "chunk_plan_from",
    "chunk_plan_of",
    "compute_s_of_moments",
    "costs_of",
    "fields_of",
    "for_other_ranks",
    "in_chunks",
    "in_layers",
    "in_packs",
    "in_pages",
    "late_in_stages",
    "native_of",
    "no_native_update",
    "no_such_block",
    "not_as_they_land",
    "not_in_packs",
    "not_in_turn",
    "not_rows",
    "on_ranks",
    "page_bytes_for",
    "page_plan_from",
    "page_plan_of",
    "partitions",
    "replicas",
    "replicas_of",
    "smallest_ratio",
    "solved",
    "split",
    "window_of",
    "with_margin",
    "within",
    "within_budget",
]
