"""Simulated ranks: torch's fake process group, in which one process is rank 0 of any number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from memtune.parallel.ranks import replica_groups
from memtune.parallel.sharding import fsdp_sharding, nested_sharding
from memtune.runtime import node_topology


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `ranks` fake ones; collectives return at once and move nothing."""
    if ranks == 1 or dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        fsdp_sharding.forget_meshes()
        replica_groups.forget_meshes()
        nested_sharding.forget_meshes()
        node_topology.forget()
        node_topology.declare(None)
