"""How the blocks' parameters are kept in pages (`runtime.pages`): what is planned, rewritten and applied."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtune.chunks import ALIGNMENT
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.pages import Pages, paged, timeline
from memtune.parameters import columns_of
from memtune.passes.host_optimizer import optimizer_on_host
from memtune.passes.pieces import in_blocks
from memtune.passes.ssd_optimizer import Away, optimizer_on_ssd, swept_from_ssd
from memtune.passes.stays import cannot_part
from memtune.passes.stream import sizes_in_blocks, state_bytes, stream_parameters
from memtune.planners.pages import PagePlan, count_pages, in_frames, schedule
from memtune.program import Program, Step
from memtune.remembered import remembered
from memtune.residency import Units
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import is_gathered
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.lock_free import LockFreeOptimizer
from memtune.runtime.lock_free_on_ssd import LockFreeOnSsd
from memtune.runtime.paged_store import PagedStore
from memtune.runtime.ssd_optimizer import SsdOptimizer
from memtune.runtime.ssd_parameters import AtTheEnd
from memtune.search_spaces.offload.states._chunks import are_rows, beside, in_blocks_of, no_plan, sizes_of, staying_first
from memtune.search_spaces.offload.states._layers import compute_s_of_moments, replicas, require_replicas
from memtune.technique import Plan
from memtune.units import MIB


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
    """The program with its blocks' parameters in pages that come and go, and its optimizer on the host but for what is cached.

    Args:
        program: Any.
        how: Pages, frames, what is cached.
        on_ssd: How the optimizer is on SSD; None: it is on the host.
    """
    step, ops = staying_first(program.step, how.cached)
    step = stream_parameters(step, timeline(how.pages, how.ahead), how.pages, early=False, ranks=replicas(program))
    if on_ssd is None:
        step = optimizer_on_host(step, stay=ops)
    elif on_ssd.late:
        step = swept_from_ssd(step, on_ssd.ahead, Away.of(step))
    else:
        step = optimizer_on_ssd(step, on_ssd.ahead, 1 + on_ssd.keeps, Away.of(step))
    return program.with_step(in_blocks_of(program.step, step))


def page_bytes_for(step: Step) -> int:
    """The paper's 4 MiB, or a power of two of which the largest block has eight: one page is then no large part of it."""
    n_bytes, block = sizes_in_blocks(step)
    largest = int(np.bincount(block, n_bytes).max()) if block else 0
    return int(max(min(4 * MIB, 1 << max(largest // 8, 1).bit_length() - 1), ALIGNMENT))


@functools.lru_cache(maxsize=64)
def solved(
    program: Program, hardware: Hardware, budget_bytes: int | None, page_bytes: int, *, scheduled: bool, cache: bool
) -> PagePlan:
    """Frames in the room that the budget leaves, what is cached in the rest of it, and which page comes in when."""
    sizes, rows = sizes_in_blocks(program.step), are_rows(program)
    room = None if budget_bytes is None else max(budget_bytes - max(beside(program)), 0)
    load_s = page_bytes / hardware.host_to_device_bytes_per_s

    def of(pages: Pages, cached: int = 0) -> PagePlan:
        if not scheduled:
            return PagePlan(pages, (0,) * len(pages.uses()), cached)
        return PagePlan(pages, schedule(pages, compute_s_of_moments(program.step, hardware).tolist(), load_s), cached)

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
    """How many of the blocks' parameters have gradient and optimizer state of `spare_bytes` together, those that are used first.

    Their gradients land last, when most activations are gone, and their pages are those that are waited for.
    """
    step, columns = program.step, columns_of(program.step.parameters)
    n_bytes = state_bytes(step) + np.where(columns.gradient >= 0, step.bytes[columns.gradient], 0)
    taken = np.cumsum(n_bytes[in_blocks(step)])
    return min(int(np.searchsorted(taken, spare_bytes, side="right")), len(taken) - 1)


def plan_of(found: PagePlan) -> Plan:
    """As plain data."""
    cached = {"cached": found.cached} if found.cached else {}
    pages = found.pages
    return Plan(decisions={"page_bytes": pages.page_bytes, "frames": pages.frames, "ahead": list(found.ahead), **cached})


def planned(sizes: tuple[Units, Units], plan: Plan, gathered: bool) -> PagePlan:
    """What `plan_of` wrote down, for parameters of these sizes, or `gathered` rows of them.

    Raises:
        KeyError, TypeError, ValueError: It is damaged, or for other parameters.
    """
    found = plan.decisions
    cached = int(found.get("cached", 0))
    if not 0 <= cached < len(sizes[0]):
        raise ValueError(f"{cached} of {len(sizes[0])} parameters stay")
    pages = paged(sizes[0][cached:], sizes[1][cached:], int(found["page_bytes"]), int(found["frames"]), gathered)
    return PagePlan(pages, tuple(int(each) for each in found["ahead"]), cached)


def apply_pages(context: Context, kind: str, plan: Plan, max_staleness: int | None, on_ssd: OnSsd | None = None) -> None:
    """Move the optimizer to the host, then the blocks' parameters into pages.

    Args:
        context: Its model and optimizer.
        kind: Of the technique, for messages.
        plan: As `plan_of` wrote it.
        max_staleness: Of lock-free updates; None: at the end of the step, by the user's own optimizer.
        on_ssd: As in `in_pages`.

    Raises:
        ApplyError: The plan is none for this model, or ranks share a copy of it or would go on with different weights.
    """
    require_replicas(context, kind)
    gathered = is_gathered(context.model)
    if context.ranks > 1 and not gathered and max_staleness is not None:
        raise ApplyError(
            "lock_free is for one rank: each rank's thread would update at times of its own, and weights would differ.",
            fix="lock_free: false", code="MT364",
        )  # fmt: skip
    try:
        how = planned(sizes_of(context), plan, gathered)
        residency = timeline(how.pages, how.ahead)
        if how.cached and context.ranks > 1 and not gathered:
            raise ValueError("nobody averages gradients of what stays")
    except (KeyError, TypeError, ValueError) as wrong:
        raise no_plan(context, kind, plan) from wrong
    stays = [p for name in context.blocks for p in context.model.get_submodule(name).parameters()][: how.cached]
    if on_ssd is not None:
        moved = (
            SsdOptimizer(context, master=False, ahead=on_ssd.ahead, keep=on_ssd.keeps)
            if max_staleness is None
            else LockFreeOnSsd(context, ahead=on_ssd.ahead, max_staleness=max_staleness)
        )
        store = PagedStore(context, residency, AtTheEnd(moved), how.pages)
        if isinstance(moved, LockFreeOnSsd):
            moved.publish_to(store)
        else:
            moved.keep_in(store.hosts)
        context.checks["offload.states"] = functools.partial(_check, store, how)
        return
    optimizer = HostOptimizer(context, stays=stays) if max_staleness is None else LockFreeOptimizer(context, max_staleness)
    store = PagedStore(context, residency, optimizer, how.pages, set(stays))
    if isinstance(optimizer, LockFreeOptimizer):
        optimizer.publish_to(store)
    context.checks["offload.states"] = functools.partial(_check, store, how)


def _check(store: PagedStore, how: PagePlan) -> dict[str, Any]:
    pages = how.pages
    facts = {"pages": pages.count, "page_bytes": pages.page_bytes, "frames": pages.frames, "cached": how.cached}
    return store.check() | facts
