"""A cache of equal chunks on the device, with chunk size and number searched before training (Elixir)."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.offload.chunks import ChunkPlan, as_few_as_used, fewest_bytes_moved
from memtune.offload.core import pack
from memtune.offload.parameters import sizes_in_blocks
from memtune.program import Program, Rule
from memtune.search_spaces.offload.states._common.chunk_technique import (
    ChunksPlan,
    InChunks,
    are_sharded,
    can_split_optimizer,
    chunk_plan_of,
    non_chunk_bytes,
)
from memtune.search_spaces.offload.states._common.resident_chunks import split_cache
from memtune.technique import Target


class Elixir(InChunks):
    """Trades copies that a search over chunk sizes cannot avoid for the bytes of all blocks' weights except a
    cache's.

    The blocks' parameters lie in chunks on the host; the device holds a cache of as many as fit at the peak
    of the rest of the step, one number for the whole step. Before training each chunk size is tried: the
    recorded order of uses is replayed through a cache that evicts the least recently used chunk, and the size
    that copies the fewest bytes is taken, with the smallest cache that copies no more. Chunks of the next
    block are prefetched while one computes, which takes room in the cache. Gradients are offloaded when they
    are ready, and the user's own optimizer updates the host's chunks after backward, with the bits of a host
    optimizer. Activations are known from the step, so the paper's factors for unknown ones (1.2 and 0.95) are
    not needed.

    The device is divided between the cache and resident chunks, those used first, with their optimizer state;
    the user's own optimizer updates them on the device, so neither their gradients nor their weights cross
    the link. The split is the one with the least time of links and updates by this hardware's rates: a fast
    link and a fast host get a larger cache, slow ones more resident chunks. The paper searches for the size
    first; here size and split are searched together.
    """

    kind: Literal["elixir"] = "elixir"
    title: ClassVar[str] = "A cache of chunks, searched before training"
    clause: ClassVar[str] = "keeps chunks of the blocks' weights in host memory, with a cache on the device"
    source: ClassVar[str] = (
        "Huang et al. 2022, Elixir: Train a Large Language Model on a Small GPU Cluster, arXiv:2212.05339"
    )
    paper: ClassVar[str] = "Elixir"

    rule: ClassVar[Rule] = "lru"

    prefetch: Annotated[int, Field(ge=0, le=3)] = 1
    """Blocks by which chunks are prefetched; 0: loaded at their use."""

    @property
    def prefetched_blocks(self) -> int:
        return self.prefetch

    def plan(self, program: Program, target: Target) -> ChunksPlan:
        budget_bytes, found = target.budget_bytes, None
        if self.device_updates and budget_bytes is not None and can_split_optimizer(target):
            found = split_cache(program, target.hardware, budget_bytes, self.chunk_bytes, self.prefetch)
        return chunk_plan_of(found or _solved(program, budget_bytes, self.chunk_bytes, self.prefetch))

    def record(self, target: Target) -> dict[str, Any]:
        return self._record("searched for", prefetch=self.prefetch)

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Prefetch hides copies and takes room.
        return {"prefetch": (1, 0)}


@functools.lru_cache(maxsize=64)
def _solved(program: Program, budget_bytes: int | None, chunk_bytes: int | None, prefetch: int) -> ChunkPlan:
    sizes = sizes_in_blocks(program.step)
    capacity = None if budget_bytes is None else max(budget_bytes - max(non_chunk_bytes(program)), 0)
    if chunk_bytes is None:
        return fewest_bytes_moved(*sizes, capacity, prefetch, are_sharded(program))
    chunks = pack(*sizes, chunk_bytes, are_sharded(program))
    least = as_few_as_used(chunks, prefetch)
    return ChunkPlan(
        chunks,
        least
        if capacity is None
        else (min(max(capacity // chunk_bytes, least[0]), chunks.count),) * len(least),
    )
