"""Chunks evicted by next use, in the memory that each moment of a step leaves (PatrickStar)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar, Literal

from memtune.offload.chunks import ChunkPlan, as_few_as_used, least_waste, slots_in
from memtune.offload.core import pack
from memtune.offload.gradients import weights_are_free
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
from memtune.search_spaces.offload.states._common.resident_chunks import with_resident_chunks
from memtune.technique import Target


class PatrickStar(InChunks):
    """Trades H2D copies of chunks for the bytes of all blocks' weights that the budget cannot hold at the
    moment.

    The blocks' parameters lie in chunks of one size, in the order of their use; the size that wastes least is
    searched. The other bytes on the device in each moment of the step (activations, parameters in no block)
    are known from the recorded step, where PatrickStar traces a warm-up iteration; the rest of the budget
    holds chunks. A chunk is loaded at its use, and the one with the furthest next use is evicted, which gives
    the fewest copies. In a pass forward and back, the room between forward and backward decides their number.
    Without a budget only chunks in use are on the device. Gradients are offloaded when they are ready, and
    the user's own optimizer updates the host's chunks after backward, with
    the bits of a host optimizer. Parameters in no block, such as embeddings, are resident.

    If the budget exceeds all chunks of weights, the rest, the margin, holds optimizer state: weights and
    gradients of as many chunks as fit, those used first, are resident too, and the user's own optimizer
    updates them on the device.

    A ready gradient overwrites its weight in the chunk, since the host has the values, and is offloaded from
    there, so no gradient memory waits for the link. This is the paper's reuse of a chunk; it is used only if
    it leaves more room at the peak. The paper saves 2 bytes per parameter by it, a second set of chunks,
    which is not needed here.
    """

    kind: Literal["patrickstar"] = "patrickstar"
    title: ClassVar[str] = "Chunks of weights, evicted by next use"
    clause: ClassVar[str] = (
        "keeps chunks of the blocks' weights in host memory when the device is full, and updates there"
    )
    source: ClassVar[str] = (
        "Fang et al. 2021, PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Memory"
        " Management, arXiv:2108.05818"
    )
    paper: ClassVar[str] = "PatrickStar"

    rule: ClassVar[Rule] = "belady"

    gradients: Literal["in_place", "separate"] = "in_place"
    """`in_place`: a gradient overwrites its weight in the chunk and is offloaded from there, if that leaves
    more room at the peak; not under `fsdp`, nor if the recorded step reads a weight after its gradient is
    ready. `separate`: it is offloaded from the tensor that autograd made.
    """

    def plan(self, program: Program, target: Target) -> ChunksPlan:
        in_place = self.gradients == "in_place" and _leaves_more_room(program)
        found = _solved(program, target.budget_bytes, self.chunk_bytes, in_place)
        if self.device_updates and target.budget_bytes is not None and can_split_optimizer(target):
            found = with_resident_chunks(program, found, target.budget_bytes)
        return chunk_plan_of(found)

    def record(self, target: Target) -> dict[str, Any]:
        return self._record("least waste", slots="by moment", gradients=self.gradients)


def _leaves_more_room(program: Program) -> bool:
    """Return whether gradients can overwrite weights and that lowers the peak outside of chunks."""
    return weights_are_free(program.step) and max(non_chunk_bytes(program, in_place=True)) < max(
        non_chunk_bytes(program)
    )


@functools.lru_cache(maxsize=64)
def _solved(program: Program, budget_bytes: int | None, chunk_bytes: int | None, in_place: bool) -> ChunkPlan:
    sizes = sizes_in_blocks(program.step)
    room = (
        None
        if budget_bytes is None
        else tuple(max(budget_bytes - other, 0) for other in non_chunk_bytes(program, in_place))
    )
    if chunk_bytes is None:
        return replace(least_waste(*sizes, room, are_sharded(program)), in_place=in_place)
    chunks = pack(*sizes, chunk_bytes, are_sharded(program))
    return ChunkPlan(chunks, (room and slots_in(chunks, room)) or as_few_as_used(chunks), in_place=in_place)
