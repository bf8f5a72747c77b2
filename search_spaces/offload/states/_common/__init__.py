"""Rules and plans that several techniques of `offload.states` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.search_spaces.offload.states._common.block_sizes import block_bytes
    from memtune.search_spaces.offload.states._common.chunk_technique import (
        ChunksPlan,
        apply_chunks,
        are_sharded,
        can_split_optimizer,
        cannot_chunk,
        chunk_plan_from,
        chunk_plan_of,
        effects_of_chunks,
        in_chunks,
        non_chunk_bytes,
    )
    from memtune.search_spaces.offload.states._common.grad_offload_technique import (
        apply_on_grad_ready,
        cannot_offload_on_grad_ready,
        native_of,
        replicas_of,
    )
    from memtune.search_spaces.offload.states._common.layer_apply import apply_layers
    from memtune.search_spaces.offload.states._common.layer_offload import (
        EAGER_ONLY,
        cannot_run_on_ranks,
        compute_s_of_moments,
        in_layers,
        other_gathers,
        replicas,
        window_of,
    )
    from memtune.search_spaces.offload.states._common.multiplexed_technique import (
        StagesPlan,
        apply_stages,
        cannot_run_stages,
        costs_of,
        on_ranks,
        partitions,
        solve_within,
        stages_plan_fields,
        wrong_ranks_error,
    )
    from memtune.search_spaces.offload.states._common.pack_technique import (
        PacksPlan,
        apply_packs,
        cannot_run_packs,
        in_packs,
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
        solve_pages,
    )
    from memtune.search_spaces.offload.states._common.resident_chunks import split_cache, with_resident_chunks
    from memtune.search_spaces.offload.states._common.state_ratio import RatioSolution, smallest_ratio
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "EAGER_ONLY",
    "ChunksPlan",
    "OnSsd",
    "PacksPlan",
    "PagesPlan",
    "RatioSolution",
    "StagesPlan",
    "apply_chunks",
    "apply_layers",
    "apply_on_grad_ready",
    "apply_packs",
    "apply_pages",
    "apply_stages",
    "are_sharded",
    "block_bytes",
    "can_split_optimizer",
    "cannot_chunk",
    "cannot_offload_on_grad_ready",
    "cannot_run_on_ranks",
    "cannot_run_packs",
    "cannot_run_stages",
    "chunk_plan_from",
    "chunk_plan_of",
    "compute_s_of_moments",
    "costs_of",
    "effects_of_chunks",
    "in_chunks",
    "in_layers",
    "in_packs",
    "in_pages",
    "native_of",
    "non_chunk_bytes",
    "on_ranks",
    "other_gathers",
    "page_bytes_for",
    "page_plan_from",
    "page_plan_of",
    "partitions",
    "replicas",
    "replicas_of",
    "smallest_ratio",
    "solve_pages",
    "solve_within",
    "split_cache",
    "stages_plan_fields",
    "window_of",
    "with_resident_chunks",
    "within_budget",
    "wrong_ranks_error",
]
