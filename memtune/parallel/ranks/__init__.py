"""Process groups, node topology, rank checks and errors that all ranks raise together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.ranks import replica_groups as replica_groups
    from memtune.parallel.ranks import shutdown as shutdown
    from memtune.parallel.ranks.error_propagation import share_first_failure
    from memtune.parallel.ranks.micro_batch_rotation import MicroBatchRotation
    from memtune.parallel.ranks.missing_gradients import (
        fill_missing,
        inconsistent_indices,
        message_device,
        missing_here,
        missing_indices,
    )
    from memtune.parallel.ranks.rank_checks import (
        gather_descriptions,
        has_real_peers,
        require_groups,
        require_plain,
        require_ranks,
        require_same_config,
        require_whole_layers,
        require_whole_parameters,
    )
    from memtune.parallel.ranks.replica_groups import (
        PARTS,
        FullParameter,
        ShardMeshes,
        allow_nested_collectives,
        same_part_group,
        set_full_specs,
        shard_like,
        shard_meshes,
        unwrap_dtensors,
    )
    from memtune.parallel.ranks.ring import Hop, Ring, RingRound, RingSums
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "PARTS",
    "FullParameter",
    "Hop",
    "MicroBatchRotation",
    "Ring",
    "RingRound",
    "RingSums",
    "ShardMeshes",
    "allow_nested_collectives",
    "fill_missing",
    "gather_descriptions",
    "has_real_peers",
    "inconsistent_indices",
    "message_device",
    "missing_here",
    "missing_indices",
    "replica_groups",
    "require_groups",
    "require_plain",
    "require_ranks",
    "require_same_config",
    "require_whole_layers",
    "require_whole_parameters",
    "same_part_group",
    "set_full_specs",
    "shard_like",
    "shard_meshes",
    "share_first_failure",
    "shutdown",
    "unwrap_dtensors",
]
