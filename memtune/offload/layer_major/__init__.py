"""Layer-major order: packs of blocks run over all micro-batches, one pack after the other (L2L, Harmony,
Mobius).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.layer_major.block_chain_pass import not_a_chain
    from memtune.offload.layer_major.boundary_activations import discard_saved
    from memtune.offload.layer_major.layer_major_order import LayerMajor
    from memtune.offload.layer_major.layer_major_pass import layer_major, parts_of
    from memtune.offload.layer_major.pack_offloader import PackOffloader
    from memtune.offload.layer_major.pack_planner import balanced, greedy, split
    from memtune.offload.layer_major.packs import (
        BoundaryTier,
        Packs,
        Span,
        StageLayout,
        StageUse,
        in_parts,
        spans,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "BoundaryTier",
    "LayerMajor",
    "PackOffloader",
    "Packs",
    "Span",
    "StageLayout",
    "StageUse",
    "balanced",
    "discard_saved",
    "greedy",
    "in_parts",
    "layer_major",
    "not_a_chain",
    "parts_of",
    "spans",
    "split",
]
