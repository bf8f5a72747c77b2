"""Shards parameters, gradients and optimizer state over ranks (ZeRO, FSDP2, MiCS, PaRO, AMSP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.sharding import fsdp_sharding as fsdp_sharding, nested_sharding as nested_sharding
    from memtune.parallel.sharding.factors import (
        Bytes as Bytes,
        Factors as Factors,
        Schedule as Schedule,
        all_factors as all_factors,
        cheapest as cheapest,
        held_bytes as held_bytes,
    )
    from memtune.parallel.sharding.fsdp_pass import Sharding as Sharding, shard_states as shard_states
    from memtune.parallel.sharding.fsdp_sharding import (
        SeamAllGather as SeamAllGather,
        SeamReduceScatter as SeamReduceScatter,
        grid as grid,
        meshes as meshes,
        rebind as rebind,
        shard as shard,
        units_of as units_of,
    )
    from memtune.parallel.sharding.nested_sharding import divide as divide
    from memtune.parallel.sharding.nested_sharding_pass import (
        Division as Division,
        divide_states as divide_states,
    )
    from memtune.parallel.sharding.zero_partition_pass import (
        Partitioning as Partitioning,
        partition_states as partition_states,
    )
else:
    __getattr__ = open_door(__name__)
