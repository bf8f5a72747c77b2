"""What techniques share that keep the blocks' parameters in chunks on the host
(`offload.core.parameter_memory`): what fits, how to apply it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from memtune.errors import ApplyError
from memtune.offload.chunks import ChunkPlan, GradientsInPlace, as_few_as_used, chunk_sizes
from memtune.offload.core import bytes_in_chunks, gathers_of, is_gathered, pack
from memtune.offload.gradients import average_on_device
from memtune.offload.optimizer import HostOptimizer, optimizer_on_host, updated_first
from memtune.offload.parameters import (
    ParameterOffloader,
    bytes_without_chunks,
    in_blocks,
    sizes_in_blocks,
    stream_parameters,
)
from memtune.program import Program, Rule, Step, Units, cached, columns_of, remembered
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.layer_offload import cannot_run_on_ranks, replicas
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes


def cannot_chunk(
    technique: Technique, program: Program, target: Target, chunk_bytes: int | None
) -> Reason | None:
    """Why blocks' parameters cannot come and go in chunks of `chunk_bytes` (None: of any size)."""
    if (reason := cannot_run_on_ranks(technique, program, target, natively=False)) is not None:
        return reason
    largest = max(sizes_in_blocks(program.step)[0])
    if chunk_bytes is not None and chunk_bytes < largest:
        return Reason(
            f"a block has a parameter of {largest} bytes, a chunk {chunk_bytes}",
            f"chunk_bytes: {largest} or more",
        )
    return None


class ChunksPlan(Plan):
    """Chunks of blocks' parameters, and how many are on the device."""

    chunk_bytes: Annotated[int, Field(ge=1)]
    """Bytes of a chunk."""
    slots: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """(moments,) most chunks on the device in each moment of a step."""
    staying: Annotated[int, Field(ge=0)] = 0
    """Parameters of blocks, those used first, that stay on the device with their optimizer state."""
    gradients: Literal["apart", "in place"] = "apart"
    """Gradients are offloaded from tensors of their own, or from where their weights were in the chunks."""

    def explain(self) -> tuple[str, ...]:
        """Return chunk size and slots, in a line."""
        least, most = min(self.slots), max(self.slots)
        kept = f"{self.staying} parameters stay there with their optimizer state, and are updated there"
        count = least if least == most else f"{least} to {most}"
        return (
            f"{count} chunks of {format_bytes(self.chunk_bytes)} on the device at once",
            *([kept] if self.staying else []),
        )


def chunk_plan_of(found: ChunkPlan) -> ChunksPlan:
    """Return `found` without what follows from the parameters."""
    gradients: Literal["apart", "in place"] = "in place" if found.in_place else "apart"
    return ChunksPlan(
        chunk_bytes=found.chunks.chunk_bytes, slots=found.slots, staying=found.staying, gradients=gradients
    )


@functools.lru_cache(maxsize=64)
def beside(program: Program, in_place: bool = False) -> Units:
    """(moments,) most bytes of the device in each moment that are no chunk's: what a warm-up iteration would
    trace.
    """
    chunks = pack(
        *sizes_in_blocks(program.step), chunk_sizes(*sizes_in_blocks(program.step))[0], are_rows(program)
    )
    return bytes_without_chunks(
        in_chunks(program, ChunkPlan(chunks, as_few_as_used(chunks)), "belady").step, in_place
    )


@remembered
def in_chunks(program: Program, how: ChunkPlan, rule: Rule, ahead: int = 0) -> Program:
    """The program with its blocks' parameters in chunks that come and go, and the optimizer on the host but
    for what stays.
    """
    residency = cached(how.chunks.uses(ahead), how.slots, rule)
    step, ops = staying_first(program.step, how.staying, replicas(program))
    step = stream_parameters(
        step, residency, how.chunks, early=False, ranks=replicas(program), in_place=how.in_place
    )
    step = optimizer_on_host(step, stay=ops)
    return program.with_step(in_blocks_of(program.step, step) if how.staying else step)


def staying_first(step: Step, staying: int, ranks: int = 1) -> tuple[Step, int]:
    """`step` with its first `staying` parameters of blocks in none of them and updated before the others, by
    so many ops.

    Gradients of these are averaged among `ranks` that have all weights.
    """
    if not staying:
        return step, 0
    stays = np.zeros(len(step.parameters), bool)
    stays[in_blocks(step)[:staying]] = True
    return updated_first(average_on_device(step, stays, ranks), stays)


def in_blocks_of(before: Step, step: Step) -> Step:
    """`step` with its parameters in the blocks that they were in before."""
    block = columns_of(before.parameters).block
    return replace(step, parameters=replace(columns_of(step.parameters), block=block))


def can_stay(target: Target) -> bool:
    """Whether `target` has a budget, and an optimizer that can update some parameters on the device and
    others on the host.
    """
    return target.budget_bytes is not None and (
        target.optimizer is None or not target.optimizer.not_one_by_one
    )


def are_rows(program: Program) -> bool:
    """Whether parameters of blocks are a rank's rows, gathered when they are used."""
    return gathers_of(program.step) is not None


def chunk_plan_from(n_bytes: Units, block: Units, plan: ChunksPlan, gathered: bool = False) -> ChunkPlan:
    """Return `plan` for these parameters.

    Raises:
        ValueError: It is for other parameters.
    """
    staying = plan.staying
    if staying >= len(n_bytes):
        raise ValueError(f"{staying} of {len(n_bytes)} parameters stay")
    chunks = pack(n_bytes[staying:], block[staying:], plan.chunk_bytes, gathered)
    return ChunkPlan(chunks, plan.slots, staying, plan.gradients == "in place")


def sizes_of(context: Context) -> tuple[Units, Units]:
    """`sizes_in_blocks` of the live model."""
    blocks = enumerate(context.model.get_submodule(name) for name in context.blocks)
    return bytes_in_chunks(context), tuple(index for index, block in blocks for _ in block.parameters())


def of_another(context: Context, kind: str, plan: Plan) -> ApplyError:
    """Return the error that says that `plan` is for another model than the live one."""
    return ApplyError(
        f"{kind} has no plan for this model's {len(context.blocks)} blocks.",
        evidence=f"The plan says {plan.document()}.",
        fix="memtune search writes one; memtune trial makes one for itself",
        code="MT364",
    )


def apply_chunks(context: Context, kind: str, plan: ChunksPlan, rule: Rule, ahead: int = 0) -> None:
    """Move the optimizer to the host, then the blocks' parameters into chunks.

    Raises:
        ApplyError: The plan is none for this model, or ranks share a copy of it.
    """
    try:
        how = chunk_plan_from(*sizes_of(context), plan, is_gathered(context.model))
        residency = cached(how.chunks.uses(ahead), how.slots, rule)
    except ValueError as wrong:
        raise of_another(context, kind, plan) from wrong
    blocks = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
    stays = set([each for block in blocks for each in block][: how.staying])
    members = [[each for each in block if each not in stays] for block in blocks] if stays else None
    if how.in_place and is_gathered(context.model):
        raise of_another(context, kind, plan)  # FSDP2 reduces gradients when their rows may have gone
    optimizer = HostOptimizer(context, "own", stays=stays)
    store: ParameterOffloader
    if how.in_place:
        store = GradientsInPlace(context, residency, optimizer, chunks=how.chunks, members=members)
    else:
        store = ParameterOffloader(
            context, residency, optimizer, chunks=how.chunks, early=False, members=members
        )
    context.checks["offload.states"] = functools.partial(_check, store, how)


def _check(store: ParameterOffloader, how: ChunkPlan) -> dict[str, Any]:
    return store.check() | {
        "chunks": how.chunks.count,
        "chunk_bytes": how.chunks.chunk_bytes,
        "staying": how.staying,
    }
