"""Chunks that come and go by next use, in as much memory as each moment leaves them (PatrickStar, Fang et al.
2021).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.offload.chunks import ChunkPlan, as_few_as_used, least_waste, slots_in
from memtune.offload.core import pack
from memtune.offload.gradients import weights_are_free
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
    with_margin,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class PatrickStar(Technique):
    """Trades copies of chunks up the link for the bytes of all blocks' weights that the budget does not hold
    at the moment.

    The blocks' parameters lie in chunks of one size, in the order in which they are used; the size that
    wastes least is searched for. What else is on the device in each moment of the step (activations, what is
    in no block) is known from the recorded step, where PatrickStar traces a warm-up iteration; the rest of
    the budget holds chunks. A chunk comes in when it is used, and the one whose next use is furthest goes:
    the fewest moves that are possible. In a pass there and back the room at the turn says how many. Without a
    budget only what is used is there. Gradients leave as they land, so clipping by norm is refused, and the
    user's own optimizer works on the host's chunks after backward: the bits of a host optimizer with weights
    in place. What is in no block, as embeddings, stays on the device.

    What the budget leaves beside all chunks of weights, the margin, holds optimizer state: of as many chunks
    as it has room for, those used first, weights and gradients stay on the device too, and the user's own
    optimizer updates them there.

    A gradient takes the place of its weight in the chunk when it lands, since the host has the values, and
    leaves from there: nothing that autograd made waits for the link. Where the fullest moment gets no more
    room so, it is spared the copy. That is the paper's reuse of a chunk. What it saves there, 2 bytes per
    parameter, is a second set of chunks, which is not needed here: gradients leave as they land.

    Distinguishing test: the chunks there in a moment are as many as the budget then leaves room for, not one
    number for the whole step, no rule of eviction moves less (brute force), no chunk size wastes less (brute
    force), and of the chunks that are updated on the device, as many as stay within the budget (brute force),
    nothing crosses the link; gradients leave from the chunks of their weights.
    """

    kind: Literal["patrickstar"] = "patrickstar"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (ChunksPlan,)
    title: ClassVar[str] = "Chunks of weights, evicted by next use"
    source: ClassVar[str] = (
        "Fang et al. 2021, PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Memory"
        " Management, arXiv:2108.05818"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    chunk_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of a chunk; none given: the size that wastes least."""
    gradients: Literal["in_place", "apart"] = "in_place"
    """`in_place`: each takes the place of its weight in the chunk, and leaves from there, where that leaves
    more room in the fullest moment; not under `fsdp`, nor where the recorded step reads a weight after its
    gradient has landed. `apart`: it leaves from where autograd made it.
    """
    device_updates: bool = True
    """Chunks whose optimizer state has room on the device stay and are updated there."""

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
        """The size of a chunk, how many are there in each moment, and what is updated on the device."""
        in_place = self.gradients == "in_place" and _leaves_more_room(program)
        found = _solved(program, target.budget_bytes, self.chunk_bytes, in_place)
        if self.device_updates and target.budget_bytes is not None and can_stay(target):
            found = with_margin(program, found, target.budget_bytes)
        return chunk_plan_of(found)

    def rewrite(self, program: Program, plan: ChunksPlan, target: Target) -> Program:
        """Chunks that come and go, evicted by next use, the optimizer on the host but for what stays."""
        return in_chunks(
            program, chunk_plan_from(*sizes_in_blocks(program.step), plan, are_rows(program)), "belady"
        )

    def apply(self, context: Context, plan: ChunksPlan) -> None:
        """Blocks' weights into chunks on the host, hooks that bring them in."""
        apply_chunks(context, self.kind, plan, "belady")

    def explain(self, plan: ChunksPlan) -> tuple[str, ...]:
        """The size of a chunk, how many are on the device, and what stays."""
        return plan.explain()

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, what moves, and what goes first."""
        how: dict[str, Any] = {
            "unit": "chunk",
            "chunk_bytes": self.chunk_bytes or "least waste",
            "evict": "belady",
        }
        how |= {"slots": "by moment", "gradients": self.gradients, "device_updates": self.device_updates}
        return {
            "states.offload": {"parameters": "host", "optimizer": "host", "trigger": "end_of_step", **how}
        }


def _leaves_more_room(program: Program) -> bool:
    """Whether gradients can be in place, and the fullest moment, whose room says what moves, then has more: a
    copy each.
    """
    return weights_are_free(program.step) and max(beside(program, in_place=True)) < max(beside(program))


@functools.lru_cache(maxsize=64)
def _solved(program: Program, budget_bytes: int | None, chunk_bytes: int | None, in_place: bool) -> ChunkPlan:
    sizes = sizes_in_blocks(program.step)
    room = (
        None
        if budget_bytes is None
        else tuple(max(budget_bytes - other, 0) for other in beside(program, in_place))
    )
    if chunk_bytes is None:
        return replace(least_waste(*sizes, room, are_rows(program)), in_place=in_place)
    chunks = pack(*sizes, chunk_bytes, are_rows(program))
    return ChunkPlan(chunks, (room and slots_in(chunks, room)) or as_few_as_used(chunks), in_place=in_place)
