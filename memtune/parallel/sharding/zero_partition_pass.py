"""The pass of `parallel.sharding.zero_partition`: unsharded parameters, gradients reduce-scattered bucket by
bucket, weights gathered after the step.

Its rules are those of the mechanism. Ops of a bucket, after the op that makes its last gradient: the message,
the packing, this rank's rows, the reduction, and an addition if earlier micro-batches left a sum. Ops after
the optimizer's: the messages, the packing, the gather of each bucket, copied out while the next bucket is
gathered.

With ZeRO-1 and more than two micro-batches the middle ones hold all sums to the end of their backward, while
the last one frees each when it is packed. If that makes a middle one the larger, the pass holds the sums here
too: an upper bound.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from memtune.program import (
    I32,
    I64,
    WRITES,
    Edit,
    Kind,
    Mask,
    ParameterColumns,
    Phase,
    PlacedOps,
    Ragged,
    Resource,
    Step,
    add_storages,
    adding_ops,
    columns_of,
    held_in_backward,
    raw_gradients,
    resize_to_shards,
    sharded_storages,
    shards_of,
)

NOTHING = Resource.NOTHING
_COMPUTE_STREAM = 1


@dataclass(frozen=True)
class Partitioning:
    """Settings of the sharding of gradients and optimizer state over `ranks`."""

    ranks: int
    bucket_bytes: int
    accumulate: int = 1
    """Micro-batches per step."""
    every_micro_batch: bool = False
    """True if each micro-batch is reduced into shards; else full gradients are accumulated, reduced once."""
    stages_messages: bool = False
    """True if reductions first copy their message and compute waits for collectives (gloo on CPU)."""
    at_end: bool = False
    """True if gradients are sharded by groups whose results are sharded further after backward."""
    after_schedule: bool = False
    """True if by then a pipeline's schedule, and its references except the micro-batches, have been freed."""
    link: Resource = Resource.INTRA_LINK
    """Link between the ranks that share the shards."""
    copies: int = 1
    """Ranks that hold the same shard in the end, if this is the last division."""
    between_copies: Resource = Resource.INTRA_LINK
    overlaps: bool = False
    """True if, with `at_end`, a bucket is reduced once FSDP2 has reduced the units of its parameters."""
    order: tuple[int, ...] = ()
    """Rows of the parameters in the order of the buckets, if that is not the reverse of registration."""
    complete_after: tuple[int, ...] = ()
    """(parameters,) the op of backward after which each gradient may be reduced; empty: backward's end."""

    @property
    def once(self) -> bool:
        """True if the reductions run once per step."""
        return self.accumulate > 1 and not self.every_micro_batch


def partition_states(step: Step, partitioning: Partitioning) -> Step:
    """Return `step` as one rank runs it; `step` itself if no parameter is trained."""
    if not len(_buckets(columns_of(step.parameters), partitioning.bucket_bytes).count):
        return step
    if partitioning.overlaps and (after := _completions(step)):
        order = tuple(sorted(range(len(after)), key=lambda row: (after[row], -row)))
        partitioning = replace(partitioning, complete_after=after, order=order)
    # As the last micro-batch; the recorded step is one of several.
    done = _partitioned(step, partitioning, hold_sums=False)
    if (
        partitioning.accumulate > 2
        and partitioning.once
        and not partitioning.at_end
        and _middle_peak(step, partitioning) > _backward_peak(done)
    ):
        return _partitioned(step, partitioning, hold_sums=True)
    return done


def _partitioned(step: Step, partitioning: Partitioning, *, hold_sums: bool) -> Step:
    edit = Edit(step)
    taken = _reduce(edit, step, partitioning, hold_sums=hold_sums)
    last = _gather(edit, step, partitioning)
    if _optimizer_end(step, partitioning) < step.ops.n:  # what earlier divisions gather comes last
        last = step.ops.n - 1
    # Gradients, the loss: what is held to the end of the step is held while weights are gathered.
    # Weights are gathered in a hook of `optimizer.step()`, before `zero_grad`.
    edit.hold_to_the_end_of_step(last, gradients=True)
    edit.hold_through(taken, last)
    return edit.done()


@functools.lru_cache(maxsize=16)
def _buckets(columns: ParameterColumns, bucket_bytes: int, order: tuple[int, ...] = ()) -> Ragged:
    """Return rows of the trainable parameters, bucket by bucket (rule 2); item sizes distinguish dtypes."""
    # In reverse order of registration, about that in which backward completes gradients.
    place = {row: at for at, row in enumerate(order or range(len(columns.numel) - 1, -1, -1))}
    closed: list[list[int]] = []
    # By item size: a bucket is one message, of one type.
    filling: dict[int, list[int]] = {}
    filled_bytes: dict[int, int] = {}
    rows = [row for row in place if columns.trainable[row] and columns.numel[row] > 0 and columns.shapes[row]]
    for row in rows:
        itemsize = int(columns.itemsize[row])
        filling.setdefault(itemsize, []).append(row)
        filled_bytes[itemsize] = filled_bytes.get(itemsize, 0) + int(columns.numel[row]) * itemsize
        if filled_bytes[itemsize] >= bucket_bytes:
            closed.append(filling.pop(itemsize))
            filled_bytes[itemsize] = 0
    buckets = sorted([*closed, *filling.values()], key=lambda bucket: place[bucket[0]])
    flat = np.asarray([row for bucket in buckets for row in bucket], np.int32)
    return Ragged(flat, np.asarray([len(bucket) for bucket in buckets], np.int64))


@dataclass(frozen=True, eq=False)
class _Arrivals:
    """Storage of each parameter's complete gradient, and the op that makes it; one entry per parameter."""

    whole: I32
    """-1: there is none."""
    at: I32
    adds: Mask
    """(n,) ops that add to the sum of earlier micro-batches."""


@functools.lru_cache(maxsize=16)
def _arrivals(step: Step, every_micro_batch: bool, at_end: bool) -> _Arrivals:
    gradient, end = columns_of(step.parameters).gradient, _end(step, at_end=at_end)
    if at_end:
        return _Arrivals(gradient, np.full(len(gradient), end, np.int32), np.zeros(step.ops.n, bool))
    raw = raw_gradients(step)
    added = np.append(adding_ops(step), np.int32(-1))  # the last entry serves "none"
    summed = raw != gradient
    at = np.where(
        # A gradient that does not exist is known to be missing when backward ends.
        gradient < 0,
        end,
        np.where(summed, added[gradient], step.storages.grad_ready_after[gradient]),
    )
    rows = np.zeros(step.ops.n, bool)
    rows[added[gradient[summed & (gradient >= 0)]]] = True
    return _Arrivals(raw if every_micro_batch else gradient, np.where(at < 0, end, at).astype(np.int32), rows)


def _completions(step: Step) -> tuple[int, ...]:
    """Return (parameters,) the op after which FSDP2's sum of each gradient is complete: the reduction of the
    unit after it, for the last one the end of backward. Empty if a gradient is reduced twice.
    """
    gradient, end = columns_of(step.parameters).gradient, _end(step, at_end=True)
    reduces = np.flatnonzero(step.ops.name == _name(step, "memtune.reduce_scatter_into_.default"))
    reduces = reduces[reduces <= end]
    if not len(reduces):
        return ()
    first = np.full(step.storages.n, step.ops.n, np.int64)
    last = np.maximum(step.storages.producer, 0).astype(np.int64)
    writes = step.uses.mode == WRITES
    np.minimum.at(first, step.uses.storage[writes], step.uses.op[writes])
    np.maximum.at(last, step.uses.storage[writes], step.uses.op[writes])
    there = gradient >= 0
    units, before = (
        np.searchsorted(reduces, each[gradient], side="right") - 1 for each in (last, np.minimum(first, last))
    )
    if (units != before)[there].any():
        return ()
    after = np.append(reduces[1:], end)[units]
    return tuple(np.where(there, after, end).tolist())


def _name(step: Step, name: str) -> int:
    return step.names.index(name) if name in step.names else -1


def _optimizer_end(step: Step, partitioning: Partitioning) -> int:
    """Return the op before which weights are gathered: gathers of earlier divisions come later."""
    return (
        int(np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[-1]) + 1 if partitioning.at_end else step.ops.n
    )


def _end(step: Step, *, at_end: bool = False) -> int:
    """Return the last op of backward; with `at_end`, ops that earlier divisions have appended count, too."""
    if at_end:
        return int(np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[0]) - 1
    return step.backward_end


@dataclass(frozen=True, eq=False)
class _InsertionPoints:
    """Position of each op of a bucket among all reduction ops; (buckets,) each, without missing gradients."""

    make: I64
    flags: I64
    zeros: I64
    """(missing,) zeros for a gradient that does not exist …"""
    clear: I64
    """(missing,) … and its flag."""
    pack: I64
    take: I64
    reduce: I64
    add: I64
    """Empty where there are no sums to add to."""
    average: I64
    """Empty where there are no other copies."""
    per_bucket: I64

    @staticmethod
    def without(missing: Ragged, *, adds: bool, averages: bool) -> _InsertionPoints:
        """Return the positions for buckets with these parts missing."""
        # Message, flags, packing, output, reduction; two per missing gradient; addition; average.
        per_bucket = 5 + 2 * missing.count + adds + averages
        make = np.cumsum(per_bucket) - per_bucket
        fill = missing.places(make + 2) + missing._within
        pack = make + 2 + 2 * missing.count
        add = pack[: len(pack) * adds] + 3
        average = pack[: len(pack) * averages] + 3 + adds
        return _InsertionPoints(
            make=make,
            flags=make + 1,
            zeros=fill,
            clear=fill + 1,
            pack=pack,
            take=pack + 1,
            reduce=pack + 2,
            add=add,
            average=average,
            per_bucket=per_bucket,
        )


def _reduce(edit: Edit, step: Step, partitioning: Partitioning, *, hold_sums: bool) -> I32:
    """Reduce-scatter every bucket; return the sharded gradients, one storage per bucket."""
    columns = columns_of(step.parameters)
    arrivals = _arrivals(step, partitioning.every_micro_batch, partitioning.at_end)
    if partitioning.complete_after:
        arrivals = replace(arrivals, at=np.asarray(partitioning.complete_after, np.int32))
    buckets = _buckets(columns, partitioning.bucket_bytes, partitioning.order)
    there = buckets.where(arrivals.whole[buckets.values] >= 0)
    missing = buckets.where(arrivals.whole[buckets.values] < 0)
    at = _InsertionPoints.without(
        missing, adds=_has_sums(partitioning, arrivals), averages=partitioning.copies > 1
    )
    # Buckets are sent in order, so one waits for all before it.
    after = np.maximum.accumulate(np.maximum.reduceat(arrivals.at[buckets.values], buckets.starts)).astype(
        np.int32
    )
    rows, n_bytes = _reduction_ops(edit, partitioning, columns, at, after)
    given, taken = _buffers(edit, partitioning, columns, at, rows, n_bytes)
    zeros = columns.n_bytes[missing.values]
    edit.add_uses(
        rows[at.pack][missing.part], edit.add_storages(zeros, producer=rows[at.zeros], kind=Kind.TEMPORARY)
    )
    whole, end = arrivals.whole[there.values], _end(step, at_end=partitioning.at_end)
    # Earlier divisions have put several gradients into one storage, which is read once.
    packed = np.unique(np.stack([rows[at.pack][there.part], whole]), axis=1)
    edit.add_uses(packed[0], packed[1])
    edit.storages.held_until[whole] = end if hold_sums else -1
    # From here on the shard is the gradient; later passes must not offload the full one.
    edit.storages.grad_ready_after[whole] = -1
    if not hold_sums or partitioning.accumulate == 1:
        edit.storages.kind[whole] = Kind.TEMPORARY

    reduced_at = np.append(after[1:], end).astype(np.int32)  # rule 4
    edit.hold_through(
        np.concatenate([given, given]), np.concatenate([reduced_at, rows[at.make + at.per_bucket - 1]])
    )
    _extend_to_backward_end(
        edit, step, rows[at.make + at.per_bucket - 1][after == end], end, batches=partitioning.after_schedule
    )
    _resize(edit, step, partitioning)
    if len(at.add):
        sums = _sums(edit, step, there, arrivals, n_bytes, hold_sums=partitioning.copies == 1)
        edit.add_uses(
            rows[at.add],
            taken if partitioning.copies == 1 else sums,
            writes=sums if partitioning.copies == 1 else taken,
        )
        if partitioning.copies == 1:
            edit.hold_through(taken, reduced_at)
            taken = sums
    edit.add_uses(rows[at.average], writes=taken[: len(at.average)])
    _rebind(edit, step, there, taken, partitioning)
    return taken


def _has_sums(partitioning: Partitioning, arrivals: _Arrivals) -> bool:
    """Return True if earlier micro-batches have left sharded sums."""
    return partitioning.every_micro_batch and (
        partitioning.accumulate > 1 if partitioning.at_end else bool(arrivals.adds.any())
    )


def _extend_to_backward_end(edit: Edit, step: Step, ops: I32, end: int, *, batches: bool) -> None:
    """Hold what Python references until backward returns (`batches`: only those) until `ops` have run."""
    last = step.backward_end
    mine = held_in_backward(step, last, end)
    mine &= (step.storages.kind == Kind.BATCH) | (not batches)
    mine &= step.storages.kind != Kind.COMMUNICATION  # FSDP2 frees gathered parameters itself
    storages = np.flatnonzero(mine).astype(np.int32)
    for op in ops.tolist():
        edit.hold_through(storages, op)


def _reduction_ops(
    edit: Edit, partitioning: Partitioning, columns: ParameterColumns, at: _InsertionPoints, after: I32
) -> tuple[I32, I64]:
    """Insert the ops; return them by position, and the bytes of each bucket's message to one rank."""
    buckets = _buckets(columns, partitioning.bucket_bytes, partitioning.order)
    flags = buckets.count * columns.itemsize[buckets.values[buckets.starts]]  # rule 3
    # A rank's part of the message: its rows of each gradient, then the flags.
    n_bytes = (
        replace(buckets, values=shards_of(columns, partitioning.ranks).n_bytes[buckets.values]).sums() + flags
    )
    # With accumulation the reductions run once per step, so their phase is the boundary.
    phase = Phase.BOUNDARY if partitioning.once else Phase.BACKWARD
    average_phase = Phase.BACKWARD if partitioning.accumulate == 1 else Phase.BOUNDARY
    stream = _COMPUTE_STREAM * partitioning.stages_messages
    between = partitioning.between_copies, n_bytes[: len(at.average)], partitioning.copies, stream
    ops = [
        PlacedOps(at.make, "aten.new_empty.default", NOTHING),
        PlacedOps(at.flags, "aten.new_ones.default"),
        PlacedOps(at.zeros, "aten.zeros_like.default"),
        PlacedOps(at.clear, "aten.zero_.default"),
        PlacedOps(at.pack, "aten._chunk_cat.out", traffic_bytes=2 * n_bytes * partitioning.ranks),
        PlacedOps(at.take, "aten.new_empty.default", NOTHING),
        PlacedOps(
            at.reduce,
            "memtune.reduce_scatter_into_.default",
            *(partitioning.link, n_bytes * partitioning.ranks, partitioning.ranks, stream),
        ),
        PlacedOps(at.add, "aten._foreach_add_.List", traffic_bytes=3 * n_bytes[: len(at.add)]),
        PlacedOps(at.average, "memtune.all_reduce_.default", *between, phase=average_phase),
    ]
    return edit.add_placed_ops(ops, after=np.repeat(after, at.per_bucket), phase=phase), n_bytes


def _buffers(
    edit: Edit,
    partitioning: Partitioning,
    columns: ParameterColumns,
    at: _InsertionPoints,
    rows: I32,
    n_bytes: I64,
) -> tuple[I32, I32]:
    """Return the input and output buffers of each reduction."""
    buckets = _buckets(columns, partitioning.bucket_bytes, partitioning.order)
    shards = shards_of(columns, partitioning.ranks)
    flags = partitioning.ranks * buckets.count * columns.itemsize[buckets.values[buckets.starts]]
    place = np.arange(len(n_bytes)) * (5 if partitioning.stages_messages else 3)
    parts = [
        (place, rows[at.make], n_bytes * partitioning.ranks, Kind.COMMUNICATION),
        (place + 1, rows[at.flags], flags, Kind.COMMUNICATION),
        (place + 2, rows[at.take], n_bytes, Kind.GRADIENT),
    ]
    if partitioning.stages_messages:
        # On CPU the packing kernel pads what the ranks do not divide, in a copy of its own.
        uneven = replace(buckets, values=(shards.n_bytes * shards.uneven)[buckets.values]).sums()
        parts += [
            (place + 3, rows[at.pack], uneven * partitioning.ranks, Kind.WORKSPACE),
            (place + 4, rows[at.reduce], n_bytes * partitioning.ranks, Kind.WORKSPACE),
        ]
    storages = add_storages(edit, parts)
    given, taken = storages[place], storages[place + 2]
    edit.add_uses(rows[at.pack], storages[place + 1], writes=given)
    edit.add_uses(rows[at.reduce], given, writes=taken)
    edit.add_uses(rows[at.add], taken[: len(at.add)])
    return given, taken


def _resize(edit: Edit, step: Step, partitioning: Partitioning) -> None:
    """Resize state, the optimizer's temporaries and its work to the shard of their parameter."""
    columns = columns_of(step.parameters)
    ratio = shards_of(columns, partitioning.ranks).numel / np.maximum(columns.numel, 1)
    rows, owner = _optimizer_rows(step)
    resize_to_shards(edit, step, ratio, rows, owner)


@functools.lru_cache(maxsize=16)
def _optimizer_rows(step: Step) -> tuple[I32, I32]:
    """Return storages sharded with their parameter, except it and its gradient, and its row."""
    columns = columns_of(step.parameters)
    rows, owner = sharded_storages(step)
    producer = step.storages.producer[rows]
    mine = columns.trainable[owner] & (rows != columns.storage[owner]) & (rows != columns.gradient[owner])
    state = (producer < 0) & (step.storages.kind[rows] == Kind.OPTIMIZER)
    # By phase, which leaves out gradients on their way through earlier divisions.
    mine &= state | ((producer >= 0) & (step.ops.phase[producer] == Phase.OPTIMIZER))
    return rows[mine], owner[mine]


def _sums(
    edit: Edit, step: Step, there: Ragged, arrivals: _Arrivals, n_bytes: I64, *, hold_sums: bool
) -> I32:
    """Replace the sums of earlier micro-batches by one storage per bucket; return them."""
    if arrivals.adds.any():
        edit.drop_ops(arrivals.adds)
        gradient = columns_of(step.parameters).gradient[there.values]
        edit.storages.bytes[gradient] = 0
        edit.storages.held_until[gradient] = -1
    before = np.full(len(n_bytes), -1, np.int32)
    return edit.add_storages(
        n_bytes, producer=before, kind=Kind.GRADIENT, held_until=before if hold_sums else -1
    )


def _rebind(edit: Edit, step: Step, there: Ragged, taken: I32, partitioning: Partitioning) -> None:
    """Make the optimizer read this rank's rows of the gradients."""
    columns = columns_of(step.parameters)
    moved = np.full(step.storages.n, -1, np.int32)
    moved[columns.gradient[there.values]] = taken[there.part]
    target = np.where(step.uses.op > _end(step, at_end=partitioning.at_end), moved[step.uses.storage], -1)
    edit.set_uses(storage=np.where(target >= 0, target, edit.uses.storage))
    gradient = np.full(len(columns.gradient), -1, np.int32)
    gradient[there.values] = taken[there.part]
    edit.grad_order = taken
    shards, trained = shards_of(columns, partitioning.ranks), columns.trainable
    shapes = tuple(
        shard if mine else whole
        for shard, whole, mine in zip(shards.shapes, columns.shapes, trained.tolist(), strict=True)
    )
    numel = np.where(trained, shards.numel, columns.numel)
    edit.parameters = replace(columns, gradient=gradient, shapes=shapes, numel=numel)


def _gather(edit: Edit, step: Step, partitioning: Partitioning) -> int:
    """Gather the updated rows of every bucket; return the last op."""
    columns = columns_of(step.parameters)
    buckets = _buckets(columns, partitioning.bucket_bytes, partitioning.order)
    shards = shards_of(columns, partitioning.ranks)
    buckets = buckets.picked(np.arange(len(buckets.count))[::-1])
    n_bytes = replace(buckets, values=shards.n_bytes[buckets.values]).sums()
    count = len(n_bytes)
    # Each bucket's copy-out follows the next bucket's gather, so the ops of neighbours interleave.
    make = np.maximum(4 * np.arange(count) - 1, 0)
    pack, gather, copy = make + 1, make + 2, np.append(make[1:] + 3, 4 * count - 1)
    link = (
        partitioning.link,
        n_bytes * partitioning.ranks,
        partitioning.ranks,
        _COMPUTE_STREAM * partitioning.stages_messages,
    )
    ops = [
        PlacedOps(make, "aten.new_empty.default", NOTHING),
        PlacedOps(pack, "aten._foreach_copy_.default", traffic_bytes=2 * n_bytes),
        PlacedOps(gather, "memtune.all_gather_into_.default", *link),
        PlacedOps(copy, "aten._foreach_copy_.default", traffic_bytes=2 * n_bytes * partitioning.ranks),
    ]
    rows = edit.add_placed_ops(
        ops,
        before=np.full(4 * count, _optimizer_end(step, partitioning), np.int32),
        phase=Phase.BOUNDARY,  # the optimizer itself may run elsewhere
    )
    whole = add_storages(
        edit, [(np.arange(count), rows[make], n_bytes * partitioning.ranks, Kind.COMMUNICATION)]
    )
    weights = columns.storage[buckets.values]
    edit.add_uses(rows[pack][buckets.part], weights)
    edit.add_uses(rows[pack], writes=whole)
    edit.add_uses(rows[gather], writes=whole)
    edit.add_uses(rows[copy], whole)
    edit.add_uses(rows[copy][buckets.part], writes=weights)
    return int(rows[-1])


def _middle_peak(step: Step, partitioning: Partitioning) -> int:
    """Return device bytes at the peak of a micro-batch that is neither the first nor the last."""
    columns = columns_of(step.parameters)
    ratio = shards_of(columns, partitioning.ranks).numel / np.maximum(columns.numel, 1)
    rows, owner = _optimizer_rows(step)
    n_bytes = step.storages.bytes.copy()
    n_bytes[rows] = np.round(n_bytes[rows] * ratio[owner]).astype(np.int64)
    return _backward_peak(step.with_storages(bytes=n_bytes))


def _backward_peak(step: Step) -> int:
    return int(step.live_bytes()[: _end(step) + 1].max())
