"""Tensor, sequence and context parallelism, and rotated weights (RTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.model.context_groups import Split, grid_of
    from memtune.parallel.model.context_parallel import (
        FIX,
        HEAD_CONTEXT,
        divide_sequence,
        divided_attention,
        require_plain_attention,
        shard_fake_blocks,
    )
    from memtune.parallel.model.rotated_experts import order_experts
    from memtune.parallel.model.sequence_parallel_layers import divide, shard_fake_sequence
    from memtune.parallel.model.sequence_sharding import SequenceLayout, dropouts
    from memtune.parallel.model.tensor_parallel import (
        Place,
        cut,
        cut_layers,
        mix_plain_and_sharded,
        require_linear,
    )
    from memtune.parallel.model.tensor_parallel_pass import Sharing, average, share, sum_shards
    from memtune.parallel.model.weight_rotation import rotatable, rotate, rotate_layers
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "FIX",
    "HEAD_CONTEXT",
    "Place",
    "SequenceLayout",
    "Sharing",
    "Split",
    "average",
    "cut",
    "cut_layers",
    "divide",
    "divide_sequence",
    "divided_attention",
    "dropouts",
    "grid_of",
    "mix_plain_and_sharded",
    "order_experts",
    "require_linear",
    "require_plain_attention",
    "rotatable",
    "rotate",
    "rotate_layers",
    "shard_fake_blocks",
    "shard_fake_sequence",
    "share",
    "sum_shards",
]
