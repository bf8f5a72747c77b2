"""The pass of `runtime.sharding`: what FSDP2 does to one rank's step, buffer by buffer.

Seen by recording FSDP2 (torch 2.13) on fake tensors: a unit's shards are gathered into one buffer, which is copied out
into the parameters and held until the *next* unit has copied out; backward gathers one unit ahead; the buffer that is
reduce-scattered is held until the next unit's gradients are there.

On CUDA gathers and reductions have streams of their own: a gather waits, in forward, for the copy-out of the unit two before it
and in backward for the one before it (`wait_for_unshard`). On CPU every collective is waited for at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.shares import Mask, Shards, add_storages, divided, raw_gradients, shards_of
from memtune.passes.units import Ragged, Units, column, units_of
from memtune.program import I32, I64, Kind, Phase, Resource, Step

NOTHING = Resource.NOTHING
TO_HOST = "memtune.to_host.default"


Sums = Literal["shards", "whole", "further"]


@dataclass(frozen=True)
class Sharding:
    """How the model state is divided: `degree` ranks share a copy, `replicas` copies exist."""

    degree: int
    replicas: int = 1
    reshard_after_forward: bool = True
    blocks_per_unit: int = 1
    replicas_across_nodes: bool = False
    """Whether the ranks that hold the same shard sit on different nodes, each with a network card of its own."""
    stages_messages: bool = False
    """Whether reductions copy their whole message first and compute waits for collectives, as with gloo on CPU."""
    two_hop: bool = False
    """Whether gradients are averaged between the copies once a step, not in every micro-batch."""
    sums: Sums = "shards"
    """What micro-batches add up: shards, or whole gradients that are reduced in the last one; or nothing here, as shards are
    divided further in every micro-batch."""
    micro_batches: int = 1
    """Per step."""

    @property
    def between_copies(self) -> Resource:
        """The link between ranks that hold the same shard."""
        return Resource.INTER_LINK if self.replicas_across_nodes else Resource.INTRA_LINK

    @property
    def average_phase(self) -> Phase:
        """What runs once per step although it stands in the middle of backward belongs to the boundary."""
        return Phase.BOUNDARY if self.two_hop else self.reduce_phase

    @property
    def reduce_phase(self) -> Phase:
        """Whole sums are reduced once per step."""
        return Phase.BOUNDARY if self.sums == "whole" and self.micro_batches > 1 else Phase.BACKWARD

    @property
    def reduce_streams(self) -> tuple[int, int]:
        """Of the reductions inside a group and between the copies."""
        return (_COMPUTE_STREAM, _COMPUTE_STREAM) if self.stages_messages else (_REDUCE_STREAM, _REPLICA_STREAM)


def shard_states(step: Step, how: Sharding) -> Step:
    """`step` as one rank runs it under FSDP2."""
    units = units_of(step, how.blocks_per_unit)
    edit = Edit(step)
    uses = _Redirect(step)
    if len(units):
        _forward(edit, step, how, units, uses)
        if how.reshard_after_forward:
            _backward(edit, step, how, units, uses)
    reduced = _gradients(edit, step, how)
    edit.use_storage = uses.apply(edit.use_storage)
    return _resized(edit, step, how, reduced)


class _Redirect:
    """Which uses of a whole parameter now go to which gathered copy: by op range, before the optimizer."""

    def __init__(self, step: Step) -> None:
        self._parameter, self._forward = _parameter_uses(step)
        # (parameters + 1,) the copies that forward and that backward use; the last entry serves "no parameter".
        self._in_forward = np.full(len(step.parameters) + 1, -1, np.int32)
        self._in_backward = self._in_forward.copy()

    def to(self, parameters: I32, storages: I32, *, forward: bool) -> None:
        (self._in_forward if forward else self._in_backward)[parameters] = storages

    def apply(self, use_storage: I32) -> I32:
        new = np.where(self._forward, self._in_forward[self._parameter], self._in_backward[self._parameter])
        redirected: I32 = np.where(new >= 0, new, use_storage)
        return redirected


@functools.lru_cache(maxsize=8)
def _parameter_uses(step: Step) -> tuple[I32, Mask]:
    """(u,) parameter that each use before the optimizer reads, -1 for none, and whether it is in forward."""
    return np.where(step.use_phase < Phase.BOUNDARY, step.parameter_of[step.use_storage], -1), step.use_phase == Phase.FORWARD


@dataclass(frozen=True, eq=False)
class _Gathered:
    """What an all-gather of some units made: (units,) buffers and copying ops, and the whole parameters unit by unit."""

    buffer: I32
    copy: I32
    whole: I32


# Streams of the reductions, and how far a gather runs ahead of compute on the link's own stream (`Step.op_prefetch`).
_COMPUTE_STREAM, _REDUCE_STREAM, _REPLICA_STREAM = 1, 2, 3
_AHEAD = {Phase.FORWARD: 3, Phase.BACKWARD: 1}


def _gather(edit: Edit, how: Sharding, whole: Ragged, before: I32, copied_before: I32, phase: Phase) -> _Gathered:
    """Gather units, in their order, each before op `before` and copied out into whole parameters before op `copied_before`.

    `whole` holds the bytes of the parameters; ops of a unit: its buffer, its all-gather, an allocation a parameter, the copy.
    """
    sums, per_unit = whole.sums(), whole.count + 3
    make = np.cumsum(per_unit) - per_unit
    gather, allocate, copy = make + 1, whole.places(make + 2), make + 2 + whole.count
    n_ops = int(per_unit.sum())
    rows = edit.add_ops(
        column(
            n_ops, np.int32,
            (make, edit.name_id("aten.empty.memory_format")), (gather, edit.name_id("memtune.all_gather_into_.default")),
            (allocate, edit.name_id("memtune.allocate")), (copy, edit.name_id("fsdp.split_with_sizes_copy.default")),
        ),
        before=column(
            n_ops, np.int32, (make, before), (gather, before), (allocate, copied_before[whole.part]), (copy, copied_before)
        ),
        phase=phase,
        resource=column(n_ops, np.uint8, (make, NOTHING), (gather, Resource.INTRA_LINK), (allocate, NOTHING), (copy, 0)),
        traffic_bytes=column(n_ops, np.int64, (gather, sums), (copy, 2 * sums)),
        group=column(n_ops, np.int32, (gather, how.degree)),
        stream=column(n_ops, np.uint8, (gather, _COMPUTE_STREAM if how.stages_messages else 0)),
        prefetch=column(n_ops, np.uint8, (gather, _AHEAD[phase] if not how.stages_messages else 0)),
    )  # fmt: skip
    # Storages of a unit: its buffer, the whole parameters.
    buffer = make - 2 * np.arange(len(make))
    inside = whole.places(buffer + 1)
    storages = add_storages(
        edit, [(buffer, rows[make], sums, Kind.COMMUNICATION), (inside, rows[allocate], whole.values, Kind.COMMUNICATION)]
    )
    made = _Gathered(storages[buffer], rows[copy], storages[inside])
    edit.add_uses(rows[gather], made.buffer)
    edit.add_uses(rows[gather], made.buffer, mutates=True)
    edit.add_uses(made.copy, made.buffer)
    edit.add_uses(made.copy[whole.part], made.whole, mutates=True)
    return made


def _forward(edit: Edit, step: Step, how: Sharding, units: Units, uses: _Redirect) -> None:
    """Gather each unit when its forward starts; its buffer stays until the next unit has copied out, the last to the end."""
    whole = replace(
        units.parameters, values=shards_of(columns_of(step.parameters), how.degree).n_bytes[units.parameters.values] * how.degree
    )
    first = units.first_forward
    made = _gather(edit, how, whole, first, first, Phase.FORWARD)
    unit, waiting = _waiting_sources(step, how.blocks_per_unit)
    edit.hold_through(waiting, made.copy[unit])
    # (units,) what stays gathered between forward and backward
    kept = np.full(len(units), not how.reshard_after_forward)
    kept[0] |= units.has_root
    edit.hold_through(made.whole, np.where(kept, units.last_backward, units.last_forward)[whole.part])
    edit.hold_through(made.buffer, np.append(made.copy[1:], step.leave[-1:]))
    uses.to(units.parameters.values, made.whole, forward=True)
    again = kept[whole.part]
    uses.to(units.parameters.values[again], made.whole[again], forward=False)


@functools.lru_cache(maxsize=8)
def _waiting_sources(step: Step, blocks_per_unit: int) -> tuple[I32, I32]:
    """Units whose forward starts with a copy to the host, and what the copy before it holds until then, pair by pair.

    Whatever is put before that copy still sees it.
    """
    pairs: list[tuple[int, int]] = []
    copies = np.flatnonzero(step.op_name == step.names.index(TO_HOST)) if TO_HOST in step.names else np.empty(0, np.intp)
    for unit, op in enumerate(units_of(step, blocks_per_unit).first_forward.tolist()):
        place = int(np.searchsorted(copies, op))
        if 0 < place < len(copies) and copies[place] == op:
            sources = step.use_storage[step.use_op == copies[place - 1]]
            pairs += [(unit, storage) for storage in sources[step.held_until[sources] == op - 1].tolist()]
    found = np.asarray(pairs, np.int32).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _backward(edit: Edit, step: Step, how: Sharding, units: Units, uses: _Redirect) -> None:
    """Gather again, one unit ahead: a unit's buffer is filled when the one after it (in forward order) starts its backward."""
    order = np.arange(len(units))[::-1][: len(units) - units.has_root]
    if not len(order):
        return
    parameters = units.parameters.picked(order)
    whole = replace(parameters, values=shards_of(columns_of(step.parameters), how.degree).n_bytes[parameters.values] * how.degree)
    first = units.first_backward[order]
    start = units.first_backward[0] if units.has_root else first[0]
    made = _gather(edit, how, whole, np.append(start, first[:-1]).astype(np.int32), first, Phase.BACKWARD)
    edit.hold_through(made.whole, units.last_backward[order][whole.part])
    uses.to(parameters.values, made.whole, forward=False)


@dataclass(frozen=True, eq=False)
class _Reductions:
    """The units whose gradients are reduced, in the order in which their backwards end, and the gradients in them."""

    parameters: Ragged
    after: I32
    """(units,) last op of each one's backward."""
    raw: I32
    """(parameters,) the storage that this micro-batch's gradient is made in, not the sum over micro-batches; -1: none."""
    sums: Ragged
    """Sums of earlier micro-batches that are there: rows of the parameters, by unit."""
    accumulated: bool


@functools.lru_cache(maxsize=8)
def _reductions(step: Step, blocks_per_unit: int, kept: Sums) -> _Reductions:
    units, gradient = units_of(step, blocks_per_unit), columns_of(step.parameters).gradient
    raw = gradient if kept == "whole" else raw_gradients(step)
    order = np.argsort(units.last_backward, kind="stable")
    parameters = units.parameters.picked(order)
    parameters = parameters.where(raw[parameters.values] >= 0)
    used = np.flatnonzero(parameters.count)
    parameters = parameters.picked(used)
    sums = parameters.where((step.producer[gradient[parameters.values]] < 0) & (kept == "shards"))
    accumulated = bool(((raw >= 0) & (raw != gradient)).any())
    return _Reductions(parameters, units.last_backward[order][used], raw, sums, accumulated)


@dataclass(frozen=True, eq=False)
class _Reduced:
    """What came of the reductions, and the sharded gradients they made, by unit."""

    of: _Reductions
    taken: I32


def _gradients(edit: Edit, step: Step, how: Sharding) -> _Reduced:
    """Reduce-scatter each unit after its backward, and add it to the sums of the earlier micro-batches.

    Ops of a unit: a buffer, the copy into it, the sharded gradient, the reduction, the all-reduce between replicas if there
    are any, an addition for each sum. In two hops what is all-reduced are the sums of the unit before.
    """
    of, shards = _reductions(step, how.blocks_per_unit, how.sums), shards_of(columns_of(step.parameters), how.degree)
    if not len(of.after):
        return _Reduced(of, np.empty(0, np.int32))
    averaged = _averaged(how, len(of.after))
    mine, per_unit = of.parameters, of.sums.count + 4
    per_unit[averaged] += 1
    n_bytes = replace(mine, values=shards.n_bytes[mine.values]).sums()
    make = np.cumsum(per_unit) - per_unit
    pack, take, reduce = make + 1, make + 2, make + 3
    exchange = make[averaged] + 4
    add = of.sums.places(make + per_unit - of.sums.count)
    n_ops = int(per_unit.sum())
    streams = how.reduce_streams
    names = [(make, "aten.empty.memory_format"), (pack, "fsdp.chunk_cat.default"), (take, "aten.empty.memory_format")]
    names += [
        (reduce, "memtune.reduce_scatter_into_.default"),
        (exchange, "memtune.all_reduce_.default"),
        (add, "aten.add_.Tensor"),
    ]
    rows = edit.add_ops(
        column(n_ops, np.int32, *((place, edit.name_id(name)) for place, name in names if len(place))),
        after=np.repeat(of.after, per_unit),
        phase=column(n_ops, np.uint8, (slice(None), how.reduce_phase), (exchange, how.average_phase)),
        resource=column(
            n_ops, np.uint8, (make, NOTHING), (take, NOTHING), (reduce, Resource.INTRA_LINK), (exchange, how.between_copies)
        ),
        traffic_bytes=column(
            n_ops, np.int64,
            (pack, 2 * n_bytes * how.degree), (reduce, n_bytes * how.degree), (exchange, n_bytes[averaged - how.two_hop]),
            (add, 3 * shards.n_bytes[of.sums.values]),
        ),
        group=column(n_ops, np.int32, (reduce, how.degree), (exchange, how.replicas)),
        stream=column(n_ops, np.uint8, (reduce, streams[0]), (exchange, streams[1]), (add, streams[how.replicas > 1])),
    )  # fmt: skip
    given, taken = _reduction_buffers(edit, how, shards, mine, rows[np.stack([make, pack, take, reduce])])
    raw = of.raw[mine.values]
    edit.add_uses(rows[pack][mine.part], raw)
    edit.add_uses(rows[pack], given, mutates=True)
    edit.add_uses(rows[reduce], given)
    edit.add_uses(rows[reduce], taken, mutates=True)
    edit.add_uses(rows[exchange], _averages(step, of, taken, how)[averaged - how.two_hop], mutates=True)
    edit.add_uses(rows[add], taken[of.sums.part])
    edit.add_uses(rows[add], columns_of(step.parameters).gradient[mine.values[mine.starts]][of.sums.part], mutates=True)

    # The function that reduces still names the last gradient of its loop, and its buffers, when it has added to the sums.
    last = rows[make + per_unit - 1]
    edit.hold_through(np.concatenate([raw[mine.starts + mine.count - 1], given]), np.concatenate([last, last]))
    edit.hold_through(given[:-1], of.after[1:])
    end = np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]
    for op in last[of.after == end].tolist():
        edit.hold_to_the_end_of_backward(op)
    if how.replicas > 1 and how.two_hop:
        _average_the_last(edit, step, how, int(n_bytes[-1]), _averages(step, of, taken, how)[-1:])
    return _Reduced(of, taken)


def _averaged(how: Sharding, units: int) -> I64:
    """Units beside whose reduction something is averaged between the copies: itself, or in two hops the unit before it."""
    return np.arange(int(how.two_hop), units) if how.replicas > 1 else np.arange(0)


def _averages(step: Step, of: _Reductions, taken: I32, how: Sharding) -> I32:
    """(units,) what is averaged of each: its shard, or in two hops the sums that the shard has been added to."""
    sums = columns_of(step.parameters).gradient[of.parameters.values[of.parameters.starts]]
    return np.where(of.sums.count > 0, sums, taken) if how.two_hop else taken


def _average_the_last(edit: Edit, step: Step, how: Sharding, n_bytes: int, sums: I32) -> None:
    """In two hops, the unit that no other follows is averaged when backward ends."""
    row = edit.add_ops(
        "memtune.all_reduce_.default",
        after=np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1:].astype(np.int32),
        phase=how.average_phase,
        resource=how.between_copies,
        traffic_bytes=n_bytes,
        group=how.replicas,
        stream=how.reduce_streams[1],
    )
    edit.add_uses(row, sums, mutates=True)
    edit.hold_to_the_end_of_backward(int(row[0]))


def _reduction_buffers(edit: Edit, how: Sharding, shards: Shards, parameters: Ragged, ops: I32) -> tuple[I32, I32]:
    """What each unit's reduction is given and what it makes; `ops`: (4, units) that make and fill the first, then the second."""
    make, pack, take, reduce = ops
    bytes_of = shards.n_bytes[parameters.values]
    n_bytes = replace(parameters, values=bytes_of).sums()
    place = (4 if how.stages_messages else 2) * np.arange(len(make))
    parts = [(place, make, n_bytes * how.degree, Kind.COMMUNICATION), (place + 1, take, n_bytes, Kind.GRADIENT)]
    if how.stages_messages:
        # On CPU the packing kernel pads what the ranks do not divide, in a copy of its own.
        uneven = replace(parameters, values=bytes_of * shards.uneven[parameters.values]).sums()
        parts += [
            (place + 2, pack, uneven * how.degree, Kind.WORKSPACE),
            (place + 3, reduce, n_bytes * how.degree, Kind.WORKSPACE),
        ]
    storages = add_storages(edit, parts)
    return storages[place], storages[place + 1]


def _resized(edit: Edit, step: Step, how: Sharding, reduced: _Reduced) -> Step:
    """Parameters, state and the optimizer's temporaries at shard size; the optimizer reads the sharded gradients."""
    columns, mine = columns_of(step.parameters), reduced.of.parameters
    shards = shards_of(columns, how.degree)
    raw = reduced.of.raw[reduced.of.raw >= 0]
    # Between the first and the last micro-batch whole sums all stay to the end: with three and more an upper end.
    end = np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]
    edit.held_until[raw] = int(end) if how.sums == "whole" and how.micro_batches > 2 else -1
    edit.kind[raw] = Kind.TEMPORARY
    rows, owner = divided(step)
    ratio = shards.numel / np.maximum(columns.numel, 1)
    edit.bytes[rows] = np.round(edit.bytes[rows] * ratio[owner]).astype(np.int64)
    edit.bytes[raw] = step.bytes[raw]
    gradient = np.full(len(columns.gradient), -1, np.int32)
    if reduced.of.accumulated:
        edit.drop_ops(_whole_sums(step))
    if reduced.of.accumulated and how.sums == "further":
        sums = columns.gradient[columns.gradient >= 0]
        edit.bytes[sums], edit.held_until[sums] = 0, -1
    if reduced.of.accumulated and how.sums == "shards":
        joined = _sums_by_unit(edit, columns.gradient, mine)
        edit.use_storage = joined[edit.use_storage]
        gone = np.flatnonzero(joined[: step.n_storages] != np.arange(step.n_storages))
        np.add.at(edit.bytes, joined[gone], edit.bytes[gone])
        edit.bytes[gone] = 0
        gradient[columns.gradient >= 0] = joined[columns.gradient[columns.gradient >= 0]]
        landing = edit.landing
    else:
        taken, landing = reduced.taken[mine.part], reduced.taken
        gradient[mine.values] = taken
        moved = np.full(step.n_storages, -1, np.int32)
        moved[columns.gradient[mine.values]] = taken
        target = np.where(step.use_phase >= Phase.BOUNDARY, moved[step.use_storage], -1)
        edit.use_storage = np.where(target >= 0, target, edit.use_storage)
        edit.hold_through(reduced.taken, np.full(len(reduced.taken), step.n_ops - 1, np.int32))
    edit.landing = landing
    edit.parameters = replace(columns, gradient=gradient, shapes=shards.shapes, numel=shards.numel).records()
    return edit.done()


def _whole_sums(step: Step) -> Mask:
    """(n,) ops of later micro-batches that add a whole gradient: sums are kept sharded and added to after the reduction."""
    gradient = np.zeros(step.n_storages + 1, bool)  # the last entry serves "none"
    gradient[columns_of(step.parameters).gradient[raw_gradients(step) >= 0]] = True
    adds = (step.use_mutates == 1) & gradient[step.use_storage] & (step.use_phase < Phase.BOUNDARY)
    adds &= step.producer[step.use_storage] < 0
    dropped = np.zeros(step.n_ops, bool)
    dropped[step.use_op[adds]] = True
    return dropped


def _sums_by_unit(edit: Edit, gradient: I32, parameters: Ragged) -> I32:
    """By storage, the one that holds its bytes: the gradients of a unit are parts of one storage, also when summed."""
    joined = np.arange(edit.n_storages, dtype=np.int32)
    joined[gradient[parameters.values]] = gradient[parameters.values[parameters.starts]][parameters.part]
    return joined
