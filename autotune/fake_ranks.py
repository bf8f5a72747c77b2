"""Ranks that are not there: torch's fake process group, in which one process is rank 0 of as many as are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from memtune.runtime import nodes, parts, sharding, states


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `ranks` that are not there; collectives return at once and move nothing."""
    if ranks == 1 or dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sharding.forget_meshes()
        parts.forget_meshes()
        states.forget_meshes()
        nodes.forget()
        nodes.declare(None)
