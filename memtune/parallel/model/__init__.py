"""Tensor, sequence and context parallelism, and rotated weights (RTP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.model.block_attention import attend as attend
    from memtune.parallel.model.context_groups import Split as Split, grid_of as grid_of
    from memtune.parallel.model.context_parallel import (
        FIX as FIX,
        HEAD_CONTEXT as HEAD_CONTEXT,
        AttentionCall as AttentionCall,
        divide_sequence as divide_sequence,
        divided_attention as divided_attention,
        shard_fake_blocks as shard_fake_blocks,
        with_attention as with_attention,
    )
    from memtune.parallel.model.expert_dispatch import Load as Load
    from memtune.parallel.model.expert_parallel import (
        divide_experts as divide_experts,
        divide_layers as divide_layers,
        divisible_experts as divisible_experts,
        owners_of as owners_of,
    )
    from memtune.parallel.model.expert_replicas import NO_REPLICAS as NO_REPLICAS, ReplicaRule as ReplicaRule
    from memtune.parallel.model.rotated_experts import order_experts as order_experts
    from memtune.parallel.model.sequence_parallel_layers import (
        divide as divide,
        shard_fake_sequence as shard_fake_sequence,
    )
    from memtune.parallel.model.sequence_sharding import (
        SequenceLayout as SequenceLayout,
        dropouts as dropouts,
    )
    from memtune.parallel.model.tensor_parallel import (
        Place as Place,
        cut as cut,
        cut_layers as cut_layers,
        mix_plain_and_sharded as mix_plain_and_sharded,
        require_linear as require_linear,
    )
    from memtune.parallel.model.tensor_parallel_pass import (
        Sharing as Sharing,
        average as average,
        share as share,
        sum_shards as sum_shards,
    )
    from memtune.parallel.model.weight_rotation import (
        rotatable as rotatable,
        rotate as rotate,
        rotate_layers as rotate_layers,
    )
else:
    __getattr__ = open_door(__name__)
