"""FSDP2's reductions of gradients, unit by unit: what is packed, sent and added up, and the buffers it takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.shares import Shards, add_storages, raw_gradients, shards_of
from memtune.passes.units import Ragged, column, units_of
from memtune.program import I32, I64, Kind, Phase, Resource, Step
from memtune.sharding import Sharding, Sums

NOTHING = Resource.NOTHING


@dataclass(frozen=True, eq=False)
class Reductions:
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
def _reductions(step: Step, blocks_per_unit: int, kept: Sums) -> Reductions:
    units, gradient = units_of(step, blocks_per_unit), columns_of(step.parameters).gradient
    raw = gradient if kept == "whole" else raw_gradients(step)
    # What a hook makes of a gradient belongs to no block, and comes when autograd puts it in place.
    made = np.where(raw >= 0, step.producer[raw], -1)[units.parameters.values]
    after = units.last_backward.copy()
    np.maximum.at(after, units.parameters.part, made)
    order = np.argsort(after, kind="stable")
    parameters = units.parameters.picked(order)
    parameters = parameters.where(raw[parameters.values] >= 0)
    used = np.flatnonzero(parameters.count)
    parameters = parameters.picked(used)
    sums = parameters.where((step.producer[gradient[parameters.values]] < 0) & (kept == "shards"))
    accumulated = bool(((raw >= 0) & (raw != gradient)).any())
    return Reductions(parameters, after[order][used], raw, sums, accumulated)


@dataclass(frozen=True, eq=False)
class Reduced:
    """What came of the reductions, and the sharded gradients they made, by unit."""

    of: Reductions
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


def reduce_gradients(edit: Edit, step: Step, how: Sharding) -> Reduced:
    """Reduce-scatter each unit after its backward, and add it to the sums of the earlier micro-batches."""
    of, shards = _reductions(step, how.blocks_per_unit, how.sums), shards_of(columns_of(step.parameters), how.degree)
    if not len(of.after):
        return Reduced(of, np.empty(0, np.int32))
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
    return Reduced(of, taken)


def _insert(edit: Edit, how: Sharding, of: Reductions, shards: Shards, messages: _Messages) -> _Rows:
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


def _averages(step: Step, of: Reductions, taken: I32, how: Sharding) -> I32:
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
