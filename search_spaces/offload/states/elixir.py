"""A cache of equal chunks on the device, its chunk size and their number searched before training (Elixir,
Huang et al. 2022).
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.offload.chunks import ChunkPlan, as_few_as_used, fewest_bytes_moved
from memtune.offload.core import pack
from memtune.offload.parameters import sizes_in_blocks
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    ChunksPlan,
    apply_chunks,
    are_rows,
    beside,
    can_stay,
    cannot_chunk,
    chunk_plan_from,
    chunk_plan_of,
    in_chunks,
    split,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Elixir(Technique):
    """Trades the bytes that a search over chunk sizes cannot save on the link for the bytes of all blocks'
    weights but a cache's.

    The blocks' parameters lie in chunks on the host; the device holds a cache of as many as fit beside the
    fullest moment of the step, one number for all of it. Before training each chunk size is tried: the
    recorded order of uses is replayed through a cache that lets go of what was used longest ago, and the size
    that moves the fewest bytes is taken, with the smallest cache that moves no more. Chunks of the next block
    come in while one computes, which takes room in the cache. Gradients leave as they land, so clipping by
    norm is refused; the user's own optimizer works on the host's chunks after backward: the bits of a host
    optimizer with weights in place. Activations are known from the step, so the paper's factors for what is
    not (1.2 and 0.95) are left out.

    The device is split between the cache and chunks that stay, those used first, with their optimizer state,
    to be updated there by the user's own optimizer: these send no gradient down and bring no weight up. The
    split is the one with which links and updates take the least time together, by this hardware's rates: a
    fast link and a fast host get a larger cache, slow ones more chunks that stay. The paper searches for the
    size first, here all is searched for at once.

    Distinguishing test: chunk size, number of chunks and what stays are those of the least time, or with
    nothing that stays of the fewest bytes moved, over all sizes and numbers (brute force), the number is one
    for all moments, chunks come in ahead of their use, and of those that stay nothing crosses the link.
    """

    kind: Literal["elixir"] = "elixir"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (ChunksPlan,)
    title: ClassVar[str] = "A cache of chunks, searched before training"
    source: ClassVar[str] = (
        "Huang et al. 2022, Elixir: Train a Large Language Model on a Small GPU Cluster, arXiv:2212.05339"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    chunk_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of a chunk; none given: the size that moves the fewest bytes."""
    ahead: Annotated[int, Field(ge=0, le=3)] = 1
    """Blocks that chunks come in ahead of their use; 0: when they are used."""
    device_updates: bool = True
    """Chunks stay on the device with their optimizer state where that takes less time than a larger cache."""

    @property
    def effects(self) -> Effects:
        """Chunks that may stay on the device keep their optimizer state there."""
        share = 0.0 if self.device_updates else 1.0
        return Effects(
            averages="blocks", calls="block_hooks", moves="chunk", eager_only=EAGER_ONLY, host_share=share
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run one after the other and share nothing; several ranks: replicas, or `fsdp`."""
        return cannot_chunk(self, program, target, self.chunk_bytes)

    def plan(self, program: Program, target: Target) -> ChunksPlan:
        """The size of a chunk, how many the cache holds, and what stays."""
        budget_bytes, found = target.budget_bytes, None
        if self.device_updates and budget_bytes is not None and can_stay(target):
            found = split(program, target.hardware, budget_bytes, self.chunk_bytes, self.ahead)
        return chunk_plan_of(found or _solved(program, budget_bytes, self.chunk_bytes, self.ahead))

    def rewrite(self, program: Program, plan: ChunksPlan, target: Target) -> Program:
        """Chunks that come and go through a cache, the optimizer on the host but for what stays."""
        return in_chunks(
            program,
            chunk_plan_from(*sizes_in_blocks(program.step), plan, are_rows(program)),
            "lru",
            self.ahead,
        )

    def apply(self, context: Context, plan: ChunksPlan) -> None:
        """Blocks' weights into chunks on the host, hooks that bring them in."""
        apply_chunks(context, self.kind, plan, "lru", self.ahead)

    def explain(self, plan: ChunksPlan) -> tuple[str, ...]:
        """The size of a chunk, how many are on the device, and what stays."""
        return plan.explain()

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, what moves, when, and what goes first."""
        how: dict[str, Any] = {
            "unit": "chunk",
            "chunk_bytes": self.chunk_bytes or "searched for",
            "evict": "lru",
        }
        how |= {"ahead": self.ahead, "device_updates": self.device_updates}
        return {
            "states.offload": {"parameters": "host", "optimizer": "host", "trigger": "end_of_step", **how}
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Ahead of use or not: what comes in ahead hides its copy and takes room."""
        return {"ahead": (1, 0)}


@functools.lru_cache(maxsize=64)
def _solved(program: Program, budget_bytes: int | None, chunk_bytes: int | None, ahead: int) -> ChunkPlan:
    sizes = sizes_in_blocks(program.step)
    capacity = None if budget_bytes is None else max(budget_bytes - max(beside(program)), 0)
    if chunk_bytes is None:
        return fewest_bytes_moved(*sizes, capacity, ahead, are_rows(program))
    chunks = pack(*sizes, chunk_bytes, are_rows(program))
    least = as_few_as_used(chunks, ahead)
    return ChunkPlan(
        chunks,
        least
        if capacity is None
        else (min(max(capacity // chunk_bytes, least[0]), chunks.count),) * len(least),
    )
