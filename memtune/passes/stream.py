"""The pass of `runtime.store`: the blocks' parameters come and go, their gradients leave as they land, updates are on the host.

A unit of the residency is a block, each parameter of which is a *piece* of memory of its own, or a chunk or page, which is one.
What is in no block is left to `passes.host_optimizer`, which runs next: it finds no gradient at what was done here.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.chunks import Chunks, aligned
from memtune.edit import Edit
from memtune.pages import Pages
from memtune.parameters import columns_of
from memtune.passes.beside import (
    Beside,
    Gone,
    blocks_in_turn,
    hold_for_updates,
    of_a_block_at_once,
    one_at_a_time,
    update_outside_of_backward,
)
from memtune.passes.block_landings import Landings, average, leave_from, on_their_way
from memtune.passes.gathered_rows import gathers_of
from memtune.passes.pieces import Frames, Pieces, copies_of_pages, host_memory, in_blocks
from memtune.passes.turns import ADD, AHEAD, ALLOCATE, COPY, OPS, UPDATE, Turns, dropped_in, turns_of
from memtune.passes.waiting import hold_until_asked, waiting_sources
from memtune.program import FOREVER, I32, I64, WRITES, Kind, Phase, Resource, Step, Tier
from memtune.residency import Residency, Units, order_of_use


@functools.lru_cache(maxsize=8)
def not_in_layers(step: Step, landing: bool = True) -> str:
    """Why the blocks of `step` cannot be taken one after the other; empty where they can.

    Args:
        step: Any step.
        landing: Their gradients are to leave as they land.
    """
    n_blocks, columns = len(step.blocks), columns_of(step.parameters)
    if n_blocks < 2:
        return "no repeated blocks were found, so the order of layers is not known"
    if len(step.call_block) != n_blocks:
        return "a block runs more than once in a forward"
    moments = first_ops(step)
    if (moments < 0).any():
        return f"{step.blocks[int((moments < 0).argmax()) % n_blocks]} has no forward or no backward"
    if (np.diff(moments) <= 0).any() or (step.leave[: n_blocks - 1] >= step.enter[1:n_blocks]).any():
        return "the blocks do not run one after the other"
    shared = np.bincount(columns.storage, minlength=step.n_storages) > 1
    whole = step.bytes[columns.storage] == columns.numel * columns.itemsize
    wrong = (columns.block >= 0) & (shared[columns.storage] | ~whole)
    if wrong.any():
        return f"{columns.names[int(wrong.argmax())]} shares its memory"
    parameter = step.parameter_of[step.use_storage]
    block = np.where(parameter >= 0, columns.block[parameter], -1)
    outside = (block >= 0) & (step.use_phase < Phase.BOUNDARY) & (step.op_block[step.use_op] != block)
    if outside.any():
        return f"{columns.names[int(parameter[outside.argmax()])]} is used outside of its block"
    if not landing:
        return ""
    landings = Landings.of(step)
    ends = np.append(moments, np.int32(step.n_ops))[landings.moment + 1]
    if ((landings.after >= ends) | (landings.after < moments[landings.moment])).any():
        return "a block's gradient is put in place while another block's backward runs"
    return ""


def first_ops(step: Step) -> I32:
    """(2 · blocks,) the op before which each moment begins, -1 where there is none."""
    n_blocks = len(step.blocks)
    forward, backward = np.full(n_blocks, -1, np.int32), np.full(n_blocks, -1, np.int32)
    back = (step.op_phase == Phase.BACKWARD) | (step.op_phase == Phase.RECOMPUTE)
    for first, mine in ((forward, step.op_phase == Phase.FORWARD), (backward, back)):
        rows = np.flatnonzero(mine & (step.op_block >= 0))[::-1].astype(np.int32)
        first[step.op_block[rows]] = rows  # the first one is written last
    forward = np.where(forward >= 0, np.minimum(forward, step.enter[:n_blocks]), -1).astype(np.int32)
    found = np.concatenate([forward, backward[::-1]])
    return found if (gathers := gathers_of(step)) is None else np.minimum(found, gathers.begins)


def moment_of_ops(step: Step) -> I32:
    """(n,) the moment that each op of forward and backward falls into, -1 before the first one and after backward."""
    moment = np.searchsorted(first_ops(step), np.arange(step.n_ops), side="right") - 1
    found: I32 = np.where(step.op_phase < Phase.BOUNDARY, moment, -1).astype(np.int32)
    return found


@functools.lru_cache(maxsize=8)
def sizes_in_blocks(step: Step) -> tuple[Units, Units]:
    """What each parameter of a block takes in a chunk, in the order of use, and its block."""
    columns, mine = columns_of(step.parameters), in_blocks(step)
    n_bytes = (columns.numel * columns.itemsize)[mine]
    return tuple(aligned(each) for each in n_bytes.tolist()), tuple(columns.block[mine].tolist())


def bytes_beside_chunks(step: Step, in_place: bool = False) -> Units:
    """(moments,) most bytes of the device in each moment, chunks left out.

    Args:
        step: What `stream_parameters` made with chunks.
        in_place: As if it had been with gradients in place.
    """
    copies = step.op_name == step.names.index(OPS[COPY][0])  # what FSDP2 gathers is a buffer too, which no copy fills
    chunk = np.zeros(step.n_storages, bool)
    chunk[step.use_storage[copies[step.use_op] & (step.use_mutates == WRITES)]] = True
    chunk &= step.kind == Kind.COMMUNICATION
    live = replace(step, tier=np.where(chunk, np.uint8(Tier.SSD), step.tier)).live_bytes()
    if in_place:
        live = live - on_their_way(step)
    moment = moment_of_ops(step)
    most = np.zeros(2 * len(step.blocks), np.int64)
    np.maximum.at(most, np.maximum(moment, 0), np.where(moment >= 0, live, 0))
    return tuple(most.tolist())


def stream_parameters(
    step: Step, residency: Residency, chunks: Chunks | Pages | None = None, *, early: bool = True, read_ahead: int | None = None,
    ranks: int = 1, beside: Beside | None = None, in_place: bool = False,
) -> Step:  # fmt: skip
    """`step` with the parameters of its blocks on the host, there while `residency` says so.

    Args:
        step: One that `not_in_layers` has nothing to say about.
        residency: Which units are on the device when; its moments are those of `order_of_use`.
        chunks: Where the parameters lie; none: each block is a unit.
        early: Each block is updated natively when it is done with, else all are by the optimizer's own ops.
        read_ahead: The parameters are on SSD, and are read so many moments before they come in; None: they are on the host.
        ranks: That have all weights, and average each gradient before it leaves.
        beside: Gradients leave a block at a time, and blocks are updated as it says; None: each is before the next one computes.
        in_place: Each gradient leaves from where its weight was; of a step that `weights_are_free` in, with chunks.
    """
    frames: Frames | None = None
    if isinstance(chunks, Pages):
        pieces, residency, frames = copies_of_pages(step, chunks, residency)
    else:
        pieces = Pieces.of(step, chunks)
    columns, edit, landings = columns_of(step.parameters), Edit(step), Landings.of(step)
    end = int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    begins = np.append(first_ops(step), np.int32(end + 1)).astype(np.int32)
    mine = in_blocks(step)
    hosts = host_memory(edit, pieces, frames, Tier.HOST if read_ahead is None else Tier.SSD)
    edit.bytes[columns.storage[mine]] = 0
    moment, summed = landings.moment, landings.sums >= 0
    gone = one_at_a_time(moment) if beside is None else of_a_block_at_once(moment, landings.n_bytes, len(begins) - 1)
    late = beside.late if beside is not None else frozenset[int]()
    down = _gradients_down(edit, step, landings, gone, ranks, late, in_place=in_place)
    updated = blocks_in_turn(len(step.blocks), beside) if early else ()
    turns = turns_of(
        step, pieces, residency, gone.added_in(summed, len(begins)), allocates=frames is None, updated=updated,
        read_ahead=read_ahead,
    )  # fmt: skip
    rows = insert(edit, step, pieces, turns, begins)
    starts = turns.starts(rows, begins)
    if not in_place:
        _let_go(edit, landings, gone, down, starts)
    there = stay(edit, step, pieces, residency, turns, rows, starts[_DROP], frames)
    if in_place:
        leave_from(edit, landings, down.placed, down.copies, there[pieces.again[landings.parameter]])
    _use_hosts(edit, down, hosts, turns, rows, pieces)
    host_of = hosts[pieces.of_parameter[:-1]]
    if early:
        _update(edit, step, landings, down, host_of, turns, rows, beside, updated)
    else:
        _left_to_the_optimizer(edit, step, landings, down, host_of)
    hung = [int(down.copies[-1])] if len(landings.after) and landings.after[-1] == end else []
    for row in hung + rows[turns.moment == len(begins) - 1][-1:].tolist():
        edit.hold_to_the_end_of_backward(row)
    gradient = columns.gradient.copy()
    gradient[mine] = -1
    edit.parameters = replace(columns, gradient=gradient)
    return edit.done()


_LAND, _DROP = range(2)
_PLACE, _ADD, _DOWN = range(3)


class _Down(NamedTuple):
    """Of each landing."""

    copies: I32
    """To the host."""
    hosts: I32
    """What they make there."""
    first: I32
    """The first addition before it, itself where there is none."""
    sums: I32
    """What it is added to on the host, -1 for none."""
    gradients: I32
    """What the update reads."""
    placed: I32
    """Copies to where the weights were; of none where gradients leave from where autograd made them."""


def _gradients_down(
    edit: Edit, step: Step, landings: Landings, gone: Gone, ranks: int, late: frozenset[int], *, in_place: bool
) -> _Down:
    """Each gradient's copy starts as it lands, after those that are let go have been added to sums of earlier micro-batches."""
    count = len(landings.after)
    if ranks > 1:
        average(edit, step, landings.after, landings.n_bytes, landings.raw, ranks)
    added = np.flatnonzero((landings.sums >= 0) & (gone.row >= 0)).astype(np.int32)
    every = np.arange(count)
    placing = every[: count * in_place]
    row, source = np.concatenate([placing, gone.row[added], every]), np.concatenate([placing, added, every])
    what = np.repeat([_PLACE, _ADD, _DOWN], [len(placing), len(added), count])
    order = np.lexsort((source, what, row))
    row, source, what = row[order], source[order], what[order]
    is_copy, is_added = what == _DOWN, what == _ADD
    n_bytes = landings.n_bytes
    names = ("aten.copy_.default", "aten.add_.Tensor", "memtune.to_host.default")
    resources = np.asarray([Resource.COMPUTE, Resource.HOST_THREADS, Resource.DEVICE_TO_HOST], np.uint8)
    ops = edit.add_ops(
        np.asarray([edit.name_id(each) for each in names], np.int32)[what],
        after=landings.after[row],
        phase=Phase.BACKWARD,
        resource=resources[what],
        traffic_bytes=np.asarray([2, 3, 1])[what] * n_bytes[source],
        call=step.op_call[landings.after[row]],
        prefetch=is_copy.astype(np.uint8),  # the side stream waits for the compute stream
    )
    hold_until_asked(edit, step, landings.after[row], ops)
    copies = ops[is_copy]
    owner, summed = landings.parameter, landings.sums >= 0
    is_late = np.isin(columns_of(step.parameters).block[owner], list(late))
    held = np.where(is_late & ~summed, FOREVER, -1).astype(np.int32)
    hosts = edit.add_storages(n_bytes, producer=copies, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner, held_until=held)
    first = copies.copy()
    first[row[is_added][::-1]] = ops[is_added][::-1]  # the first one is written last
    if not in_place:
        edit.add_uses(copies, landings.raw)
    sums = _sums_on_host(edit, step, landings, is_late)
    dropped = np.zeros(step.n_ops, bool)
    dropped[landings.after[summed]] = True
    edit.drop_ops(dropped)
    edit.add_uses(ops[is_added], hosts[source[is_added]])
    edit.add_uses(ops[is_added], sums[source[is_added]], mutates=True)
    return _Down(copies, hosts, first, sums, np.where(summed, sums, hosts).astype(np.int32), ops[what == _PLACE])


def _sums_on_host(edit: Edit, step: Step, landings: Landings, late: npt.NDArray[np.bool_]) -> I32:
    """Those of earlier micro-batches; what FSDP2 has of a block in one storage is one for each parameter there."""
    summed, columns = landings.sums >= 0, columns_of(step.parameters)
    own, gathered = np.unique(landings.sums[summed]), gathers_of(step) is not None
    if gathered:  # all of it is there while one that stays on the device has a part of it
        own = np.setdiff1d(own, columns.gradient[columns.block < 0])
    edit.tier = step.tier.copy()
    edit.tier[own] = Tier.HOST
    edit.held_until[own] = -1
    edit.held_until[np.intersect1d(own, landings.sums[summed & late])] = FOREVER
    if not gathered or not summed.any():
        return landings.sums
    edit.bytes[own] = 0
    sums, owner = landings.sums.copy(), landings.parameter[summed]
    nowhere = np.full(len(owner), -1, np.int32)
    held = np.where(late[summed], FOREVER, -1).astype(np.int32)
    sums[summed] = edit.add_storages(
        landings.n_bytes[summed], producer=nowhere, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner, held_until=held
    )
    return sums


def insert(edit: Edit, step: Step, pieces: Pieces, turns: Turns, begins: I32) -> I32:
    """The ops of all moments; returns their rows."""
    what, row, moment = turns.what, turns.row, turns.moment
    names = np.asarray([edit.name_id(name) for name, _ in OPS], np.int32)
    moves, updates = turns.loads | turns.reads, what == UPDATE
    traffic = np.zeros(len(what), np.int64)
    traffic[moves] = pieces.n_bytes[row[moves]]
    traffic[updates] = native_update_bytes(step)[row[updates]]
    uses = order_of_use(len(step.blocks))
    call = np.asarray([*uses, -1], np.int32)[moment]
    backward = (moment >= len(step.blocks)) & (what != UPDATE)
    phase = np.where(what == UPDATE, Phase.BOUNDARY, np.where(backward, Phase.BACKWARD, Phase.FORWARD))
    rows = edit.add_ops(
        names[what],
        before=begins[moment],
        phase=phase.astype(np.uint8),
        resource=np.asarray([resource for _, resource in OPS], np.uint8)[what],
        traffic_bytes=traffic,
        call=call,
        stream=(what == COPY).astype(np.uint8),  # what is used at once is complete in stream order
        prefetch=(what == AHEAD).astype(np.uint8),
    )
    of, waiting = waiting_sources(step, begins)
    last = np.searchsorted(moment, of, side="right") - 1  # turns are in the order of their moments
    there = (last >= 0) & (moment[last] == of)
    edit.hold_through(waiting[there], rows[last[there]])
    return rows


def native_update_bytes(step: Step) -> I64:
    """(parameters,) what one native pass over each moves: gradient and weight, moments there and back."""
    columns, state = columns_of(step.parameters), whole_state(step)
    moments = np.bincount(step.owner[state], step.bytes[state], len(columns.numel)).astype(np.int64)
    return 12 * columns.numel + 2 * moments


@functools.lru_cache(maxsize=64)
def state_bytes(step: Step) -> I64:
    """(parameters,) bytes of the optimizer's state, its counters too."""
    state = (step.kind == Kind.OPTIMIZER) & (step.producer < 0) & (step.owner >= 0)
    found: I64 = np.bincount(step.owner[state], step.bytes[state], len(step.parameters)).astype(np.int64)
    found.flags.writeable = False
    return found


@functools.lru_cache(maxsize=8)
def whole_state(step: Step) -> I32:
    """State storages as large as their parameter; the others count steps."""
    columns = columns_of(step.parameters)
    state = np.flatnonzero((step.kind == Kind.OPTIMIZER) & (step.producer < 0) & (step.owner >= 0)).astype(np.int32)
    owner = step.owner[state]
    whole: I32 = state[step.bytes[state] == columns.numel[owner] * columns.itemsize[owner]]
    return whole


def _let_go(edit: Edit, landings: Landings, gone: Gone, down: _Down, starts: tuple[I32, I32]) -> None:
    """A gradient on its way is let go when another one lands, or when a moment begins."""
    at = np.where(gone.row >= 0, down.first[gone.row], starts[_LAND][gone.moment]) if len(landings.raw) else gone.row
    edit.held_until[landings.raw] = -1
    edit.kind[landings.raw] = Kind.TEMPORARY
    edit.let_go_before(landings.raw, at)


def stay(
    edit: Edit, step: Step, pieces: Pieces, residency: Residency, turns: Turns, rows: I32, drop: I32,
    frames: Frames | None = None,
) -> I32:  # fmt: skip
    """Each load makes storages that the blocks' ops use from then on, until the moment that drops it.

    In frames they take no bytes: the frames do, all the time. Returns what each piece is in backward, -1 last for none.
    """
    n_blocks, count = len(step.blocks), len(pieces.n_bytes)
    making = turns.what == ALLOCATE if frames is None else turns.loads
    row, moment, producer = turns.row[making], turns.moment[making], rows[making]
    n_bytes = pieces.n_bytes[row] if frames is None else np.zeros(len(row), np.int64)
    there = edit.add_storages(n_bytes, producer=producer, kind=Kind.COMMUNICATION, owner=pieces.owner[row])
    if frames is not None:
        nowhere, forever, size = np.full(1, -1, np.int32), np.full(1, FOREVER, np.int32), np.full(1, frames.n_bytes, np.int64)
        edit.add_storages(size, producer=nowhere, kind=Kind.COMMUNICATION, held_until=forever)
    else:
        edit.add_uses(rows[turns.loads], there, mutates=True)
    until = dropped_in(residency.drops, len(pieces.of_unit))
    edit.let_go_before(there, drop[until[pieces.unit[row], moment]])
    in_forward, in_backward = (np.full(count + 1, -1, np.int32) for _ in range(2))  # a unit comes in once a pass at most
    late = moment >= n_blocks
    in_forward[row[~late]] = there[~late]
    in_backward[row[~late]] = there[~late]
    in_backward[row[late]] = there[late]
    parameter = step.parameter_of[step.use_storage]
    back = (step.use_phase == Phase.BACKWARD) | (step.use_phase == Phase.RECOMPUTE)
    target = np.where(back, in_backward[pieces.again[parameter]], in_forward[pieces.of_parameter[parameter]])
    gathers = gathers_of(step)
    if frames is not None:  # a parameter may lie on several pages: a moment's first op waits for all that it uses, or its gather
        begins = np.repeat(first_ops(step) if gathers is None else gathers.of_moments, [len(each) for each in frames.waits])
        edit.add_uses(begins, in_backward[np.concatenate([np.asarray(each, np.int32) for each in frames.waits])])
    edit.use_storage = np.where((step.use_phase < Phase.BOUNDARY) & (target >= 0), target, edit.use_storage).astype(np.int32)
    if gathers is not None:
        mine = in_blocks(step)
        block = columns_of(step.parameters).block[mine]
        edit.add_uses(gathers.forward[block], in_forward[pieces.of_parameter[mine]])
        edit.add_uses(gathers.backward[block], in_backward[pieces.again[mine]])
    return in_backward


def _use_hosts(edit: Edit, down: _Down, hosts: I32, turns: Turns, rows: I32, pieces: Pieces) -> None:
    """What is brought in is read on the host, or from SSD to the host first; the last gradient of a moment is added there."""
    row, trailing = turns.row, turns.what == ADD
    edit.add_uses(rows[trailing], down.hosts[row[trailing]])
    edit.add_uses(rows[trailing], down.sums[row[trailing]], mutates=True)
    loads, reads = np.flatnonzero(turns.loads), np.flatnonzero(turns.reads)
    source = hosts[row[loads]]
    if len(reads):
        edit.add_uses(rows[reads], hosts[row[reads]])
        loads, reads = (each[np.argsort(row[each], kind="stable")] for each in (loads, reads))  # a piece's first read, first load
        n_bytes, owner = pieces.n_bytes[row[reads]], pieces.owner[row[reads]]
        source = edit.add_storages(n_bytes, producer=rows[reads], tier=Tier.HOST, kind=Kind.TEMPORARY, owner=owner)
    edit.add_uses(rows[loads], source)


def _left_to_the_optimizer(edit: Edit, step: Step, landings: Landings, down: _Down, hosts: I32) -> None:
    """Its ops work on the host's weights and gradients, which are let go when it is through."""
    columns = columns_of(step.parameters)
    gradient = down.gradients
    moved = np.arange(step.n_storages, dtype=np.int32)
    moved_from = columns.gradient[landings.parameter]
    moved[moved_from] = gradient
    mine = in_blocks(step)
    moved[columns.storage[mine]] = hosts[mine]
    inside = step.use_phase == Phase.OPTIMIZER
    edit.use_storage = np.where(inside, moved[step.use_storage], edit.use_storage).astype(np.int32)
    last = np.full(len(gradient), np.flatnonzero(step.op_phase == Phase.OPTIMIZER)[-1], np.int32)
    edit.hold_through(gradient, last)
    if gathers_of(step) is not None:  # gradients of a block are rows of one storage, so all uses have become one gradient's
        edit.add_uses(last, gradient)
        stays = (columns.block < 0) & np.isin(columns.gradient, moved_from)
        weights = np.flatnonzero(inside & np.isin(step.use_storage, columns.storage[stays]))
        edit.add_uses(step.use_op[weights], columns.gradient[step.parameter_of[step.use_storage[weights]]])


def _update(
    edit: Edit, step: Step, landings: Landings, down: _Down, hosts: I32, turns: Turns, rows: I32, beside: Beside | None,
    updated: tuple[Units, ...],
) -> None:  # fmt: skip
    """Each block's update reads its gradients and holds them all until its last one, or as `passes.beside` has it."""
    row, moment, updates = turns.row, turns.moment, turns.what == UPDATE
    update_of = np.full(len(hosts), -1, np.int32)
    update_of[row[updates]] = rows[updates]
    edit.add_uses(rows[updates], hosts[row[updates]], mutates=True)
    there = update_of[landings.parameter] >= 0
    edit.add_uses(update_of[landings.parameter[there]], down.gradients[there])
    state = whole_state(step)
    of_state = update_of[step.owner[state]]
    edit.add_uses(of_state[of_state >= 0], state[of_state >= 0], mutates=True)
    if beside is None:
        last = np.full(int(moment.max()) + 1, -1, np.int32)
        last[moment[updates]] = rows[updates]
        edit.hold_through(down.gradients, last[landings.moment + 1])
        return
    block, order = columns_of(step.parameters).block, [each for blocks in updated for each in blocks]
    first = np.full(len(step.blocks), -1, np.int32)
    first[block[row[updates]][::-1]] = rows[updates][::-1]  # the first one is written last
    of_landing = block[landings.parameter]
    hold_for_updates(edit, step, down.gradients, landings.n_bytes, of_landing, first, order)
    behind = np.flatnonzero(np.isin(of_landing, list(beside.late)) | beside.at_end)
    if not len(behind):
        return
    behind = behind[np.lexsort((landings.parameter[behind], of_landing[behind]))]
    mine, used = landings.parameter[behind], down.gradients[behind]
    if not beside.at_end:  # there, until this step's first micro-batch has others
        single = landings.sums[behind] < 0
        used[single] = edit.add_storages(
            landings.n_bytes[behind][single], producer=np.full(int(single.sum()), -1, np.int32), tier=Tier.HOST,
            kind=Kind.GRADIENT, owner=mine[single],
        )  # fmt: skip
    traffic_bytes = native_update_bytes(step)
    update_outside_of_backward(edit, step, mine, hosts[mine], used, state, traffic_bytes, at_end=beside.at_end)
