"""The pass of `parallel.collectives.fsdp_comm_hooks`: replaces the collectives of a sharded step, one by one,
by those of the config.

Its input is the sharding pass's output: an all-gather fills a buffer that is copied out into the unit's
parameters, a reduce-scatter reads a buffer into which the unit's gradients were packed. On CUDA all ops of an
all-gather run on FSDP2's stream for gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.parallel.collectives.message_layout import Communication, Form, Row
from memtune.program import I32, I64, U8, WRITES, Edit, Kind, Mask, Phase, Ragged, Resource, Step, columns_of

GATHER = "memtune.all_gather_into_.default"
REDUCE = "memtune.reduce_scatter_into_.default"
_COPY_OUT, _PACK = "fsdp.split_with_sizes_copy.default", "fsdp.chunk_cat.default"
_EMPTY = "aten.empty.memory_format"
SEND_NEXT = "memtune.send_next_into_.default"
# 1 to 3 are those of `sharding.fsdp_pass`: compute, reductions, replicas.
_COMPUTE_STREAM, _GATHER_STREAM, _RING_STREAM = 1, 4, 6


@dataclass(frozen=True, eq=False)
class Messages:
    """Collectives of one kind over the ranks that share the model, in program order."""

    ops: I32
    buffer: I32
    """The full message: output of a gather, input of a reduction."""
    numel: Ragged
    """Values in a rank's shard of each parameter of the unit, in FSDP2's order."""


@functools.lru_cache(maxsize=8)
def gathers(step: Step, degree: int) -> Messages:
    """Return the all-gathers of units over `degree` ranks."""
    ops = _named(step, GATHER, degree)
    buffer = _used(step, ops, mutates=True)
    copies = _named(step, _COPY_OUT)
    source = _used(step, copies, mutates=False)
    copy_of = dict(zip(source.tolist(), copies.tolist(), strict=True))
    # Other gathers over as many ranks (ZeRO's rows, losses) are copied out into no unit.
    ops = ops[[each in copy_of for each in buffer.tolist()]]
    buffer = _used(step, ops, mutates=True)
    out = [_all_used(step, copy_of[each], mutates=True) for each in buffer.tolist()]
    # All parameters of a unit are gathered in one dtype.
    itemsize = int(columns_of(step.parameters).itemsize.max(initial=1))
    return Messages(ops, buffer, _ragged([step.storages.bytes[each] // (degree * itemsize) for each in out]))


@functools.lru_cache(maxsize=8)
def reductions(step: Step, degree: int) -> Messages:
    """Return the reduce-scatters of units over `degree` ranks."""
    ops = _named(step, REDUCE, degree)
    packs = _named(step, _PACK)
    pack_of = dict(zip(_used(step, packs, mutates=True).tolist(), packs.tolist(), strict=True))
    buffer = _used(step, ops, mutates=False)
    kept = np.asarray([each in pack_of for each in buffer.tolist()], bool)
    numel = columns_of(step.parameters).numel
    packed = [_all_used(step, pack_of[each], mutates=False) for each in buffer[kept].tolist()]
    return Messages(ops[kept], buffer[kept], _ragged([numel[step.storages.owner[each]] for each in packed]))


def _ragged(parts: Sequence[npt.NDArray[Any]]) -> Ragged:
    return Ragged(
        np.concatenate([np.empty(0, np.int64), *parts]), np.asarray([len(each) for each in parts], np.int64)
    )


def _named(step: Step, name: str, group: int = 0) -> I32:
    if name not in step.names:
        return np.empty(0, np.int32)
    rows = step.ops.name == step.names.index(name)
    if group:
        rows &= step.ops.group == group
    return np.flatnonzero(rows).astype(np.int32)


def _used(step: Step, ops: I32, *, mutates: bool) -> I32:
    """Return the first storage that each of `ops` writes into, or reads."""
    mine = np.flatnonzero((step.uses.mode == WRITES) == mutates)
    storages: I32 = step.uses.storage[mine[np.searchsorted(step.uses.op[mine], ops)]]
    return storages


def _all_used(step: Step, op: int, *, mutates: bool) -> I32:
    """Return all storages that `op` writes into, or reads, in their order."""
    first, last = np.searchsorted(step.uses.op, [op, op + 1])
    storages: I32 = step.uses.storage[first:last][(step.uses.mode[first:last] == WRITES) == mutates]
    return storages


def row_bytes(numel: Ragged, form: Form, degree: int) -> I64:
    """Return (units,) bytes of a rank's part of a message."""
    # Small parameters, such as norms, are sent as they are.
    kept = numel.values * degree < form.exact_below
    ends = (numel.starts + numel.count).tolist()
    rows = [
        _row_bytes(form, tuple(numel.values[a:b].tolist()), tuple(kept[a:b].tolist()))
        for a, b in zip(numel.starts.tolist(), ends, strict=True)
    ]
    return np.asarray(rows, np.int64)


@functools.lru_cache(maxsize=256)
def _row_bytes(form: Form, numel: tuple[int, ...], kept: tuple[bool, ...]) -> int:
    row: Row = form.row(numel, kept)
    return row.n_bytes


def rewrite_collectives(
    step: Step, communication: Communication, degree: int, *, stages_messages: bool
) -> Step:
    """Return `step` with `communication` instead of FSDP2's collectives in a copy of `degree` ranks."""
    edit = Edit(step)
    if communication.changes_gathers:
        _gathers(edit, step, communication, degree, _COMPUTE_STREAM if stages_messages else _GATHER_STREAM)
    if communication.gradients is not None:
        _exchanges(edit, step, communication, communication.gradients, degree)
    elif communication.ring_reductions:
        _ring_reductions(edit, step, degree, communication.ranks_per_node, stages_messages=stages_messages)
    return edit.done()


def _gathers(edit: Edit, step: Step, communication: Communication, degree: int, stream: int) -> None:
    found = gathers(step, degree)
    ops = found.ops
    phase, backward = step.ops.phase[ops], step.ops.phase[ops] != Phase.FORWARD
    kept, served = _pairs(backward) if communication.secondary else (ops[:0], ops[:0])
    # Gathers that the secondary copy serves stay inside the node, whatever the others do.
    whole = np.ones(len(ops), bool)
    whole[served] = False
    edit.drop_ops(ops)
    for each in (Phase.FORWARD, Phase.BACKWARD):
        mine = np.flatnonzero(whole & (phase == each)).astype(np.int32)
        if communication.weights is not None:
            _quantised(edit, step, found, mine, communication.weights, degree, stream, each)
        elif communication.gather == "hierarchical":
            _by_node(edit, step, found, mine, degree, communication.ranks_per_node, stream, each)
        elif communication.gather == "ho_ring":
            _rings(edit, step, found, mine, degree, communication.ranks_per_node, stream, each)
        else:
            _plain(edit, step, found, mine, degree, stream, each)
    if len(kept):
        _secondary(edit, step, found, kept, served, communication.ranks_per_node, stream)


def _pairs(backward: Mask) -> tuple[I32, I32]:
    """Return the forward gathers that keep a copy and the backward gathers that use it, in reverse."""
    forward, again = np.flatnonzero(~backward), np.flatnonzero(backward)
    # The root, first in forward, is not resharded after it, so backward has no gather of it.
    return forward[::-1][: len(again)].astype(np.int32), again.astype(np.int32)


def _plain(
    edit: Edit, step: Step, found: Messages, mine: I32, degree: int, stream: int, phase: Phase
) -> None:
    """Insert gathers of the messages as they are, by the one operator that memtune puts in FSDP2's place."""
    edit.add_ops(
        GATHER,
        before=found.ops[mine],
        phase=phase,
        resource=Resource.INTRA_LINK,
        group=degree,
        stream=stream,
        traffic_bytes=step.storages.bytes[found.buffer[mine]],
        # FSDP2's prefetch belongs to the first op of the gather; the rest follows it on the stream.
        prefetch=step.ops.prefetch[found.ops[mine]],
        reads=found.buffer[mine],
        writes=found.buffer[mine],
    )


def _by_node(
    edit: Edit, step: Step, found: Messages, mine: I32, degree: int, local: int, stream: int, phase: Phase
) -> None:
    """Gather between nodes first, into a buffer of shards of the same place, then inside the node."""
    at, buffer, nodes = found.ops[mine], found.buffer[mine], degree // local
    whole = step.storages.bytes[buffer]
    parts = _allocate(edit, at, phase, whole // local)
    add = functools.partial(edit.add_ops, before=at, phase=phase, stream=stream)
    between = add(
        GATHER,
        resource=Resource.INTER_LINK,
        group=nodes,
        traffic_bytes=whole // local,
        prefetch=step.ops.prefetch[at],
        reads=buffer,
    )
    edit.add_uses(between, parts, writes=parts)
    # One gather per node: the shards of its ranks are contiguous in the buffer, so that each has its place.
    for _ in range(nodes):
        _message(add, GATHER, Resource.INTRA_LINK, local, whole // nodes, parts, buffer)


def _rings(
    edit: Edit, step: Step, found: Messages, mine: I32, degree: int, local: int, stream: int, phase: Phase
) -> None:
    """Gather node by node: send a shard to the next node while the one before is gathered in this one."""
    at, buffer, nodes = found.ops[mine], found.buffer[mine], degree // local
    whole, part = step.storages.bytes[buffer], buffer
    add = functools.partial(edit.add_ops, before=at, phase=phase, prefetch=step.ops.prefetch[at])
    # With gloo everything runs in one order; on CUDA the ring overlaps with the gathers inside the node.
    ring_stream = stream if stream == _COMPUTE_STREAM else _RING_STREAM
    for hop in range(nodes):
        arriving = part
        if hop < nodes - 1:
            arriving = _allocate(edit, at, phase, whole // degree)
            sent = whole // degree
            _message(add, SEND_NEXT, Resource.INTER_LINK, nodes, sent, part, arriving, stream=ring_stream)
        _message(add, GATHER, Resource.INTRA_LINK, local, whole // nodes, part, buffer, stream=stream)
        part = arriving


def _ring_reductions(edit: Edit, step: Step, degree: int, local: int, *, stages_messages: bool) -> None:
    """Reduce node by node: sums for a node are made here while those before are sent to the next."""
    found, nodes = reductions(step, degree), degree // local
    edit.drop_ops(found.ops)
    whole, sums, arriving = step.storages.bytes[found.buffer], _used(step, found.ops, mutates=True), None
    add = functools.partial(edit.add_ops, before=found.ops, phase=Phase.BACKWARD)
    stream = step.ops.stream[found.ops]
    # As in `_rings`: gloo has one order of messages, NCCL a stream for the ring.
    ring_stream = stream if stages_messages else _RING_STREAM
    for hop in range(nodes):
        mine = sums
        if hop < nodes - 1:
            mine = _allocate(edit, found.ops, Phase.BACKWARD, whole // degree)
        n_bytes = whole // nodes
        inside = _message(add, REDUCE, Resource.INTRA_LINK, local, n_bytes, found.buffer, mine, stream=stream)
        if stages_messages:
            # gloo's reduce-scatter copies its message.
            edit.add_storages(whole // nodes, producer=inside, kind=Kind.WORKSPACE)
        if arriving is not None:
            # Two operands are read, and the sum is written.
            n_bytes = 3 * whole // degree
            add("aten.add_.Tensor", stream=stream, traffic_bytes=n_bytes, reads=arriving, writes=mine)
        if hop < nodes - 1:
            arriving = _allocate(edit, found.ops, Phase.BACKWARD, whole // degree)
            sent = whole // degree
            _message(add, SEND_NEXT, Resource.INTER_LINK, nodes, sent, mine, arriving, stream=ring_stream)
    add("aten.div_.Tensor", stream=stream, traffic_bytes=2 * whole // degree, writes=sums)


def _quantised(
    edit: Edit, step: Step, found: Messages, mine: I32, form: Form, degree: int, stream: int, phase: Phase
) -> None:
    """Quantize the shard in its place in the receive buffer, gather in place, and dequantize all shards."""
    at, buffer = found.ops[mine], found.buffer[mine]
    row = row_bytes(found.numel.picked(mine.astype(np.intp)), form, degree)
    whole = step.storages.bytes[buffer]
    received = _allocate(edit, at, phase, row * degree)
    add = functools.partial(edit.add_ops, before=at, phase=phase, stream=stream)
    add(
        "memtune.quantise_.default",
        prefetch=step.ops.prefetch[at],
        # Reads this rank's shard, writes its quantized form.
        traffic_bytes=whole // degree + row,
        reads=buffer,
        writes=received,
    )
    sent = row * degree
    _message(add, GATHER, Resource.INTRA_LINK, degree, sent, received, received)
    add("memtune.dequantise_.default", traffic_bytes=sent + whole, reads=received, writes=buffer)


def _secondary(
    edit: Edit, step: Step, found: Messages, kept: I32, served: I32, local: int, stream: int
) -> None:
    """Keep on each node what it gathered in forward, a part per rank; backward gathers that there."""
    whole = step.storages.bytes[found.buffer[kept]]
    copy = edit.add_ops(
        "aten.clone.default",
        before=found.ops[kept],
        phase=Phase.FORWARD,
        stream=stream,
        # Reads the part and writes its copy.
        traffic_bytes=2 * whole // local,
        reads=found.buffer[kept],
    )
    parts = edit.add_storages(whole // local, producer=copy, kind=Kind.COMMUNICATION)
    edit.add_ops(
        GATHER,
        before=found.ops[served],
        phase=Phase.BACKWARD,
        resource=Resource.INTRA_LINK,
        group=local,
        stream=stream,
        traffic_bytes=whole,
        prefetch=step.ops.prefetch[found.ops[served]],
        reads=parts,
        writes=found.buffer[served],
    )


def _exchanges(edit: Edit, step: Step, communication: Communication, form: Form, degree: int) -> None:
    """Replace reduce-scatters by two hops, inside the node and between: quantized all-to-all, sum."""
    found, local = reductions(step, degree), communication.ranks_per_node
    nodes = degree // local
    edit.drop_ops(found.ops)
    out = _used(step, found.ops, mutates=True)
    row, numel = row_bytes(found.numel, form, degree), found.numel.sums()
    # float32, whatever the gradients are: sums of the first hop are sent on by the second.
    sums = _allocate(edit, found.ops, Phase.BACKWARD, 4 * nodes * numel)
    stream = step.ops.stream[found.ops]
    whole = step.storages.bytes[found.buffer]
    inside = _Hop(found.ops, stream, Resource.INTRA_LINK, local)
    pack = inside.add(edit, (found.buffer, whole), (sums, 4 * nodes * numel), row * degree)
    if communication.feedback:
        # The error of a step is added in the next one, so it is there before the first op and after the last.
        lost = edit.add_persistent(4 * degree * numel, Kind.COMMUNICATION)
        edit.add_uses(pack, writes=lost)
    between = _Hop(found.ops, stream, Resource.INTER_LINK, nodes)
    between.add(edit, (sums, 4 * nodes * numel), (out, whole // degree), row * nodes)


@dataclass(frozen=True, eq=False)
class _Hop:
    """A hop of all reductions: its position, stream, link and number of ranks."""

    at: I32
    stream: U8
    link: Resource
    ranks: int

    def add(self, edit: Edit, given: tuple[I32, I64], made: tuple[I32, I64], n_bytes: I64) -> I32:
        """Insert the ops, `n_bytes` sent and received each; return the quantizing ops."""
        at, phase = self.at, Phase.BACKWARD
        add = functools.partial(edit.add_ops, before=at, phase=phase, stream=self.stream)
        sent = _allocate(edit, at, phase, n_bytes)
        read = given[1] + n_bytes
        pack = add("memtune.quantise_.default", traffic_bytes=read, reads=given[0], writes=sent)
        received = _allocate(edit, at, phase, n_bytes)
        _message(add, "memtune.all_to_all_into_.default", self.link, self.ranks, n_bytes, sent, received)
        back = n_bytes + made[1]
        add("memtune.dequantise_.default", traffic_bytes=back, reads=received, writes=made[0])
        return pack


def _message(
    add: Callable[..., I32],
    name: str,
    link: Resource,
    group: int,
    n_bytes: I64,
    reads: I32,
    writes: I32,
    **more: U8 | int,
) -> I32:
    """Add one message of `n_bytes` at each place of `add`."""
    return add(name, resource=link, group=group, traffic_bytes=n_bytes, reads=reads, writes=writes, **more)


def _allocate(edit: Edit, before: I32, phase: Phase, n_bytes: I64) -> I32:
    """Add a buffer of `n_bytes` before each of the ops `before`."""
    make = edit.add_ops(_EMPTY, before=before, phase=phase, resource=Resource.NOTHING)
    return edit.add_storages(n_bytes, producer=make, kind=Kind.COMMUNICATION)
