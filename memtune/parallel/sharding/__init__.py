"""Shards parameters, gradients and optimizer state over ranks (ZeRO, FSDP2, MiCS, PaRO, AMSP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.parallel.sharding import fsdp_sharding as fsdp_sharding
    from memtune.parallel.sharding import nested_sharding as nested_sharding
    from memtune.parallel.sharding.factors import (
        Bytes,
        Factors,
        Schedule,
        cheapest,
        every,
        held_bytes,
    )
    from memtune.parallel.sharding.fsdp_pass import Sharding, shard_states
    from memtune.parallel.sharding.fsdp_sharding import (
        SeamAllGather,
        SeamReduceScatter,
        grid,
        meshes,
        rebind,
        shard,
        units_of,
    )
    from memtune.parallel.sharding.nested_sharding import divide
    from memtune.parallel.sharding.nested_sharding_pass import Division, divide_states
    from memtune.parallel.sharding.zero_partition_pass import Partitioning, partition_states
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "Bytes",
    "Division",
    "Factors",
    "Partitioning",
    "Schedule",
    "SeamAllGather",
    "SeamReduceScatter",
    "Sharding",
    "cheapest",
    "divide",
    "divide_states",
    "every",
    "fsdp_sharding",
    "grid",
    "held_bytes",
    "meshes",
    "nested_sharding",
    "partition_states",
    "rebind",
    "shard",
    "shard_states",
    "units_of",
]
