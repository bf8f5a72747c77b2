"""Layer-major order: each pack of blocks runs over all micro-batches (L2L, Harmony, Mobius)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.layer_major.block_chain import not_chain_error as not_chain_error
    from memtune.offload.layer_major.block_chain_pass import not_a_chain as not_a_chain
    from memtune.offload.layer_major.boundary_activations import discard_saved as discard_saved
    from memtune.offload.layer_major.layer_major_order import LayerMajor as LayerMajor
    from memtune.offload.layer_major.layer_major_pass import layer_major as layer_major, parts_of as parts_of
    from memtune.offload.layer_major.pack_offloader import PackOffloader as PackOffloader
    from memtune.offload.layer_major.pack_planner import (
        balanced as balanced,
        greedy as greedy,
        split as split,
    )
    from memtune.offload.layer_major.packs import (
        BoundaryTier as BoundaryTier,
        Packs as Packs,
        Span as Span,
        StageLayout as StageLayout,
        StageUse as StageUse,
        in_parts as in_parts,
        spans as spans,
    )
else:
    __getattr__ = open_door(__name__)
