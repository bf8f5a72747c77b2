"""Pass of `offload.parameters.offloader`: parameters on the host, gradients offloaded when ready.

A unit of the residency is a block, each parameter of which is a *piece* of memory, or a chunk or page, which
is one piece. Parameters in no block are left to `offload.optimizer.host_optimizer_pass`, which runs next and
finds no gradient at those handled here.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from memtune.offload.core import Chunks, Pages, aligned
from memtune.offload.gradients import BlockGradients, averaged, bytes_in_copies, offload_in_place
from memtune.offload.parameters.moments_pass import (
    ADD,
    ALLOCATE,
    COPY,
    OPS,
    PREFETCH,
    UPDATE,
    Frames,
    FreedAt,
    MomentOps,
    Overlap,
    Pieces,
    block_of_the_step,
    copies_of_pages,
    dropped_in,
    freed_by_next_ready,
    hold_for_updates,
    host_memory,
    in_blocks,
    moment_ops,
    of_a_block_at_once,
    update_outside_of_backward,
    updated_blocks,
)
from memtune.program import (
    FOREVER,
    I32,
    I64,
    WRITES,
    Edit,
    Kind,
    Mask,
    Phase,
    Program,
    Residency,
    Resource,
    Step,
    Tier,
    Units,
    columns_of,
    gathers_of,
    hold_prefetched_copies,
    optimizer_moments,
    order_of_use,
    pending_copy_sources,
    window_residency,
)


@functools.lru_cache(maxsize=8)
def not_in_layers(step: Step, when_ready: bool = True) -> str:
    """Return the reason why the blocks of `step` do not run one after the other; empty if they do.

    Args:
        step: Any step.
        when_ready: Gradients of the blocks are offloaded when ready.
    """
    n_blocks, columns = len(step.blocks), columns_of(step.parameters)
    if n_blocks < 2:
        return "no repeated blocks were found, so the order of layers is not known"
    # A block that runs twice has no single moment of forward, by which residencies are indexed.
    if len(step.calls.block) != n_blocks:
        return "a block runs more than once in a forward"
    moments = first_ops(step)
    if (moments < 0).any():
        return f"{step.blocks[int((moments < 0).argmax()) % n_blocks]} has no forward or no backward"
    if (np.diff(moments) <= 0).any() or (
        step.forward_ends[: n_blocks - 1] >= step.forward_starts[1:n_blocks]
    ).any():
        return "the blocks do not run one after the other"
    # Memory is freed by storage, so a parameter must have one of its own and fill it.
    shared = np.bincount(columns.storage, minlength=step.storages.n) > 1
    whole = step.storages.bytes[columns.storage] == columns.n_bytes
    wrong = (columns.block >= 0) & (shared[columns.storage] | ~whole)
    if wrong.any():
        return f"{columns.names[int(wrong.argmax())]} shares its memory"
    parameter = step.parameter_of[step.uses.storage]
    block = np.where(parameter >= 0, columns.block[parameter], -1)
    # The offloader loads a weight at its block's calls only.
    outside = (block >= 0) & (step.use_phase < Phase.BOUNDARY) & (step.ops.block[step.uses.op] != block)
    if outside.any():
        return f"{columns.names[int(parameter[outside.argmax()])]} is used outside of its block"
    if not when_ready:
        return ""
    grads = BlockGradients.from_step(step)
    # Each gradient must be ready within its own moment, at whose end its block is updated.
    ends = np.append(moments, np.int32(step.ops.n))[grads.moment + 1]
    if ((grads.after >= ends) | (grads.after < moments[grads.moment])).any():
        return "a block's gradient is put in place while another block's backward runs"
    return ""


def first_ops(step: Step) -> I32:
    """Return (2 · blocks,) the op before which each moment begins, -1 where there is none."""
    n_blocks = len(step.blocks)
    forward, backward = np.full(n_blocks, -1, np.int32), np.full(n_blocks, -1, np.int32)
    back = (step.ops.phase == Phase.BACKWARD) | (step.ops.phase == Phase.RECOMPUTE)
    for first, mine in ((forward, step.ops.phase == Phase.FORWARD), (backward, back)):
        rows = np.flatnonzero(mine & (step.ops.block >= 0))[::-1].astype(np.int32)
        first[step.ops.block[rows]] = rows  # the first one is written last
    forward = np.where(forward >= 0, np.minimum(forward, step.forward_starts[:n_blocks]), -1).astype(np.int32)
    # FSDP2's all-gather reads the rows before the block's first op, so the moment begins there.
    found = np.concatenate([forward, backward[::-1]])
    return found if (gathers := gathers_of(step)) is None else np.minimum(found, gathers.begins)


def moment_of_ops(step: Step) -> I32:
    """Return (n,) the moment of each op of forward and backward, -1 before and after them."""
    moment = np.searchsorted(first_ops(step), np.arange(step.ops.n), side="right") - 1
    found: I32 = np.where(step.ops.phase < Phase.BOUNDARY, moment, -1).astype(np.int32)
    return found


@functools.lru_cache(maxsize=8)
def sizes_in_blocks(step: Step) -> tuple[Units, Units]:
    """Return the bytes of each block parameter in a chunk, in the order of use, and its block."""
    columns, mine = columns_of(step.parameters), in_blocks(step)
    n_bytes = columns.n_bytes[mine]
    return tuple(aligned(each) for each in n_bytes.tolist()), tuple(columns.block[mine].tolist())


def bytes_without_chunks(step: Step, in_place: bool = False) -> Units:
    """Return (moments,) peak bytes of the device in each moment, without chunks.

    Args:
        step: A result of `stream_parameters` with chunks.
        in_place: Compute them as if gradients were in place.
    """
    # Chunks are the buffers that an H2D copy fills; those that FSDP2 gathers into have the same kind.
    copies = step.ops.name == step.names.index(OPS[COPY][0])
    chunk = np.zeros(step.storages.n, bool)
    chunk[step.uses.storage[copies[step.uses.op] & (step.uses.mode == WRITES)]] = True
    chunk &= step.storages.kind == Kind.COMMUNICATION
    # On another tier the chunks do not count; the peak of all else remains.
    live = step.with_storages(tier=np.where(chunk, np.uint8(Tier.SSD), step.storages.tier)).live_bytes()
    if in_place:
        live = live - bytes_in_copies(step)
    moment = moment_of_ops(step)
    most = np.zeros(2 * len(step.blocks), np.int64)
    np.maximum.at(most, np.maximum(moment, 0), np.where(moment >= 0, live, 0))
    return tuple(most.tolist())


def replicas(program: Program) -> int:
    """Return the number of ranks that have all weights."""
    return 1 if gathers_of(program.step) is not None else program.ranks


def window_of(program: Program, slots: int) -> Residency:
    """Return the residency of `slots` blocks of `program`, or of a rank's rows, on the device at once."""
    return window_residency(len(program.step.blocks), slots, gathered=gathers_of(program.step) is not None)


def stream_parameters(
    step: Step,
    residency: Residency,
    chunks: Chunks | Pages | None = None,
    *,
    early: bool = True,
    read_ahead: int | None = None,
    ranks: int = 1,
    overlap: Overlap | None = None,
    in_place: bool = False,
    alone: Sequence[int] = (),
) -> Step:
    """Return `step` with the parameters of its blocks on the host, resident as `residency` lists.

    Args:
        step: One that `not_in_layers` accepts.
        residency: Units to free and load at each moment of `order_of_use`.
        chunks: Layout of the parameters; none: each block is a unit.
        early: Each block is updated natively when its gradients are complete; otherwise the optimizer's own
            ops update all.
        read_ahead: The parameters are on SSD and are read this number of moments before the load; None: on
            the host.
        ranks: Number of replicas, which average a block's gradients together before they are offloaded.
        overlap: Overlap of D2H copies and updates with other blocks; None: both end before the next block
            computes.
        in_place: Each gradient is offloaded from the place of its weight; for a step where
            `weights_are_free`, with chunks.
        alone: Parameters whose gradients replicas average by themselves.
    """
    frames: Frames | None = None
    # Pages are copied into permanent frames; chunks and blocks are allocated and freed.
    if isinstance(chunks, Pages):
        pieces, residency, frames = copies_of_pages(step, chunks, residency)
    else:
        pieces = Pieces.from_step(step, chunks)
    columns, edit, grads = columns_of(step.parameters), Edit(step), BlockGradients.from_step(step)
    end = step.backward_end
    begins = np.append(first_ops(step), np.int32(end + 1)).astype(np.int32)
    mine = in_blocks(step)
    hosts = host_memory(edit, pieces, frames, Tier.HOST if read_ahead is None else Tier.SSD)
    # The parameters' own storages stay in the Step, without bytes; loads add storages for each time of
    # residency.
    edit.storages.bytes[columns.storage[mine]] = 0
    # The op that added a gradient on the device; the host adds instead.
    edit.drop_ops(grads.after[grads.sums >= 0])
    if ranks > 1:
        grads = averaged(edit, step, grads, ranks, alone)
    moment, summed = grads.moment, grads.sums >= 0
    freed = (
        freed_by_next_ready(moment)
        if overlap is None
        else of_a_block_at_once(moment, grads.n_bytes, len(begins) - 1)
    )
    deferred = overlap.deferred if overlap is not None else frozenset[int]()
    # Gradients before loads, as in the mechanism: within a moment rows keep the order of insertion.
    offloaded = _offload_gradients(edit, step, grads, freed, deferred, in_place=in_place)
    updated = updated_blocks(len(step.blocks), overlap, block_of_the_step(step)) if early else ()
    inserted = moment_ops(
        step,
        pieces,
        residency,
        freed.added_in(summed, len(begins)),
        allocates=frames is None,
        updated=updated,
        read_ahead=read_ahead,
    )
    rows = insert(edit, step, pieces, inserted, begins)
    starts = inserted.starts(rows, begins)
    if not in_place:
        _free_gradients(edit, grads, freed, offloaded, starts)
    there = load_storages(edit, step, pieces, residency, inserted, rows, starts[_FREE_PARAMETERS], frames)
    if in_place:
        offload_in_place(
            edit, grads, offloaded.placed, offloaded.copies, there[pieces.again[grads.parameter]]
        )
    _use_hosts(edit, offloaded, hosts, inserted, rows, pieces)
    host_of = hosts[pieces.of_parameter[:-1]]
    if early:
        _update(edit, step, grads, offloaded, host_of, inserted, rows, overlap, updated)
    else:
        _left_to_the_optimizer(edit, step, grads, offloaded, host_of)
    # Ops after backward's last one run in its hooks, while Python still holds forward's results.
    hung = [int(offloaded.copies[-1])] if len(grads.after) and grads.after[-1] == end else []
    for row in [*hung, *rows[inserted.moment == len(begins) - 1][-1:].tolist()]:
        edit.hold_to_the_end_of_backward(row)
    # `optimizer_on_host` runs next: without a gradient it leaves these parameters alone.
    # A Step's arrays are shared by all candidates, so they are copied before a change.
    gradient = columns.gradient.copy()
    gradient[mine] = -1
    edit.parameters = replace(columns, gradient=gradient)
    return edit.done()


_FREE_GRADIENTS, _FREE_PARAMETERS = range(2)
_PLACE, _ADD, _DOWN = range(3)


class _OffloadedGrads(NamedTuple):
    """D2H copies of the ready gradients, one row each."""

    copies: I32
    """The copies to the host."""
    hosts: I32
    """The host storages that they produce."""
    first: I32
    """The first addition before the copy, or the copy itself."""
    sums: I32
    """The host sum that the gradient is added to, -1 for none."""
    gradients: I32
    """The storage that the update reads."""
    placed: I32
    """Copies to the places of the weights; none where gradients are offloaded from where autograd made them.
    """


def _offload_gradients(
    edit: Edit, step: Step, grads: BlockGradients, freed: FreedAt, deferred: frozenset[int], *, in_place: bool
) -> _OffloadedGrads:
    """Insert D2H copies of ready gradients; freed ones are added to the host sums before."""
    count = len(grads.after)
    # Only with accumulation there is a sum; in the first micro-batch the host gradient is the sum itself.
    added = np.flatnonzero((grads.sums >= 0) & (freed.row >= 0)).astype(np.int32)
    every = np.arange(count)
    placing = every[: count * in_place]
    row, source = np.concatenate([placing, freed.row[added], every]), np.concatenate([placing, added, every])
    what = np.repeat([_PLACE, _ADD, _DOWN], [len(placing), len(added), count])
    # At one anchor: the copy to the weight's place, additions of gradients that have arrived, then the D2H
    # copy.
    order = np.lexsort((source, what, row))
    row, source, what = row[order], source[order], what[order]
    is_copy, is_added = what == _DOWN, what == _ADD
    n_bytes = grads.n_bytes
    kinds = (
        ("aten.copy_.default", Resource.COMPUTE),
        ("aten.add_.Tensor", Resource.HOST_THREADS),
        ("memtune.to_host.default", Resource.DEVICE_TO_HOST),
    )
    ops = edit.add_kinds(
        kinds,
        what,
        after=grads.after[row],
        phase=Phase.BACKWARD,
        # A copy on the device reads and writes, an addition reads two and writes one, the link carries one.
        traffic_bytes=np.asarray([2, 3, 1])[what] * n_bytes[source],
        call=step.ops.call[grads.after[row]],
        prefetch=is_copy.astype(np.uint8),  # the side stream waits for the compute stream
    )
    # A side-stream copy waits for all compute issued before, and so keeps what that reads alive.
    hold_prefetched_copies(edit, step, grads.after[row], ops)
    copies = ops[is_copy]
    owner, summed = grads.parameter, grads.sums >= 0
    is_deferred = np.isin(columns_of(step.parameters).block[owner], list(deferred))
    held = np.where(is_deferred & ~summed, FOREVER, -1).astype(np.int32)
    hosts = edit.add_storages(
        n_bytes, producer=copies, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner, held_until=held
    )
    first = copies.copy()
    # Reversed: of several values for an index numpy keeps the last, here the first addition.
    first[row[is_added][::-1]] = ops[is_added][::-1]
    if not in_place:
        edit.add_uses(copies, grads.raw)
    sums = _sums_on_host(edit, step, grads, is_deferred)
    edit.add_uses(ops[is_added], hosts[source[is_added]], writes=sums[source[is_added]])
    return _OffloadedGrads(
        copies, hosts, first, sums, np.where(summed, sums, hosts).astype(np.int32), ops[what == _PLACE]
    )


def _sums_on_host(edit: Edit, step: Step, grads: BlockGradients, deferred: Mask) -> I32:
    """Return the host sums of earlier micro-batches."""
    # FSDP2 has a block's sums in one storage; on the host there is one for each parameter.
    summed, columns = grads.sums >= 0, columns_of(step.parameters)
    # Several parameters may share one sum under FSDP2.
    own, gathered = np.unique(grads.sums[summed]), gathers_of(step) is not None
    if gathered:
        # The storage stays on the device while it also has the sum of a parameter that is not offloaded.
        own = np.setdiff1d(own, columns.gradient[columns.block < 0])
    edit.set_storages(tier=step.storages.tier.copy())
    edit.storages.tier[own] = Tier.HOST
    edit.storages.held_until[own] = -1
    edit.storages.held_until[np.intersect1d(own, grads.sums[summed & deferred])] = FOREVER
    if not gathered or not summed.any():
        return grads.sums
    edit.storages.bytes[own] = 0
    sums, owner = grads.sums.copy(), grads.parameter[summed]
    held = np.where(deferred[summed], FOREVER, -1).astype(np.int32)
    sums[summed] = edit.add_storages(
        grads.n_bytes[summed], tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner, held_until=held
    )
    return sums


def insert(edit: Edit, step: Step, pieces: Pieces, inserted: MomentOps, begins: I32) -> I32:
    """Insert the ops of all moments; return their rows."""
    what, row, moment = inserted.what, inserted.row, inserted.moment
    moves, updates = inserted.loads | inserted.reads, what == UPDATE
    traffic = np.zeros(len(what), np.int64)
    traffic[moves] = pieces.n_bytes[row[moves]]
    traffic[updates] = native_update_bytes(step)[row[updates]]
    uses = order_of_use(len(step.blocks))
    call = np.asarray([*uses, -1], np.int32)[moment]
    backward = (moment >= len(step.blocks)) & (what != UPDATE)
    # Updates are no part of backward: recompute and pipelines must not move them.
    phase = np.where(what == UPDATE, Phase.BOUNDARY, np.where(backward, Phase.BACKWARD, Phase.FORWARD))
    rows = edit.add_kinds(
        OPS,
        what,
        before=begins[moment],
        phase=phase.astype(np.uint8),
        traffic_bytes=traffic,
        call=call,
        stream=(what == COPY).astype(np.uint8),  # loads used at once run on the compute stream
        prefetch=(what == PREFETCH).astype(np.uint8),
    )
    # A load that waits for the copy stream also waits for D2H copies whose sources it must not reuse.
    of, waiting = pending_copy_sources(step, begins)
    last = np.searchsorted(moment, of, side="right") - 1  # ops are in the order of their moments
    there = (last >= 0) & (moment[last] == of)
    edit.hold_through(waiting[there], rows[last[there]])
    hold_prefetched_copies(edit, step, begins[moment] - 1, rows)
    return rows


def native_update_bytes(step: Step) -> I64:
    """Return (parameters,) bytes that one native pass moves: gradient, weight, moments both ways."""
    columns, state = columns_of(step.parameters), optimizer_moments(step)
    moments = np.bincount(step.storages.owner[state], step.storages.bytes[state], len(columns.numel)).astype(
        np.int64
    )
    # 4 bytes each: gradient read, weight read and written; moments are read and written.
    return 12 * columns.numel + 2 * moments


@functools.lru_cache(maxsize=64)
def state_bytes(step: Step) -> I64:
    """Return (parameters,) bytes of the optimizer's state, its counters included."""
    state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0) & (step.storages.owner >= 0)
    found: I64 = np.bincount(
        step.storages.owner[state], step.storages.bytes[state], len(step.parameters)
    ).astype(np.int64)
    found.flags.writeable = False
    return found


def _free_gradients(
    edit: Edit, grads: BlockGradients, freed: FreedAt, offloaded: _OffloadedGrads, starts: tuple[I32, I32]
) -> None:
    """Free a gradient in a D2H copy when another one is ready, or when a moment begins."""
    at = (
        np.where(freed.row >= 0, offloaded.first[freed.row], starts[_FREE_GRADIENTS][freed.moment])
        if len(grads.raw)
        else freed.row
    )
    grads.free_in(edit)
    edit.release_before(grads.raw, at)


def load_storages(
    edit: Edit,
    step: Step,
    pieces: Pieces,
    residency: Residency,
    inserted: MomentOps,
    rows: I32,
    drop: I32,
    frames: Frames | None = None,
) -> I32:
    """Add storages for the loads, which the blocks' ops use until the moment that frees them.

    In frames these have no bytes, because the frames are permanent. Returns the storage of each piece in
    backward, -1 last for none.
    """
    n_blocks, count = len(step.blocks), len(pieces.n_bytes)
    # In frames the memory exists, so the copy itself makes the value.
    making = inserted.what == ALLOCATE if frames is None else inserted.loads
    row, moment, producer = inserted.row[making], inserted.moment[making], rows[making]
    n_bytes = pieces.n_bytes[row] if frames is None else np.zeros(len(row), np.int64)
    there = edit.add_storages(n_bytes, producer=producer, kind=Kind.COMMUNICATION, owner=pieces.owner[row])
    if frames is not None:
        edit.add_persistent(np.full(1, frames.n_bytes, np.int64), Kind.COMMUNICATION)
    else:
        edit.add_uses(rows[inserted.loads], writes=there)
    until = dropped_in(residency.drops, len(pieces.of_unit))
    # A load lives until the next moment whose residency drops its unit.
    edit.release_before(there, drop[until[pieces.unit[row], moment]])
    # A unit is loaded at most once in forward and once in backward; backward uses forward's if it is
    # resident.
    in_forward, in_backward = (np.full(count + 1, -1, np.int32) for _ in range(2))
    backward = moment >= n_blocks
    in_forward[row[~backward]] = there[~backward]
    # First forward's, then overwritten where backward loads the piece again.
    in_backward[row[~backward]] = there[~backward]
    in_backward[row[backward]] = there[backward]
    _use_loads(edit, step, pieces, in_forward, in_backward, frames)
    return in_backward


def _use_loads(
    edit: Edit, step: Step, pieces: Pieces, in_forward: I32, in_backward: I32, frames: Frames | None
) -> None:
    """Let the blocks' ops use the storages of the loads; where FSDP2 gathers, its all-gathers alone do."""
    parameter = step.parameter_of[step.uses.storage]
    back = (step.use_phase == Phase.BACKWARD) | (step.use_phase == Phase.RECOMPUTE)
    target = np.where(back, in_backward[pieces.again[parameter]], in_forward[pieces.of_parameter[parameter]])
    gathers = gathers_of(step)
    if frames is not None:
        # A parameter may have several pages, so a moment's first op, or its all-gather, waits for all of
        # them.
        begins = np.repeat(
            first_ops(step) if gathers is None else gathers.of_moments, [len(each) for each in frames.waits]
        )
        edit.add_uses(
            begins, in_backward[np.concatenate([np.asarray(each, np.int32) for each in frames.waits])]
        )
    edit.set_uses(
        storage=np.where((step.use_phase < Phase.BOUNDARY) & (target >= 0), target, edit.uses.storage).astype(
            np.int32
        )
    )
    if gathers is not None:
        mine = in_blocks(step)
        block = columns_of(step.parameters).block[mine]
        # The block's ops read what FSDP2 gathered; only the all-gather reads the rank's rows.
        edit.add_uses(gathers.forward[block], in_forward[pieces.of_parameter[mine]])
        edit.add_uses(gathers.backward[block], in_backward[pieces.again[mine]])


def _use_hosts(
    edit: Edit, offloaded: _OffloadedGrads, hosts: I32, inserted: MomentOps, rows: I32, pieces: Pieces
) -> None:
    """Add the reads of loads, from the host or from SSD to the host first, and the last addition."""
    row, trailing = inserted.row, inserted.what == ADD
    edit.add_uses(rows[trailing], offloaded.hosts[row[trailing]], writes=offloaded.sums[row[trailing]])
    loads, reads = np.flatnonzero(inserted.loads), np.flatnonzero(inserted.reads)
    source = hosts[row[loads]]
    if len(reads):
        edit.add_uses(rows[reads], hosts[row[reads]])
        # Sorted by piece; stable, so a piece's first read belongs to its first load.
        loads, reads = (each[np.argsort(row[each], kind="stable")] for each in (loads, reads))
        n_bytes, owner = pieces.n_bytes[row[reads]], pieces.owner[row[reads]]
        source = edit.add_storages(
            n_bytes, producer=rows[reads], tier=Tier.HOST, kind=Kind.TEMPORARY, owner=owner
        )
    edit.add_uses(rows[loads], source)


def _left_to_the_optimizer(
    edit: Edit, step: Step, grads: BlockGradients, offloaded: _OffloadedGrads, hosts: I32
) -> None:
    """Let the optimizer's ops work on the host's weights and gradients, freed after the last one."""
    columns = columns_of(step.parameters)
    gradient = offloaded.gradients
    moved = np.arange(step.storages.n, dtype=np.int32)
    moved_from = columns.gradient[grads.parameter]
    moved[moved_from] = gradient
    mine = in_blocks(step)
    moved[columns.storage[mine]] = hosts[mine]
    inside = step.use_phase == Phase.OPTIMIZER
    edit.set_uses(storage=np.where(inside, moved[step.uses.storage], edit.uses.storage).astype(np.int32))
    last = np.full(len(gradient), np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[-1], np.int32)
    edit.hold_through(gradient, last)
    if gathers_of(step) is not None:
        # FSDP2 has a block's gradients in one storage, so `moved` has mapped all uses to one parameter's
        # gradient.
        edit.add_uses(last, gradient)
        resident = (columns.block < 0) & np.isin(columns.gradient, moved_from)
        weights = np.flatnonzero(inside & np.isin(step.uses.storage, columns.storage[resident]))
        edit.add_uses(step.uses.op[weights], columns.gradient[step.parameter_of[step.uses.storage[weights]]])


def _update(
    edit: Edit,
    step: Step,
    grads: BlockGradients,
    offloaded: _OffloadedGrads,
    hosts: I32,
    inserted: MomentOps,
    rows: I32,
    overlap: Overlap | None,
    updated: tuple[Units, ...],
) -> None:
    """Add each block's update, which holds its gradients to its end or by the bound of `PendingUpdates`."""
    row, moment, updates = inserted.row, inserted.moment, inserted.what == UPDATE
    update_of = np.full(len(hosts), -1, np.int32)
    update_of[row[updates]] = rows[updates]
    edit.add_uses(rows[updates], writes=hosts[row[updates]])
    there = update_of[grads.parameter] >= 0
    edit.add_uses(update_of[grads.parameter[there]], offloaded.gradients[there])
    state = optimizer_moments(step)
    of_state = update_of[step.storages.owner[state]]
    edit.add_uses(of_state[of_state >= 0], writes=state[of_state >= 0])
    of_grad = columns_of(step.parameters).block[grads.parameter]
    is_deferred = np.isin(of_grad, list(overlap.deferred if overlap is not None else ()))

    def update_left(mine: Mask, at_end: bool) -> None:
        """Update those of the gradients `mine` at the end of the step, or deferred to the next one."""
        left = np.flatnonzero(mine)
        if not len(left):
            return
        left = left[np.lexsort((grads.parameter[left], of_grad[left]))]
        owners, used = grads.parameter[left], offloaded.gradients[left]
        if not at_end:
            # The last step's gradients; with accumulation they are the sums, which are on the host anyway.
            single = grads.sums[left] < 0
            used[single] = edit.add_storages(
                grads.n_bytes[left][single],
                producer=np.full(int(single.sum()), -1, np.int32),
                tier=Tier.HOST,
                kind=Kind.GRADIENT,
                owner=owners[single],
            )
        traffic_bytes = native_update_bytes(step)
        update_outside_of_backward(
            edit, step, owners, hosts[owners], used, state, traffic_bytes, at_end=at_end
        )

    update_left(~there & ~is_deferred, at_end=True)
    if overlap is None:
        last = np.full(int(moment.max()) + 1, -1, np.int32)
        last[moment[updates]] = rows[updates]
        # All gradients of a block are freed together when its update has returned.
        edit.hold_through(offloaded.gradients[there], last[grads.moment[there] + 1])
        return
    block, order = columns_of(step.parameters).block, [each for blocks in updated for each in blocks]
    first = np.full(len(step.blocks), -1, np.int32)
    first[block[row[updates]][::-1]] = rows[updates][::-1]  # the first one is written last
    hold_for_updates(edit, step, offloaded.gradients, grads.n_bytes, of_grad, first, order)
    update_left(is_deferred, at_end=False)


# -- weights only: another mechanism has the gradients -------------------------------------------------------


def streamed_parameters(step: Step, blocks: Container[int]) -> I32:
    """Return the parameters whose weights are offloaded, in the order in which the blocks are used."""
    mine, block = in_blocks(step), columns_of(step.parameters).block
    return np.asarray([each for each in mine.tolist() if int(block[each]) in blocks], np.int32)


def stream_weights(step: Step, residency: Residency, blocks: Container[int]) -> Step:
    """Return `step` with the weights of `blocks` on the device only while `residency` lists them.

    Args:
        step: One that `offload.parameters.parameter_offload_pass.not_in_layers` accepts.
        residency: Blocks to free and load at each moment; entries of other blocks are ignored.
        blocks: Those whose weights are offloaded.
    """
    columns, mine = columns_of(step.parameters), streamed_parameters(step, blocks)
    pieces, edit = Pieces.of_parameters(step, mine), Edit(step)
    end = step.backward_end
    begins = np.append(first_ops(step), np.int32(end + 1)).astype(np.int32)
    edit.storages.bytes[columns.storage[mine]] = 0
    frozen = mine[columns.gradient[mine] < 0]  # the optimizer has host copies of the others
    edit.add_persistent(columns.n_bytes[frozen], Kind.PARAMETER, Tier.HOST, frozen)
    inserted = moment_ops(step, pieces, residency, ((),) * len(begins))
    rows = insert(edit, step, pieces, inserted, begins)
    _, drop = inserted.starts(rows, begins)
    load_storages(edit, step, pieces, residency, inserted, rows, drop)
    return edit.done()
