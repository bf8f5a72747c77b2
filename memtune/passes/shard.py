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
from memtune.passes.gathers import Gathered, When, gather_units
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
    reshard_after_forward: bool | int = True
    """Whether a unit's parameters go between forward and backward; a number: what stays is divided over groups of that many."""
    blocks_per_unit: int = 1
    keeps_root: bool = True
    """Whether what is in no block stays gathered between forward and backward."""
    prefetch: int | None = None
    """Units gathered ahead of the one that runs; None: as FSDP2 does it, none in forward and one in backward."""
    reduce_itemsize: int | None = None
    """Bytes of an element of a gradient on the link; None: as many as it has."""
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

    @property
    def gather_stream(self) -> int:
        """Of the gathers: they wait for nothing but the link, or compute waits for them."""
        return _COMPUTE_STREAM if self.stages_messages else 0

    @property
    def group_after_forward(self) -> int:
        """Ranks over which a unit is divided between its forward and its backward."""
        return self.degree if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward

    def ahead(self, phase: Phase) -> int:
        """How far a gather runs ahead of compute on the link's own stream (`Step.op_prefetch`)."""
        if self.stages_messages:
            return 0
        return 1 if phase == Phase.BACKWARD else 2 if self.prefetch else 3


def shard_states(step: Step, how: Sharding) -> Step:
    """`step` as one rank runs it under FSDP2."""
    units = units_of(step, how.blocks_per_unit)
    edit = Edit(step)
    uses = _Redirect(step)
    if len(units):
        kept = np.full(len(units), not how.reshard_after_forward)
        kept[0] |= units.has_root and how.keeps_root
        secondary = _forward(edit, step, how, units, kept, uses)
        if not kept.all():
            _backward(edit, step, how, units, kept, secondary, uses)
    reduced = _gradients(edit, step, how)
    edit.use_storage = uses.apply(edit.use_storage)
    return _resized(edit, step, how, reduced)


class _Redirect:
    """Which uses of a whole parameter now go to which gathered copy: by op range, before the optimizer."""

    def __init__(self, step: Step) -> None:
        self._rows, self._parameter, self._forward = _parameter_uses(step)
        # (parameters,) the copies that forward and that backward use.
        self._in_forward = np.full(len(step.parameters), -1, np.int32)
        self._in_backward = self._in_forward.copy()

    def to(self, parameters: I32, storages: I32, *, forward: bool) -> None:
        (self._in_forward if forward else self._in_backward)[parameters] = storages

    def apply(self, use_storage: I32) -> I32:
        new = np.where(self._forward, self._in_forward[self._parameter], self._in_backward[self._parameter])
        redirected = use_storage.copy()
        redirected[self._rows[new >= 0]] = new[new >= 0]
        return redirected


@functools.lru_cache(maxsize=8)
def _parameter_uses(step: Step) -> tuple[I64, I32, Mask]:
    """The uses of parameters before the optimizer: their rows, which parameter each reads, and whether it is in forward."""
    parameter = step.parameter_of[step.use_storage]
    rows = np.flatnonzero((parameter >= 0) & (step.use_phase < Phase.BOUNDARY))
    return rows, parameter[rows], step.use_phase[rows] == Phase.FORWARD


_COMPUTE_STREAM, _REDUCE_STREAM, _REPLICA_STREAM = 1, 2, 3


def _forward(edit: Edit, step: Step, how: Sharding, units: Units, kept: Mask, uses: _Redirect) -> _Secondary | None:
    """Gather each unit when its forward starts; its buffer stays until the next unit has copied out, the last to the end."""
    whole = _whole(step, how, units.parameters)
    place = np.arange(len(units))
    when = When(np.maximum(place - (how.prefetch or 0), 0), place, units.first_forward)
    made = gather_units(edit, whole, when, Phase.FORWARD, how.degree, ahead=how.ahead(Phase.FORWARD), stream=how.gather_stream)
    unit, waiting = _waiting_sources(step, how.blocks_per_unit)
    edit.hold_through(waiting, _last_at(made, when)[unit])
    # What stays gathered between forward and backward.
    edit.hold_through(made.whole, np.where(kept, units.last_backward, units.last_forward)[whole.part])
    edit.hold_through(made.buffer, np.append(made.copy[1:], step.leave[-1:]))
    secondary = None
    if how.group_after_forward < how.degree and not kept.all():
        divided = ~kept
        divided[0] &= not units.has_root
        secondary = _keep(edit, how, made, whole, np.where(divided, units.last_forward, -1).astype(np.int32))
    uses.to(units.parameters.values, made.whole, forward=True)
    again = kept[whole.part]
    uses.to(units.parameters.values[again], made.whole[again], forward=False)
    return secondary


def _last_at(made: Gathered, when: When) -> I32:
    """(units,) the last op put before the forward of each: its own copy, or the last gather that runs ahead from there."""
    last = made.copy.copy()
    ahead = when.issued < when.used
    last[when.issued[ahead]] = made.gather[ahead]  # of several gathers in one place the last one stays
    return last


def _whole(step: Step, how: Sharding, parameters: Ragged) -> Ragged:
    """Bytes of each parameter when gathered, padded to what the ranks hold."""
    return replace(parameters, values=shards_of(columns_of(step.parameters), how.degree).n_bytes[parameters.values] * how.degree)


@dataclass(frozen=True, eq=False)
class _Secondary:
    """What groups smaller than the sharding degree keep of units between forward and backward, parameter by parameter."""

    part: I32
    """(units, parameters) flattened: the storage of each, -1 where there is none."""


def _keep(edit: Edit, how: Sharding, made: Gathered, whole: Ragged, last_forward: I32) -> _Secondary:
    """Copy this rank's part of each parameter when its unit's forward ends, then let the whole one go."""
    mine = np.flatnonzero(last_forward[whole.part] >= 0)
    n_bytes = whole.values[mine] // how.group_after_forward
    copy = edit.add_ops(
        "aten.clone.default", after=last_forward[whole.part[mine]], phase=Phase.FORWARD, traffic_bytes=2 * n_bytes
    )
    parts = np.full(len(whole.values), -1, np.int32)
    parts[mine] = edit.add_storages(n_bytes, producer=copy, kind=Kind.COMMUNICATION)
    edit.add_uses(copy, made.whole[mine])
    return _Secondary(parts)


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


def _backward(
    edit: Edit, step: Step, how: Sharding, units: Units, kept: Mask, secondary: _Secondary | None, uses: _Redirect
) -> None:
    """Gather again, by default one unit ahead: its buffer is filled when the backward of the one after it (forward) starts."""
    order = np.arange(len(units))[::-1]
    if units.has_root:  # its backward begins where the model's does
        order = np.concatenate([order[-1:], order[:-1]])
    starts, place = units.first_backward[order], np.arange(len(order))
    order, place = order[~kept[order]], place[~kept[order]]
    early = np.maximum(place - (1 if how.prefetch is None else how.prefetch), 0)
    when = When(early, place, starts)
    parameters = units.parameters.picked(order)
    whole = _whole(step, how, parameters)
    groups = np.where((order == 0) & units.has_root, how.degree, how.group_after_forward)
    made = gather_units(edit, whole, when, Phase.BACKWARD, groups, ahead=how.ahead(Phase.BACKWARD), stream=how.gather_stream)
    edit.hold_through(made.whole, units.last_backward[order][whole.part])
    uses.to(parameters.values, made.whole, forward=False)
    if secondary is not None:
        parts = Ragged(secondary.part, units.parameters.count).picked(order)
        there = parts.values >= 0
        edit.hold_through(parts.values[there], made.copy[parts.part[there]])


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


@dataclass(frozen=True, eq=False)
class _Messages:
    """What the reductions send."""

    n_bytes: I64
    """(units,) of a shard in the gradients' own type."""
    sent: I64
    """(units,) of a shard as it travels."""
    averaged: I64
    """Units beside whose reduction something is averaged between the copies."""
    cast: I64
    """Units whose gradients travel in another type than their own."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """The ops of the reductions: one per unit, averaged unit, cast unit or sum."""

    make: I32
    pack: I32
    take: I32
    reduce: I32
    exchange: I32
    cast: I32
    add: I32
    last: I32
    """(units,) the last one of each unit."""


def _gradients(edit: Edit, step: Step, how: Sharding) -> _Reduced:
    """Reduce-scatter each unit after its backward, and add it to the sums of the earlier micro-batches."""
    of, shards = _reductions(step, how.blocks_per_unit, how.sums), shards_of(columns_of(step.parameters), how.degree)
    if not len(of.after):
        return _Reduced(of, np.empty(0, np.int32))
    mine = of.parameters
    n_bytes = replace(mine, values=shards.n_bytes[mine.values]).sums()
    sent = _in_type(step, mine, n_bytes, how)
    messages = _Messages(n_bytes, sent, _averaged(how, len(of.after)), _cast_units(step, mine, how))
    rows = _insert(edit, how, of, shards, messages)
    given, taken = _reduction_buffers(edit, how, shards, mine, sent, rows)
    raw, averaged = of.raw[mine.values], messages.averaged
    edit.add_uses(rows.pack[mine.part], raw)
    edit.add_uses(rows.pack, given, mutates=True)
    edit.add_uses(rows.reduce, given)
    edit.add_uses(rows.reduce, taken, mutates=True)
    edit.add_uses(rows.exchange, _averages(step, of, taken, how)[averaged - how.two_hop], mutates=True)
    if len(rows.cast):
        edit.add_uses(rows.cast, taken[messages.cast])
        taken = taken.copy()
        taken[messages.cast] = edit.add_storages(n_bytes[messages.cast], producer=rows.cast, kind=Kind.GRADIENT)
    edit.add_uses(rows.add, taken[of.sums.part])
    edit.add_uses(rows.add, columns_of(step.parameters).gradient[mine.values[mine.starts]][of.sums.part], mutates=True)

    # The function that reduces still names the last gradient of its loop, and its buffers, when it has added to the sums.
    edit.hold_through(np.concatenate([raw[mine.starts + mine.count - 1], given]), np.concatenate([rows.last, rows.last]))
    edit.hold_through(given[:-1], of.after[1:])
    end = np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]
    for op in rows.last[of.after == end].tolist():
        edit.hold_to_the_end_of_backward(op)
    if how.replicas > 1 and how.two_hop:
        _average_the_last(edit, step, how, int(sent[-1]), _averages(step, of, taken, how)[-1:])
    return _Reduced(of, taken)


def _insert(edit: Edit, how: Sharding, of: _Reductions, shards: Shards, messages: _Messages) -> _Rows:
    """Insert the ops.

    Of a unit: a buffer, the copy into it, the sharded gradient, the reduction, the all-reduce between replicas if there are any,
    a cast if it travelled in another type, an addition for each sum. In two hops what is all-reduced are the sums of the unit
    before.
    """
    n_bytes, sent, averaged = messages.n_bytes, messages.sent, messages.averaged
    per_unit = of.sums.count + 4
    per_unit[averaged] += 1
    per_unit[messages.cast] += 1
    make = np.cumsum(per_unit) - per_unit
    pack, take, reduce, exchange = make + 1, make + 2, make + 3, make[averaged] + 4
    end = make + per_unit
    cast, add = (end - of.sums.count - 1)[messages.cast], of.sums.places(end - of.sums.count)
    n_ops = int(per_unit.sum())
    streams = how.reduce_streams
    names = [
        (make, "aten.empty.memory_format"),
        (pack, "fsdp.chunk_cat.default"),
        (take, "aten.empty.memory_format"),
        (reduce, "memtune.reduce_scatter_into_.default"),
        (exchange, "memtune.all_reduce_.default"),
        (cast, "aten._to_copy.default"),
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
            (pack, (n_bytes + sent) * how.degree), (reduce, sent * how.degree), (exchange, sent[averaged - how.two_hop]),
            (cast, (n_bytes + sent)[messages.cast]), (add, 3 * shards.n_bytes[of.sums.values]),
        ),
        group=column(n_ops, np.int32, (reduce, how.degree), (exchange, how.replicas)),
        stream=column(n_ops, np.uint8, (reduce, streams[0]), (exchange, streams[1]),
            (cast, streams[how.replicas > 1]), (add, streams[how.replicas > 1])),
    )  # fmt: skip
    return _Rows(*(rows[place] for place in (make, pack, take, reduce, exchange, cast, add, end - 1)))


def _cast_units(step: Step, parameters: Ragged, how: Sharding) -> I64:
    """Units whose gradients travel in another type than their own."""
    itemsize = columns_of(step.parameters).itemsize[parameters.values[parameters.starts]]
    return np.flatnonzero(itemsize != (how.reduce_itemsize or itemsize))


def _in_type(step: Step, parameters: Ragged, n_bytes: I64, how: Sharding) -> I64:
    """(units,) `n_bytes` of gradients in the type in which they travel."""
    itemsize = columns_of(step.parameters).itemsize[parameters.values[parameters.starts]].astype(np.int64)
    travelling: I64 = n_bytes // itemsize * (how.reduce_itemsize or itemsize)
    return travelling


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


def _reduction_buffers(edit: Edit, how: Sharding, shards: Shards, parameters: Ragged, sent: I64, rows: _Rows) -> tuple[I32, I32]:
    """What each unit's reduction is given and what it makes; `sent`: (units,) bytes of a shard as it travels."""
    bytes_of = shards.n_bytes[parameters.values]
    place = (4 if how.stages_messages else 2) * np.arange(len(rows.make))
    parts = [(place, rows.make, sent * how.degree, Kind.COMMUNICATION), (place + 1, rows.take, sent, Kind.GRADIENT)]
    if how.stages_messages:
        # On CPU the packing kernel pads what the ranks do not divide, in a copy of its own.
        uneven = replace(parameters, values=bytes_of * shards.uneven[parameters.values]).sums()
        parts += [
            (place + 2, rows.pack, uneven * how.degree, Kind.WORKSPACE),
            (place + 3, rows.reduce, sent * how.degree, Kind.WORKSPACE),
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
        later = _uses_after_backward(step)
        target = moved[step.use_storage[later]]
        edit.use_storage = edit.use_storage.copy()
        edit.use_storage[later[target >= 0]] = target[target >= 0]
        edit.hold_through(reduced.taken, np.full(len(reduced.taken), step.n_ops - 1, np.int32))
    edit.landing = landing
    edit.parameters = replace(columns, gradient=gradient, shapes=shards.shapes, numel=shards.numel)
    return edit.done()


@functools.lru_cache(maxsize=8)
def _uses_after_backward(step: Step) -> I64:
    """Rows of the uses by ops that run once a step, after backward."""
    return np.flatnonzero(step.use_phase >= Phase.BOUNDARY)


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
