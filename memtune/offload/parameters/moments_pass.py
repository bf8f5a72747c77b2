"""Moments of a step as arrays: units that are loaded and freed, gradients in D2H copies, updates of blocks.

`offload.parameters.parameter_offload_pass` inserts their ops; the offloaders follow the same order. In this
file: memory of the units, the ops that begin a moment, gradients in D2H copies, updates that overlap with
other blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memtune.offload.core import Chunks, Pages, PendingUpdates, runs, waiting_room
from memtune.program import (
    I32,
    I64,
    Edit,
    Kind,
    Mask,
    Phase,
    Residency,
    Resource,
    Step,
    Tier,
    Units,
    columns_of,
    gathers_of,
    order_of_use,
    ssd_reads_by_moment,
)


def in_blocks(step: Step) -> I32:
    """Return the parameters of blocks, in the order in which the blocks are used."""
    block = columns_of(step.parameters).block
    mine = np.flatnonzero(block >= 0)
    found: I32 = mine[np.argsort(block[mine], kind="stable")].astype(np.int32)
    return found


class Pieces(NamedTuple):
    """Memory that is loaded and freed."""

    of_parameter: I32
    """(parameters + 1,) the piece of each parameter, of several the first; -1 for none, as in the last row.
    """
    n_bytes: I64
    unit: I32
    owner: I32
    of_unit: tuple[tuple[int, ...], ...]
    used: tuple[Units, ...]
    """The units that each moment uses."""
    again: I32
    """`of_parameter` in backward."""

    @classmethod
    def from_step(cls, step: Step, chunks: Chunks | None) -> Pieces:
        """Return the chunks as pieces, or without chunks each parameter of a block."""
        columns, mine = columns_of(step.parameters), in_blocks(step)
        if chunks is None:
            return cls.of_parameters(step, mine)
        of_parameter = np.full(len(columns.block) + 1, -1, np.int32)
        # In the order of use, in which a layout numbers parameters.
        of_parameter[mine] = chunks.chunk
        each = np.arange(chunks.count, dtype=np.int32)
        n_bytes = np.full(chunks.count, chunks.chunk_bytes, np.int64)
        no_owner, of_unit = np.full(chunks.count, -1, np.int32), tuple((i,) for i in range(chunks.count))
        return cls(of_parameter, n_bytes, each, no_owner, of_unit, chunks.uses(), of_parameter)

    @classmethod
    def of_parameters(cls, step: Step, mine: I32) -> Pieces:
        """Return each of the parameters `mine`, which are in the order of use, as a piece of its block."""
        columns = columns_of(step.parameters)
        of_parameter = np.full(len(columns.block) + 1, -1, np.int32)
        of_parameter[mine] = np.arange(len(mine), dtype=np.int32)
        rows = np.split(
            np.arange(len(mine)), np.searchsorted(columns.block[mine], np.arange(1, len(step.blocks)))
        )
        of_unit = tuple(tuple(part.tolist()) for part in rows)
        order = order_of_use(len(step.blocks), gathered=gathers_of(step) is not None)
        used = tuple((unit,) if unit >= 0 else () for unit in order)
        n_bytes = columns.n_bytes[mine]
        return cls(of_parameter, n_bytes, columns.block[mine], mine, of_unit, used, of_parameter)


class Frames(NamedTuple):
    """Differences of pages in permanent frames from other pieces."""

    n_bytes: int
    host_bytes: int
    waits: tuple[Units, ...]
    """The pieces that contain what each moment uses."""


def copies_of_pages(step: Step, pages: Pages, residency: Residency) -> tuple[Pieces, Residency, Frames]:
    """Return a piece for each copy, with the residency of these pieces."""
    # A copy moves adjacent pages that are loaded at the same moment.
    copies, mine = _copies(pages, residency), in_blocks(step)
    of_parameter, again = (np.full(len(step.parameters) + 1, -1, np.int32) for _ in range(2))
    of_parameter[mine], again[mine] = copies.of_parameter, copies.again
    each = np.arange(len(copies.n_bytes), dtype=np.int32)
    of_unit = tuple((i,) for i in range(len(each)))
    pieces = Pieces(
        of_parameter,
        copies.n_bytes,
        each,
        np.full(len(each), -1, np.int32),
        of_unit,
        copies.used_loads,
        again,
    )
    # No drops before the end: frames are permanent, and a copy replaces the bytes of the page before it.
    there = Residency(((),) * len(copies.used_loads) + (tuple(range(len(each))),), (*copies.all_loads, ()))
    return pieces, there, Frames(pages.frame_bytes, pages.count * pages.page_bytes, copies.waits)


class _Copies(NamedTuple):
    """Copies of all moments of a step."""

    n_bytes: I64
    of_parameter: I32
    """(parameters of blocks,) the copy of the page on which each begins; `again`: in backward."""
    again: I32
    used_loads: tuple[Units, ...]
    """(moments,) copies for the pages that the moment itself uses."""
    all_loads: tuple[Units, ...]
    """(moments,) these and the prefetches."""
    waits: tuple[Units, ...]
    """(moments,) copies, of any moment, that contain the pages that the moment uses."""


@functools.lru_cache(maxsize=64)
def _copies(pages: Pages, residency: Residency) -> _Copies:
    n_blocks, uses = len(pages.of_block), pages.uses()
    order = order_of_use(n_blocks, gathered=pages.gathered)
    of_page, filled = np.full(pages.count, -1, np.int32), np.asarray(pages.filled, np.int64)
    first, block = np.asarray(pages.first, np.int32), np.asarray(pages.block, np.int32)
    of_parameter, again = (np.full(len(first), -1, np.int32) for _ in range(2))
    sizes: list[I64] = []
    used_loads, all_loads, waits = [], [], []
    count = 0
    # Residency has one moment more, the end of backward, which uses nothing.
    for moment, (loads, used) in enumerate(zip(residency.loads, uses, strict=False)):
        page, start = np.asarray(loads, np.int32), count
        # A block's pages are adjacent, so the first and last one bound them.
        needed = (page >= used[0]) & (page <= used[-1]) if used else np.zeros(len(page), bool)
        ends = []
        for part in (page[needed], page[~needed]):
            one, last = runs(pages, part)
            of_page[part] = count + np.searchsorted(one, part, side="right") - 1
            # The last page of a run is copied up to its last byte; the pages before it whole, gaps included.
            sizes.append((last - one) * np.int64(pages.page_bytes) + filled[last])
            count += len(one)
            ends.append(count)
        used_loads.append(tuple(range(start, ends[0])))
        all_loads.append(tuple(range(start, count)))
        waits.append(tuple(dict.fromkeys(of_page[list(used)].tolist())))
        here = block == order[moment]
        # A parameter that spans pages is attributed to the copy with its first byte: it is ready no earlier.
        (of_parameter if moment < n_blocks else again)[here] = of_page[first[here]]
    # Under FSDP2 backward gathers the last block's rows while they are resident from forward.
    again = np.where(again < 0, of_parameter, again)
    return _Copies(
        np.concatenate(sizes), of_parameter, again, tuple(used_loads), tuple(all_loads), tuple(waits)
    )


def host_memory(edit: Edit, pieces: Pieces, frames: Frames | None, tier: Tier = Tier.HOST) -> I32:
    """Add the storage of each piece on the host, or on SSD."""
    n_bytes = pieces.n_bytes if frames is None else np.full(1, frames.host_bytes, np.int64)
    # All pages are one allocation on the host, so no parameter owns it.
    rows = edit.add_persistent(n_bytes, Kind.PARAMETER, tier, pieces.owner if frames is None else -1)
    return rows if frames is None else np.repeat(rows, len(pieces.n_bytes))


# -- ops that `parameter_offload_pass` inserts when each moment begins ---------------------------------------

ADD, ALLOCATE, COPY, PREFETCH, UPDATE, READ = range(6)
OPS = (
    ("aten.add_.Tensor", Resource.HOST_THREADS),
    ("memtune.allocate", Resource.NOTHING),
    ("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE),
    ("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE),
    ("memtune.host_update_.default", Resource.HOST_THREADS),
    ("memtune.from_ssd.default", Resource.SSD_READ),
)
"""Name and resource of each kind.

PREFETCH loads before the moment that uses the unit, COPY in it; READ copies from SSD to the host.
"""
_REMEMBERED = 64


@dataclass(frozen=True, eq=False)
class MomentOps:
    """Inserted ops, one row each, in the order of the moments."""

    what: I32
    row: I32
    """A piece; of an UPDATE a parameter, of an ADD a ready gradient."""
    moment: I32

    @cached_property
    def loads(self) -> Mask:
        """(ops,) True for H2D copies."""
        found: Mask = (self.what == COPY) | (self.what == PREFETCH)
        return found

    @cached_property
    def reads(self) -> Mask:
        """(ops,) True for reads from SSD."""
        found: Mask = self.what == READ
        return found

    def starts(self, rows: I32, begins: I32) -> tuple[I32, I32]:
        """Return (moments,) the ops before which each moment frees copied gradients, and parameters."""
        gradients, parameters = begins.copy(), begins.copy()
        gradients[self.moment[::-1]] = rows[::-1]  # the first one is written last
        others = np.flatnonzero(self.what != ADD)[::-1]
        parameters[self.moment[others]] = rows[others]
        return gradients, parameters


def moment_ops(
    step: Step,
    pieces: Pieces,
    residency: Residency,
    adds: tuple[Units, ...],
    *,
    allocates: bool = True,
    updated: tuple[Units, ...] = (),
    read_ahead: int | None = None,
) -> MomentOps:
    """Return the ops at the beginning of each moment, in the order of `offload.parameters.offloader`.

    Args:
        step: Its blocks are offloaded.
        pieces: Their offloaded memory.
        residency: Pieces to free and load at each moment.
        adds: (moments,) the ready gradients that are added to their sums when the moment begins.
        allocates: True if a load allocates.
        updated: (moments,) blocks that are updated when the moment begins; none given: no block is.
        read_ahead: Number of moments by which the read from SSD precedes the load; None where it is on the
            host.
    """
    trained = _trained_by_block(step) if updated else ()
    updates = tuple(tuple(row for block in blocks for row in trained[block]) for blocks in updated)
    reads = () if read_ahead is None else ssd_reads_by_moment(residency, read_ahead)
    return _moment_ops(pieces.of_unit, pieces.used, residency.loads, adds, updates, allocates, reads)


@functools.lru_cache(maxsize=_REMEMBERED)
def _moment_ops(
    of_unit: tuple[Units, ...],
    used: tuple[Units, ...],
    loads: tuple[Units, ...],
    adds: tuple[Units, ...],
    updates: tuple[Units, ...],
    allocates: bool,
    reads: tuple[tuple[Units, Units], ...],
) -> MomentOps:
    found: list[tuple[int, int, int]] = []
    for moment, units in enumerate(loads):
        found += [(ADD, row, moment) for row in adds[moment]]
        # `now` are reads that the load waits for, `later` those that a later moment's load finds done.
        now, later = reads[moment] if reads else ((), ())
        for unit in units:
            what = COPY if unit in used[moment] else PREFETCH
            found += [(READ, row, moment) for row in of_unit[unit]] if unit in now else []
            for row in of_unit[unit]:
                found += (
                    [(ALLOCATE, row, moment), (what, row, moment)] if allocates else [(what, row, moment)]
                )
        found += [(READ, row, moment) for unit in later for row in of_unit[unit]]
        found += [(UPDATE, row, moment) for row in updates[moment]] if updates else []
    what_of, row_of, moment_of = np.asarray(found, np.int32).reshape(-1, 3).T
    return MomentOps(
        np.ascontiguousarray(what_of), np.ascontiguousarray(row_of), np.ascontiguousarray(moment_of)
    )


@functools.lru_cache(maxsize=8)
def _trained_by_block(step: Step) -> tuple[Units, ...]:
    columns = columns_of(step.parameters)
    trained = np.where(columns.gradient >= 0, columns.block, -1)
    return tuple(tuple(np.flatnonzero(trained == i).tolist()) for i in range(len(step.blocks)))


@functools.lru_cache(maxsize=4)
def dropped_in(drops: tuple[Units, ...], units: int) -> I32:
    """Return (units, moments) the moment that frees each unit after a load in an earlier one, -1 for none."""
    until = np.full((units, len(drops)), -1, np.int32)
    # Backwards, so that the earliest moment that frees a unit is written last.
    for moment in reversed(range(len(drops))):
        until[list(drops[moment]), :moment] = moment
    return until


# -- gradients in D2H copies, and updates --------------------------------------------------------------------


class FreedAt(NamedTuple):
    """Times at which gradients are freed: when another one is ready, or at a moment; else -1."""

    row: I32
    moment: I32

    def added_in(self, summed: Mask, moments: int) -> tuple[Units, ...]:
        """Return (moments,) the rows that are added to their sums when each moment begins."""
        found: list[list[int]] = [[] for _ in range(moments)]
        for row in np.flatnonzero(summed & (self.moment >= 0)).tolist():
            found[self.moment[row]].append(row)
        return tuple(map(tuple, found))


def freed_by_next_ready(moment: I32) -> FreedAt:
    """Free each gradient when the next one of its moment is ready, or at the next moment."""
    row = np.arange(1, len(moment) + 1, dtype=np.int32)
    last = np.append(moment[1:] != moment[:-1], True)[: len(moment)]
    return FreedAt(np.where(last, -1, row).astype(np.int32), np.where(last, moment + 1, -1).astype(np.int32))


def of_a_block_at_once(moment: I32, n_bytes: I64, end: int) -> FreedAt:
    """Free gradients so that a block's bytes may be in D2H copies at once; backward ends in moment `end`.

    Args:
        moment: (gradients,) ascending.
        n_bytes: (gradients,)
        end: The moment in which backward ends.
    """
    # Those of a block have all arrived when the moment after its own ends, or backward does.
    # Bytes, because arrays are no cache keys; most candidates of a search have equal ones.
    return _of_a_block_at_once(moment.tobytes(), n_bytes.tobytes(), end)


@functools.lru_cache(maxsize=32)
def _of_a_block_at_once(moments: bytes, sizes_bytes: bytes, end: int) -> FreedAt:
    moment, n_bytes = np.frombuffer(moments, np.int32), np.frombuffer(sizes_bytes, np.int64)
    row, gone = (np.full(len(moment), -1, np.int32) for _ in range(2))
    if not len(moment):
        return FreedAt(row, gone)
    n_ready = np.bincount(moment, minlength=end + 1)
    room = int(np.bincount(moment, n_bytes).max())
    waiting, begun, sizes = PendingUpdates[int](room), int(moment[0]), n_bytes.tolist()

    def begin(until: int) -> None:
        for at in range(begun + 1, until + 1):
            # Copies of the last moment's gradients may still run in this one; after backward none may.
            for each in waiting.drain(int(n_ready[at - 1]) if at < end else 0):
                gone[each] = at

    for each, at in enumerate(moment.tolist()):
        begin(at)
        begun = max(begun, at)
        for before in waiting.make_room(sizes[each]):
            row[before] = each
        waiting.add(each, sizes[each])
    begin(end)
    return FreedAt(row, gone)


class Overlap(NamedTuple):
    """Time of the updates of blocks whose D2H copies overlap with other blocks' compute."""

    deferred: frozenset[int] = frozenset()
    """Blocks whose updates overlap with the next step's forward; the others' overlap with backward."""
    at_end: bool = False
    """All updates are in the optimizer's step."""


def block_of_the_step(step: Step) -> int:
    """Return the block that the step updates, where all trained parameters are in blocks; else -1."""
    # Without any gradient left, changes of gradients between backward and the step would be lost unseen.
    columns = columns_of(step.parameters)
    block = columns.block[columns.gradient >= 0]
    return int(block.min()) if len(block) else -1


def updated_blocks(blocks: int, overlap: Overlap | None, in_step: int = -1) -> tuple[Units, ...]:
    """Return (2 · blocks + 1,) the blocks that are updated when each moment begins.

    Args:
        blocks: Number of blocks.
        overlap: Overlap of the updates; None: each block is updated when the next moment begins.
        in_step: The block that the optimizer's step updates.
    """
    end, lag = 2 * blocks, 1 if overlap is None else 2
    found: list[Units] = [()] * (end + 1)
    for moment in range(blocks + lag, end + 1):
        # Backward of block b is moment 2 · blocks - 1 - b, so its gradients are complete one moment later, or
        # with overlap two.
        found[moment] = (end - 1 - (moment - lag),)
    if overlap is not None:
        # Two moments after its backward, which is the last one, there is none: block 0 is updated at the end.
        found[end] += (0,)
    left = (
        {in_step} if overlap is None else {in_step, *(range(blocks) if overlap.at_end else overlap.deferred)}
    )
    return tuple(tuple(each for each in now if each not in left) for now in found)


def hold_for_updates(
    edit: Edit, step: Step, gradients: I32, n_bytes: I64, block: I32, update: I32, order: list[int]
) -> None:
    """Hold host gradients until a later block's update (`update`, -1: deferred), or until the step.

    Args:
        edit: Of `step`.
        step: Before the edit.
        gradients: (gradients,) host storages.
        n_bytes: (gradients,)
        block: (gradients,)
        update: (blocks,) the first op of each block's update, -1 for deferred ones.
        order: Blocks in the order of their updates.
    """
    # This is the bound of `PendingUpdates`, which the mechanism uses as well.
    waiting, until = PendingUpdates[int](waiting_room(step)), {}
    sizes = np.bincount(block, n_bytes, len(update)).astype(np.int64).tolist()
    for each in order:
        for before in waiting.make_room(sizes[each]):
            until[before] = each
        waiting.add(each, sizes[each])
    by_block = np.full(len(update), -1, np.int32)
    by_block[list(until)] = update[list(until.values())]
    gone, there = by_block[block], update[block] >= 0
    edit.release_before(gradients[gone >= 0], gone[gone >= 0])
    resident = gradients[there & (gone < 0)]
    optimizer = int((step.ops.phase == Phase.OPTIMIZER).argmax())
    # The optimizer's own first op, which `optimizer_on_host` drops later; until then it marks the place.
    edit.hold_through(resident, optimizer)


def update_outside_of_backward(
    edit: Edit,
    step: Step,
    mine: I32,
    hosts: I32,
    gradients: I32,
    state: I32,
    traffic_bytes: I64,
    *,
    at_end: bool,
) -> None:
    """Insert deferred updates at the start of the step, or with `at_end` all updates at its end.

    Args:
        edit: Of `step`.
        step: Before the edit.
        mine: Parameters of blocks, in the order of use.
        hosts: (mine,) their weights on the host.
        gradients: (mine,) host gradients of the last step, or `at_end` of this one.
        state: Moments of any parameters.
        traffic_bytes: (parameters,) of an update.
        at_end: In the optimizer's step.
    """
    block, count = columns_of(step.parameters).block[mine], len(mine)
    # The optimizer's own last op marks the place, although `optimizer_on_host` drops it later.
    place = int(np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[-1]) if at_end else 0
    ops = edit.add_ops(
        "memtune.host_update_.default",
        before=np.full(count, place, np.int32),
        phase=Phase.OPTIMIZER if at_end else Phase.PROLOGUE,
        resource=Resource.HOST_THREADS,
        traffic_bytes=traffic_bytes[mine],
        writes=hosts,
    )
    op_of = np.full(len(step.parameters), -1, np.int32)
    op_of[mine] = ops
    state = state[op_of[step.storages.owner[state]] >= 0]
    edit.add_uses(op_of[step.storages.owner[state]], writes=state)
    edit.add_uses(ops, gradients)
    if at_end:
        edit.hold_through(gradients, np.full(count, place, np.int32))
        return
    last = np.append(block[1:] != block[:-1], True)[:count]
    # A block's gradients are freed together, after its last update.
    of_block = ops[np.flatnonzero(last)][np.cumsum(last) - last]
    edit.add_uses(of_block[~last], gradients[~last])
