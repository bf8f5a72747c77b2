"""Rules, pass and apply of techniques that keep the blocks' parameters in chunks on the host.

The layout of chunks is in `offload.core.offloaded_parameter`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.offload.chunks import ChunkPlan, GradientPlaces, as_few_as_used, chunk_sizes
from memtune.offload.core import bytes_in_chunks, is_gathered, move_to_device, pack
from memtune.offload.gradients import average_on_device
from memtune.offload.optimizer import HostOptimizer, optimizer_on_host, updated_first
from memtune.offload.parameters import (
    BlockGradients,
    BlockUnits,
    OffloadedBlocks,
    ParameterOffloader,
    bytes_without_chunks,
    in_blocks,
    replicas,
    sizes_in_blocks,
    stream_parameters,
)
from memtune.program import (
    Program,
    Rule,
    Step,
    Units,
    cache_residency,
    columns_of,
    gathers_of,
    memoized,
    one_by_one,
)
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.layer_rules import (
    EAGER_ONLY,
    cannot_run_on_ranks,
    other_gathers,
)
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique
from memtune.units import format_bytes


class ChunksPlan(Plan):
    """Chunk size and slots of blocks' parameters, and the number of chunks on the device."""

    chunk_bytes: Annotated[int, Field(ge=1)]
    """Bytes of a chunk."""
    slots: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """(moments,) most chunks on the device in each moment of a step."""
    resident_parameters: Annotated[int, Field(ge=0)] = 0
    """Parameters of blocks, those used first, that are resident with their optimizer state."""
    gradients: Literal["separate", "in_place"] = "separate"
    """Gradients are offloaded from tensors of their own, or from the chunk memory of their weights."""

    def explain(self) -> tuple[str, ...]:
        """Return chunk size, slots and resident parameters, in one or two lines."""
        least, most = min(self.slots), max(self.slots)
        resident = (
            f"{self.resident_parameters} parameters are resident with their optimizer state, and updated on"
            " the device"
        )
        count = least if least == most else f"{least} to {most}"
        return (
            f"{count} chunks of {format_bytes(self.chunk_bytes)} on the device at once",
            *([resident] if self.resident_parameters else []),
        )


class InChunks(Technique):
    """Keeps the blocks' parameters in chunks on the host, where the user's own optimizer updates them."""

    plan_types: ClassVar[tuple[type[Plan], ...]] = (ChunksPlan,)
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    rule: ClassVar[Rule]
    """Rule of eviction."""

    chunk_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes of a chunk. Default: searched for."""
    device_updates: bool = True
    """Chunks for which the plan finds room are resident with their optimizer state and updated there."""

    @property
    def prefetched_blocks(self) -> int:
        """Blocks by which chunks are prefetched."""
        return 0

    @property
    def effects(self) -> Effects:
        """Those of blocks; chunks that may be resident keep their optimizer state on the device."""
        return Effects(
            averages="blocks",
            calls="block_hooks",
            moves="chunk",
            parameters_on="host",
            eager_only=EAGER_ONLY,
            host_share=0.0 if self.device_updates else 1.0,
        )

    def refuses(self, facts: Facts) -> Reason | None:
        return other_gathers(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require blocks in a row that share no parameter; on several ranks replicas, or `fsdp`."""
        if (reason := cannot_run_on_ranks(self, program, target, natively=False)) is not None:
            return reason
        largest = max(sizes_in_blocks(program.step)[0])
        if self.chunk_bytes is not None and self.chunk_bytes < largest:
            return Reason(
                f"a block has a parameter of {largest} bytes, a chunk {self.chunk_bytes}",
                f"chunk_bytes: {largest} or more",
            )
        return None

    def rewrite(self, program: Program, plan: ChunksPlan, target: Target) -> Program:
        """Load and evict chunks; the optimizer is on the host except for resident chunks."""
        chunk_plan = chunk_plan_from(*sizes_in_blocks(program.step), plan, are_sharded(program))
        return in_chunks(program, chunk_plan, self.rule, self.prefetched_blocks)

    def apply(self, context: Context, plan: ChunksPlan) -> None:
        """Move blocks' weights into chunks on the host and add hooks that load them."""
        apply_chunks(context, self.kind, plan, self.rule, self.prefetched_blocks)

    def explain(self, plan: ChunksPlan) -> tuple[str, ...]:
        return plan.explain()

    def _record(self, searched: str, **knobs: Any) -> dict[str, Any]:
        """Return the settings; `searched`: the aim of the search for a chunk size."""
        knobs = {"unit": "chunk", "chunk_bytes": self.chunk_bytes or searched, "evict": self.rule} | knobs
        knobs["device_updates"] = self.device_updates
        return {
            "states.offload": {"parameters": "host", "optimizer": "host", "trigger": "end_of_step", **knobs}
        }


def chunk_plan_of(found: ChunkPlan) -> ChunksPlan:
    """Return `found` without the parts that follow from the parameters."""
    gradients: Literal["separate", "in_place"] = "in_place" if found.in_place else "separate"
    return ChunksPlan(
        chunk_bytes=found.chunks.chunk_bytes,
        slots=found.slots,
        resident_parameters=found.resident_parameters,
        gradients=gradients,
    )


@functools.lru_cache(maxsize=64)
def non_chunk_bytes(program: Program, in_place: bool = False) -> Units:
    """Return (moments,) most device bytes outside the chunks, as a warm-up iteration measures them."""
    chunks = pack(
        *sizes_in_blocks(program.step), chunk_sizes(*sizes_in_blocks(program.step))[0], are_sharded(program)
    )
    return bytes_without_chunks(
        in_chunks(program, ChunkPlan(chunks, as_few_as_used(chunks)), "belady").step, in_place
    )


@memoized
def in_chunks(program: Program, chunk_plan: ChunkPlan, rule: Rule, prefetch: int = 0) -> Program:
    """Return the program with blocks' parameters in chunks, and the optimizer on the host."""
    residency = cache_residency(chunk_plan.chunks.uses(prefetch), chunk_plan.slots, rule)
    # Resident parameters are taken out of their blocks, so that only the others are streamed.
    step, ops = update_resident_first(program.step, chunk_plan.resident_parameters, replicas(program))
    # Before parameters are in chunks, which several have in common.
    step = one_by_one(step, ops)
    step = stream_parameters(
        step, residency, chunk_plan.chunks, early=False, ranks=replicas(program), in_place=chunk_plan.in_place
    )
    step = optimizer_on_host(step, n_resident_ops=ops)
    # Later passes need each parameter in its block again.
    return program.with_step(in_blocks_of(program.step, step) if chunk_plan.resident_parameters else step)


def update_resident_first(step: Step, count: int, ranks: int = 1) -> tuple[Step, int]:
    """Return `step` with its first `count` parameters of blocks updated first, and the ops of that."""
    # They count as outside of blocks. Their gradients are averaged among `ranks` that have all weights.
    if not count:
        return step, 0
    resident = np.zeros(len(step.parameters), bool)
    resident[in_blocks(step)[:count]] = True
    return updated_first(average_on_device(step, resident, ranks), resident)


def in_blocks_of(before: Step, step: Step) -> Step:
    """Return `step` with its parameters in the blocks that they had in `before`."""
    block = columns_of(before.parameters).block
    return replace(step, parameters=replace(columns_of(step.parameters), block=block))


def can_split_optimizer(target: Target) -> bool:
    """Return True with a budget and an optimizer that can update single parameters on device or host."""
    return target.budget_bytes is not None and (
        target.optimizer is None or not target.optimizer.not_one_by_one
    )


def are_sharded(program: Program) -> bool:
    """Return whether parameters of blocks are a rank's rows, which are all-gathered before use."""
    return gathers_of(program.step) is not None


def chunk_plan_from(n_bytes: Units, block: Units, plan: ChunksPlan, gathered: bool = False) -> ChunkPlan:
    """Return the chunks of `plan` for these parameters.

    Raises:
        ValueError: The plan is for other parameters.
    """
    resident = plan.resident_parameters
    if resident >= len(n_bytes):
        raise ValueError(f"{resident} of {len(n_bytes)} parameters are resident")
    chunks = pack(n_bytes[resident:], block[resident:], plan.chunk_bytes, gathered)
    return ChunkPlan(chunks, plan.slots, resident, plan.gradients == "in_place")


def sizes_of(context: Context) -> tuple[Units, Units]:
    """Return `sizes_in_blocks` of the live model."""
    blocks = enumerate(context.model.get_submodule(name) for name in context.blocks)
    return bytes_in_chunks(context), tuple(index for index, block in blocks for _ in block.parameters())


def wrong_model_error(context: Context, kind: str, plan: Plan) -> ApplyError:
    """Return the error for a plan that was made for another model."""
    return refusals.plan_of_other_model(
        f"offload.states: {{kind: {kind}}}",
        f"It is {plan.document()}; the model has {len(context.blocks)} blocks.",
    )


def apply_chunks(context: Context, kind: str, plan: ChunksPlan, rule: Rule, prefetch: int = 0) -> None:
    """Move the optimizer to the host, then the blocks' parameters into chunks.

    Raises:
        ApplyError: The plan is for another model, or FSDP2 shards parameters whose gradients are in place.
    """
    try:
        chunk_plan = chunk_plan_from(*sizes_of(context), plan, is_gathered(context.model))
        residency = cache_residency(chunk_plan.chunks.uses(prefetch), chunk_plan.slots, rule)
    except ValueError as wrong:
        raise wrong_model_error(context, kind, plan) from wrong
    every = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
    resident = set([each for block in every for each in block][: chunk_plan.resident_parameters])
    members = [[each for each in block if each not in resident] for block in every] if resident else None
    if chunk_plan.in_place and is_gathered(context.model):
        # FSDP2 reduces gradients at a time when the chunk of their rows may be evicted.
        raise wrong_model_error(context, kind, plan)
    move_to_device(context, resident)
    optimizer = HostOptimizer(context, "user", resident=resident)
    blocks = OffloadedBlocks(context, optimizer, members)
    units = BlockUnits(context, blocks, chunk_plan.chunks)
    gradients = BlockGradients(context, blocks)
    places = GradientPlaces(blocks, units, gradients) if chunk_plan.in_place else None
    store = ParameterOffloader(context, residency, blocks, units, gradients, None, optimizer.check)
    context.checks["offload.states"] = functools.partial(_check, store, chunk_plan, places)


def _check(store: ParameterOffloader, chunk_plan: ChunkPlan, places: GradientPlaces | None) -> dict[str, Any]:
    facts = {
        "chunks": chunk_plan.chunks.count,
        "chunk_bytes": chunk_plan.chunks.chunk_bytes,
        "resident_parameters": chunk_plan.resident_parameters,
    }
    return store.check() | facts | ({} if places is None else {"placed_bytes": places.placed_bytes})
