"""Plan, pass, apply of techniques with the blocks' parameters in pages (`offload.chunks.paged_offloader`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from memtune.hardware import Hardware
from memtune.offload.chunks import LockFreeOptimizer, PagedUnits, PagePlan, count_pages, in_frames, schedule
from memtune.offload.core import ALIGNMENT, Pages, is_gathered, move_to_device, paged, timeline
from memtune.offload.optimizer import HostOptimizer, cannot_part, optimizer_on_host
from memtune.offload.parameters import (
    BlockGradients,
    OffloadedBlocks,
    ParameterOffloader,
    in_blocks,
    replicas,
    sizes_in_blocks,
    state_bytes,
    stream_parameters,
)
from memtune.offload.ssd_states import (
    LockFreeOnSsd,
    OffloadedParameters,
    SsdOptimizer,
    optimizer_on_ssd,
    swept_from_ssd,
)
from memtune.program import Program, Step, Units, columns_of, memoized, one_by_one
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.chunk_technique import (
    are_sharded,
    in_blocks_of,
    non_chunk_bytes,
    sizes_of,
    update_resident_first,
    wrong_model_error,
)
from memtune.search_spaces.offload.states._common.layer_offload import compute_s_of_moments
from memtune.technique import Plan
from memtune.units import MIB


class PagesPlan(Plan):
    """Pages of blocks' parameters, and the frames of the device that hold them."""

    page_bytes: Annotated[int, Field(ge=1)]
    """Bytes of a page."""
    frames: Annotated[int, Field(ge=1)]
    """Pages on the device at once."""
    prefetch: tuple[Annotated[int, Field(ge=0)], ...]
    """(moments,) pages that are prefetched while each moment computes."""
    cached: Annotated[int, Field(ge=0)] = 0
    """Parameters of blocks, those used first, that are resident with their optimizer state."""


@dataclass(frozen=True)
class OnSsd:
    """Settings of an optimizer whose state is on SSD."""

    prefetch: int
    """Parameters whose state is prefetched from SSD."""
    keeps_steps: bool = False
    """Each complete step is kept: every piece has two slots, written alternately."""
    overlaps_steps: bool = False
    """Updates overlap with the steps that follow."""


@memoized
def in_pages(program: Program, page_plan: PagePlan, on_ssd: OnSsd | None = None) -> Program:
    """Return the program with blocks' parameters in pages, and the optimizer on the host, or on SSD."""
    step, ops = update_resident_first(program.step, page_plan.cached)
    if on_ssd is None:
        step = one_by_one(step, ops)
    step = stream_parameters(
        step,
        timeline(page_plan.pages, page_plan.prefetch),
        page_plan.pages,
        early=False,
        ranks=replicas(program),
    )
    if on_ssd is None:
        step = optimizer_on_host(step, n_resident_ops=ops)
    elif on_ssd.overlaps_steps:
        step = swept_from_ssd(step, on_ssd.prefetch, OffloadedParameters.from_step(step))
    else:
        step = optimizer_on_ssd(
            step, on_ssd.prefetch, 1 + on_ssd.keeps_steps, OffloadedParameters.from_step(step)
        )
    return program.with_step(in_blocks_of(program.step, step))


def page_bytes_for(step: Step) -> int:
    """Return the paper's 4 MiB, or a smaller power of two, an eighth of the largest block."""
    n_bytes, block = sizes_in_blocks(step)
    largest = int(np.bincount(block, n_bytes).max()) if block else 0
    return int(max(min(4 * MIB, 1 << max(largest // 8, 1).bit_length() - 1), ALIGNMENT))


@functools.lru_cache(maxsize=64)
def solve_pages(
    program: Program,
    hardware: Hardware,
    budget_bytes: int | None,
    page_bytes: int,
    *,
    scheduled: bool,
    cache: bool,
) -> PagePlan:
    """Return frames for the room within the budget, cached parameters for the rest, and a schedule."""
    sizes, rows = sizes_in_blocks(program.step), are_sharded(program)
    room = None if budget_bytes is None else max(budget_bytes - max(non_chunk_bytes(program)), 0)
    load_s = page_bytes / hardware.host_to_device_bytes_per_s

    def of(pages: Pages, cached: int = 0) -> PagePlan:
        if not scheduled:
            return PagePlan(pages, (0,) * len(pages.uses()), cached)
        return PagePlan(
            pages, schedule(pages, compute_s_of_moments(program.step, hardware).tolist(), load_s), cached
        )

    found = of(in_frames(*sizes, page_bytes, room, rows))
    # Replicas average gradients on their way to the host; those of cached parameters are not offloaded.
    if not cache or replicas(program) > 1 or budget_bytes is None:
        return found
    if found.pages.frames < count_pages(*sizes, page_bytes) or cannot_part(program.step):
        return found
    cached = _most_cached(program, budget_bytes - in_pages(program, found).step.peak_bytes())
    while cached > 0:
        n_bytes, block = sizes[0][cached:], sizes[1][cached:]
        more = of(paged(n_bytes, block, page_bytes, count_pages(n_bytes, block, page_bytes), rows), cached)
        if in_pages(program, more).step.peak_bytes() <= budget_bytes:
            return more
        cached //= 2
    return found


def _most_cached(program: Program, spare_bytes: int) -> int:
    """Return how many parameters of blocks, the first used, have gradients and state within the bytes."""
    # Their gradients are ready last, when most activations are freed, and compute waits for their pages most.
    step, columns = program.step, columns_of(program.step.parameters)
    n_bytes = state_bytes(step) + np.where(columns.gradient >= 0, step.storages.bytes[columns.gradient], 0)
    taken = np.cumsum(n_bytes[in_blocks(step)])
    return min(int(np.searchsorted(taken, spare_bytes, side="right")), len(taken) - 1)


def page_plan_of(found: PagePlan) -> PagesPlan:
    """Return `found` without the parts that follow from the parameters."""
    pages = found.pages
    return PagesPlan(
        page_bytes=pages.page_bytes, frames=pages.frames, prefetch=found.prefetch, cached=found.cached
    )


def page_plan_from(sizes: tuple[Units, Units], plan: PagesPlan, gathered: bool) -> PagePlan:
    """Return the pages of `plan` for parameters of these sizes, or `gathered` rows of them.

    Raises:
        ValueError: The plan is for other parameters.
    """
    cached = plan.cached
    if cached >= len(sizes[0]):
        raise ValueError(f"{cached} of {len(sizes[0])} parameters are cached")
    return PagePlan(
        paged(sizes[0][cached:], sizes[1][cached:], plan.page_bytes, plan.frames, gathered),
        plan.prefetch,
        cached,
    )


def apply_pages(
    context: Context, kind: str, plan: PagesPlan, max_staleness: int | None, on_ssd: OnSsd | None = None
) -> None:
    """Move the optimizer to the host, then the blocks' parameters into pages.

    Args:
        context: Context with model and optimizer.
        kind: Kind of the technique, for messages.
        plan: Plan for this model.
        max_staleness: Staleness bound of lock-free updates; None: the user's own optimizer updates at the end
            of the step.
        on_ssd: As in `in_pages`.

    Raises:
        ApplyError: The plan is for another model.
    """
    gathered = is_gathered(context.model)
    try:
        page_plan = page_plan_from(sizes_of(context), plan, gathered)
        residency = timeline(page_plan.pages, page_plan.prefetch)
        if page_plan.cached and context.placement.world_size > 1 and not gathered:
            raise ValueError("no component averages gradients of cached parameters")
    except ValueError as wrong:
        raise wrong_model_error(context, kind, plan) from wrong
    every = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
    resident = [each for block in every for each in block][: page_plan.cached]
    move_to_device(context, resident)
    optimizer: HostOptimizer | LockFreeOptimizer | SsdOptimizer | LockFreeOnSsd
    if max_staleness is not None:
        optimizer = (
            LockFreeOptimizer(context, max_staleness)
            if on_ssd is None
            else LockFreeOnSsd(context, read_ahead=on_ssd.prefetch, max_staleness=max_staleness)
        )
    elif on_ssd is not None:
        optimizer = SsdOptimizer(context, master=False, read_ahead=on_ssd.prefetch, keep=on_ssd.keeps_steps)
    else:
        optimizer = HostOptimizer(context, resident=resident)
    members = [[each for each in block if each not in set(resident)] for block in every]
    host = optimizer.on_host if isinstance(optimizer, LockFreeOptimizer) else optimizer
    blocks = OffloadedBlocks(context, host if isinstance(host, HostOptimizer) else None, members)
    units, gradients = PagedUnits(context, blocks, page_plan.pages), BlockGradients(context, blocks)
    store = ParameterOffloader(context, residency, blocks, units, gradients, None, optimizer.check)
    if isinstance(optimizer, LockFreeOptimizer | LockFreeOnSsd):
        optimizer.publish_to(units)
    elif isinstance(optimizer, SsdOptimizer):
        optimizer.write_weights_to(blocks.hosts)
    context.checks["offload.states"] = functools.partial(_check, store, page_plan)


def _check(store: ParameterOffloader, page_plan: PagePlan) -> dict[str, Any]:
    pages = page_plan.pages
    facts = {
        "pages": pages.count,
        "page_bytes": pages.page_bytes,
        "frames": pages.frames,
        "cached": page_plan.cached,
    }
    return store.check() | facts
