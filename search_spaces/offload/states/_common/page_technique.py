"""How the blocks' parameters are kept in pages (`offload.chunks.paged_offloader`): what is planned, rewritten
and applied.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from memtune.hardware import Hardware
from memtune.offload.chunks import (
    LockFreeOptimizer,
    PagedOffloader,
    PagePlan,
    count_pages,
    in_frames,
    schedule,
)
from memtune.offload.core import ALIGNMENT, Pages, is_gathered, paged, timeline
from memtune.offload.optimizer import HostOptimizer, cannot_part, optimizer_on_host
from memtune.offload.parameters import in_blocks, sizes_in_blocks, state_bytes, stream_parameters
from memtune.offload.ssd_states import (
    AtTheEnd,
    Away,
    LockFreeOnSsd,
    SsdOptimizer,
    optimizer_on_ssd,
    swept_from_ssd,
)
from memtune.program import Program, Step, Units, columns_of, remembered
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.chunk_technique import (
    are_rows,
    beside,
    in_blocks_of,
    of_another,
    sizes_of,
    staying_first,
)
from memtune.search_spaces.offload.states._common.layer_offload import compute_s_of_moments, replicas
from memtune.technique import Plan
from memtune.units import MIB


class PagesPlan(Plan):
    """Pages of blocks' parameters, and the frames of the device that they come to."""

    page_bytes: Annotated[int, Field(ge=1)]
    """Bytes of a page."""
    frames: Annotated[int, Field(ge=1)]
    """Pages on the device at once."""
    ahead: tuple[Annotated[int, Field(ge=0)], ...]
    """(moments,) pages that are prefetched while each moment computes."""
    cached: Annotated[int, Field(ge=0)] = 0
    """Parameters of blocks, those used first, that stay on the device with their optimizer state."""


@dataclass(frozen=True)
class OnSsd:
    """Where the optimizer is, if not on the host."""

    ahead: int
    """Parameters whose state is read ahead."""
    keeps: bool = False
    """Each complete step is kept: every piece has two places, which take turns."""
    late: bool = False
    """Updates go on beside the steps that follow."""


@remembered
def in_pages(program: Program, how: PagePlan, on_ssd: OnSsd | None = None) -> Program:
    """The program with its blocks' parameters in pages that come and go, and its optimizer on the host but
    for what is cached.

    Args:
        program: Any.
        how: Pages, frames, what is cached.
        on_ssd: How the optimizer is on SSD; None: it is on the host.
    """
    step, ops = staying_first(program.step, how.cached)
    step = stream_parameters(
        step, timeline(how.pages, how.ahead), how.pages, early=False, ranks=replicas(program)
    )
    if on_ssd is None:
        step = optimizer_on_host(step, stay=ops)
    elif on_ssd.late:
        step = swept_from_ssd(step, on_ssd.ahead, Away.of(step))
    else:
        step = optimizer_on_ssd(step, on_ssd.ahead, 1 + on_ssd.keeps, Away.of(step))
    return program.with_step(in_blocks_of(program.step, step))


def page_bytes_for(step: Step) -> int:
    """The paper's 4 MiB, or a power of two of which the largest block has eight: one page is then no large
    part of it.
    """
    n_bytes, block = sizes_in_blocks(step)
    largest = int(np.bincount(block, n_bytes).max()) if block else 0
    return int(max(min(4 * MIB, 1 << max(largest // 8, 1).bit_length() - 1), ALIGNMENT))


@functools.lru_cache(maxsize=64)
def solved(
    program: Program,
    hardware: Hardware,
    budget_bytes: int | None,
    page_bytes: int,
    *,
    scheduled: bool,
    cache: bool,
) -> PagePlan:
    """Frames in the room that the budget leaves, what is cached in the rest of it, and which page comes in
    when.
    """
    sizes, rows = sizes_in_blocks(program.step), are_rows(program)
    room = None if budget_bytes is None else max(budget_bytes - max(beside(program)), 0)
    load_s = page_bytes / hardware.host_to_device_bytes_per_s

    def of(pages: Pages, cached: int = 0) -> PagePlan:
        if not scheduled:
            return PagePlan(pages, (0,) * len(pages.uses()), cached)
        return PagePlan(
            pages, schedule(pages, compute_s_of_moments(program.step, hardware).tolist(), load_s), cached
        )

    found = of(in_frames(*sizes, page_bytes, room, rows))
    if not cache or replicas(program) > 1 or budget_bytes is None:  # nobody averages gradients of what stays
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
    """How many of the blocks' parameters have gradient and optimizer state of `spare_bytes` together, those
    that are used first.

    Their gradients land last, when most activations are gone, and their pages are those that are waited for.
    """
    step, columns = program.step, columns_of(program.step.parameters)
    n_bytes = state_bytes(step) + np.where(columns.gradient >= 0, step.storages.bytes[columns.gradient], 0)
    taken = np.cumsum(n_bytes[in_blocks(step)])
    return min(int(np.searchsorted(taken, spare_bytes, side="right")), len(taken) - 1)


def page_plan_of(found: PagePlan) -> PagesPlan:
    """Return `found` without what follows from the parameters."""
    pages = found.pages
    return PagesPlan(page_bytes=pages.page_bytes, frames=pages.frames, ahead=found.ahead, cached=found.cached)


def page_plan_from(sizes: tuple[Units, Units], plan: PagesPlan, gathered: bool) -> PagePlan:
    """Return `plan` for parameters of these sizes, or `gathered` rows of them.

    Raises:
        ValueError: It is for other parameters.
    """
    cached = plan.cached
    if cached >= len(sizes[0]):
        raise ValueError(f"{cached} of {len(sizes[0])} parameters stay")
    return PagePlan(
        paged(sizes[0][cached:], sizes[1][cached:], plan.page_bytes, plan.frames, gathered),
        plan.ahead,
        cached,
    )


def apply_pages(
    context: Context, kind: str, plan: PagesPlan, max_staleness: int | None, on_ssd: OnSsd | None = None
) -> None:
    """Move the optimizer to the host, then the blocks' parameters into pages.

    Args:
        context: Its model and optimizer.
        kind: Of the technique, for messages.
        plan: Made for this model.
        max_staleness: Of lock-free updates; None: at the end of the step, by the user's own optimizer.
        on_ssd: As in `in_pages`.

    Raises:
        ApplyError: The plan is none for this model.
    """
    gathered = is_gathered(context.model)
    try:
        how = page_plan_from(sizes_of(context), plan, gathered)
        residency = timeline(how.pages, how.ahead)
        if how.cached and context.placement.world_size > 1 and not gathered:
            raise ValueError("nobody averages gradients of what stays")
    except ValueError as wrong:
        raise of_another(context, kind, plan) from wrong
    stays = [p for name in context.blocks for p in context.model.get_submodule(name).parameters()][
        : how.cached
    ]
    if on_ssd is not None:
        moved = (
            SsdOptimizer(context, master=False, ahead=on_ssd.ahead, keep=on_ssd.keeps)
            if max_staleness is None
            else LockFreeOnSsd(context, ahead=on_ssd.ahead, max_staleness=max_staleness)
        )
        store = PagedOffloader(context, residency, AtTheEnd(moved), how.pages)
        if isinstance(moved, LockFreeOnSsd):
            moved.publish_to(store)
        else:
            moved.keep_in(store.hosts)
        context.checks["offload.states"] = functools.partial(_check, store, how)
        return
    optimizer = (
        HostOptimizer(context, stays=stays)
        if max_staleness is None
        else LockFreeOptimizer(context, max_staleness)
    )
    store = PagedOffloader(context, residency, optimizer, how.pages, set(stays))
    if isinstance(optimizer, LockFreeOptimizer):
        optimizer.publish_to(store)
    context.checks["offload.states"] = functools.partial(_check, store, how)


def _check(store: PagedOffloader, how: PagePlan) -> dict[str, Any]:
    pages = how.pages
    facts = {
        "pages": pages.count,
        "page_bytes": pages.page_bytes,
        "frames": pages.frames,
        "cached": how.cached,
    }
    return store.check() | facts
