"""What techniques share that keep the blocks' parameters in chunks on the host (`runtime.chunks`): what fits, how to apply it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from memtune.chunks import pack
from memtune.errors import ApplyError
from memtune.parameters import columns_of
from memtune.passes.block_landings import averaged_there
from memtune.passes.gathered_rows import gathers_of
from memtune.passes.host_optimizer import optimizer_on_host
from memtune.passes.pieces import in_blocks
from memtune.passes.stays import updated_first
from memtune.passes.stream import bytes_beside_chunks, sizes_in_blocks, stream_parameters
from memtune.planners.chunks import ChunkPlan, as_few_as_used, chunk_sizes
from memtune.program import Program, Step
from memtune.remembered import remembered
from memtune.residency import Rule, Units, cached
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import bytes_in_chunks, is_gathered
from memtune.runtime.gradients_in_place import GradientsInPlace
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.store import ParameterStore
from memtune.search_spaces.offload.states._layers import cannot_run_on_ranks, replicas, require_replicas
from memtune.technique import Plan, Reason, Target
from memtune.units import format_bytes


def cannot_chunk(program: Program, target: Target, chunk_bytes: int | None) -> Reason | None:
    """Why blocks' parameters cannot come and go in chunks of `chunk_bytes` (None: of any size)."""
    if (reason := cannot_run_on_ranks(program, target, natively=False)) is not None:
        return reason
    largest = max(sizes_in_blocks(program.step)[0])
    if chunk_bytes is not None and chunk_bytes < largest:
        return Reason(f"a block has a parameter of {largest} bytes, a chunk {chunk_bytes}", f"chunk_bytes: {largest} or more")
    return None


def plan_of(found: ChunkPlan) -> Plan:
    """As plain data."""
    staying = {"staying": found.staying} if found.staying else {}
    in_place = {"gradients": "in place"} if found.in_place else {}
    return Plan(decisions={"chunk_bytes": found.chunks.chunk_bytes, "slots": list(found.slots), **staying, **in_place})


def explain(plan: Plan) -> tuple[str, ...]:
    """Chunk size and slots, in a line."""
    chunk_bytes, slots = plan.decisions.get("chunk_bytes"), plan.decisions.get("slots")
    if not isinstance(chunk_bytes, int) or not isinstance(slots, list) or not all(isinstance(n, int) for n in slots) or not slots:
        return ()
    least, most = min(slots), max(slots)
    staying = plan.decisions.get("staying", 0)
    stay = (f"{staying} parameters stay there with their optimizer state, and are updated there",) if staying else ()
    count = least if least == most else f"{least} to {most}"
    return (f"{count} chunks of {format_bytes(chunk_bytes)} on the device at once", *stay)


@functools.lru_cache(maxsize=64)
def beside(program: Program, in_place: bool = False) -> Units:
    """(moments,) most bytes of the device in each moment that are no chunk's: what a warm-up iteration would trace."""
    chunks = pack(*sizes_in_blocks(program.step), chunk_sizes(*sizes_in_blocks(program.step))[0], are_rows(program))
    return bytes_beside_chunks(in_chunks(program, ChunkPlan(chunks, as_few_as_used(chunks)), "belady").step, in_place)


@remembered
def in_chunks(program: Program, how: ChunkPlan, rule: Rule, ahead: int = 0) -> Program:
    """The program with its blocks' parameters in chunks that come and go, and the optimizer on the host but for what stays."""
    residency = cached(how.chunks.uses(ahead), how.slots, rule)
    step, ops = staying_first(program.step, how.staying, replicas(program))
    step = stream_parameters(step, residency, how.chunks, early=False, ranks=replicas(program), in_place=how.in_place)
    step = optimizer_on_host(step, stay=ops)
    return program.with_step(in_blocks_of(program.step, step) if how.staying else step)


def staying_first(step: Step, staying: int, ranks: int = 1) -> tuple[Step, int]:
    """`step` with its first `staying` parameters of blocks in none of them and updated before the others, by so many ops.

    Gradients of these are averaged among `ranks` that have all weights.
    """
    if not staying:
        return step, 0
    stays = np.zeros(len(step.parameters), bool)
    stays[in_blocks(step)[:staying]] = True
    return updated_first(averaged_there(step, stays, ranks), stays)


def in_blocks_of(before: Step, step: Step) -> Step:
    """`step` with its parameters in the blocks that they were in before."""
    block = columns_of(before.parameters).block
    return replace(step, parameters=replace(columns_of(step.parameters), block=block))


def can_stay(target: Target) -> bool:
    """Whether `target` has a budget, and an optimizer that can update some parameters on the device and others on the host."""
    return target.budget_bytes is not None and (target.optimizer is None or not target.optimizer.not_one_by_one)


def are_rows(program: Program) -> bool:
    """Whether parameters of blocks are a rank's rows, gathered when they are used."""
    return gathers_of(program.step) is not None


def planned(n_bytes: Units, block: Units, plan: Plan, gathered: bool = False) -> ChunkPlan:
    """What `plan_of` wrote down, for these parameters.

    Raises:
        KeyError, TypeError, ValueError: It is damaged, or for other parameters.
    """
    staying = int(plan.decisions.get("staying", 0))
    if not 0 <= staying < len(n_bytes):
        raise ValueError(f"{staying} of {len(n_bytes)} parameters stay")
    chunks = pack(n_bytes[staying:], block[staying:], int(plan.decisions["chunk_bytes"]), gathered)
    in_place = plan.decisions.get("gradients", "apart") == "in place"
    return ChunkPlan(chunks, tuple(int(n) for n in plan.decisions["slots"]), staying, in_place)


def sizes_of(context: Context) -> tuple[Units, Units]:
    """`sizes_in_blocks` of the live model."""
    blocks = enumerate(context.model.get_submodule(name) for name in context.blocks)
    return bytes_in_chunks(context), tuple(index for index, block in blocks for _ in block.parameters())


def no_plan(context: Context, kind: str, plan: Plan) -> ApplyError:
    """What to raise where `plan` is none for the live model."""
    return ApplyError(
        f"{kind} has no plan for this model's {len(context.blocks)} blocks.",
        evidence=f"The plan says {plan.decisions}." if plan.decisions else "The config holds no plan.",
        fix="memtune search writes one; memtune trial makes one for itself", code="MT364",
    )  # fmt: skip


def apply_chunks(context: Context, kind: str, plan: Plan, rule: Rule, ahead: int = 0) -> None:
    """Move the optimizer to the host, then the blocks' parameters into chunks.

    Raises:
        ApplyError: The plan is none for this model, or ranks share a copy of it.
    """
    require_replicas(context, kind)
    try:
        how = planned(*sizes_of(context), plan, is_gathered(context.model))
        residency = cached(how.chunks.uses(ahead), how.slots, rule)
    except (KeyError, TypeError, ValueError) as wrong:
        raise no_plan(context, kind, plan) from wrong
    blocks = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
    stays = set([each for block in blocks for each in block][: how.staying])
    members = [[each for each in block if each not in stays] for block in blocks] if stays else None
    if how.in_place and is_gathered(context.model):
        raise no_plan(context, kind, plan)  # FSDP2 reduces gradients when their rows may have gone
    optimizer = HostOptimizer(context, "own", stays=stays)
    store: ParameterStore
    if how.in_place:
        store = GradientsInPlace(context, residency, optimizer, chunks=how.chunks, members=members)
    else:
        store = ParameterStore(context, residency, optimizer, chunks=how.chunks, early=False, members=members)
    context.checks["offload.states"] = functools.partial(_check, store, how)


def _check(store: ParameterStore, how: ChunkPlan) -> dict[str, Any]:
    return store.check() | {"chunks": how.chunks.count, "chunk_bytes": how.chunks.chunk_bytes, "staying": how.staying}
