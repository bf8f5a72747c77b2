"""The pass of `parallel.replicas.data_parallel`: DistributedDataParallel's effect on one rank's step, bucket
by bucket.

Three rules, as in torch's reducer with gradients as views of the buckets:

1. Buckets are filled in the order in which gradients become ready (after the first step), closed when they
  reach their size, and are never freed.
2. A gradient is copied into its bucket as soon as autograd has accumulated it, and freed; the optimizer reads
  the bucket. With several micro-batches that happens in the last one: until then the sums exist in addition
  to the buckets.
3. A full bucket is averaged during backward, buckets in order; all are done before backward returns. On the
  stages of a pipeline all of that follows the last backward (`parallel.replicas.grad_buckets`, rule 4).

With more than two micro-batches the middle ones hold all sums to the end of their backward, while the last
one frees each when it is copied. If that makes a middle one the larger, the pass holds the sums here too: an
upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memtune.program import (
    I32,
    I64,
    Edit,
    Kind,
    Phase,
    Resource,
    Step,
    Tier,
    adding_ops,
    columns_of,
    memoized,
)

BUCKET_CAP_MB = 25
"""Size of the buckets that torch fills by default, in MiB."""


@dataclass(frozen=True)
class Replication:
    """Settings of the averaging of gradients over `ranks` replicas."""

    ranks: int
    bucket_bytes: int
    accumulate: int = 1
    """Micro-batches per step; only the last one averages."""
    find_unused: bool = False
    of_blocks: bool = True
    """True if gradients of the blocks are included; else another component averages them."""
    at_end: bool = False
    """True if buckets are filled when a pipeline's last backward has ended, not as gradients get ready."""
    unbucketed: bool = False
    """No buckets: each gradient is averaged as soon as it is ready, by the pass that offloads it."""
    without: frozenset[str] = frozenset()
    """Parameters whose gradients layers of several ranks average; no buffers are broadcast then."""


@dataclass(frozen=True)
class _Arrival:
    """The complete gradient of one parameter of this step, with all its micro-batches."""

    parameter: int
    storage: int
    at: int
    """Op after which it is ready."""


@memoized
def replicate(step: Step, replication: Replication) -> Step:
    """Return `step` as one rank runs it under DDP; `step` itself if no parameter gets a gradient."""
    if replication.unbucketed:
        edit = Edit(step)
        return edit.done() if _broadcast_buffers(edit, step, replication) else step
    arrivals = _at_end(step) if replication.at_end else _arrivals(step, replication)
    if not arrivals:
        return step
    done = _replicated(step, replication, arrivals, hold_sums=False)
    if replication.accumulate > 2:
        bucket_bytes = sum(int(step.storages.bytes[arrival.storage]) for arrival in arrivals)
        # A middle micro-batch: all sums in addition to the buckets, without the frees of the last one.
        if _backward_peak(step) + bucket_bytes > _backward_peak(done):
            return _replicated(step, replication, arrivals, hold_sums=True)
    return done


def _backward_peak(step: Step) -> int:
    return int(step.live_bytes()[: step.backward_end + 1].max())


def _replicated(step: Step, replication: Replication, arrivals: list[_Arrival], *, hold_sums: bool) -> Step:
    edit = Edit(step)
    if not replication.without:
        _broadcast_buffers(edit, step, replication)
    buckets = _buckets(step, arrivals, replication.bucket_bytes)
    n_bytes = np.asarray(
        [sum(int(step.storages.bytes[a.storage]) for a in bucket) for bucket in buckets], np.int64
    )
    if replication.find_unused:
        # torch fills buckets by the order of arrival; those that never arrive come last.
        n_bytes[-1] += _unused_bytes(step, replication)
    rows = edit.add_persistent(n_bytes, Kind.GRADIENT)
    if replication.find_unused:  # DDP's maps of used parameters: one of this rank, one of all ranks
        trainable = sum(p.trainable for p in step.parameters)
        edit.add_persistent(np.full(2, 4 * trainable), Kind.COMMUNICATION)
    # With accumulation the averages run once per step, so their phase is the boundary, though inside
    # backward.
    phase = Phase.BACKWARD if replication.accumulate == 1 else Phase.BOUNDARY
    bucket_of = {a.parameter: int(row) for bucket, row in zip(buckets, rows, strict=True) for a in bucket}
    _copy_in(edit, step, arrivals, bucket_of, phase)
    _average(edit, replication, buckets, rows, n_bytes, phase)
    if hold_sums:
        sums = np.asarray([a.storage for a in arrivals if step.storages.producer[a.storage] < 0], np.int32)
        edit.storages.held_until[sums] = arrivals[-1].at
    return _rebound(edit, step, replication, arrivals, bucket_of)


@memoized
def _others(step: Step, replication: Replication) -> frozenset[int]:
    """Return the parameters whose gradients another component averages."""
    columns = columns_of(step.parameters)
    blocks = () if replication.of_blocks else np.flatnonzero(columns.block >= 0).tolist()
    layers = (
        np.flatnonzero(np.isin(columns.names, list(replication.without))).tolist()
        if replication.without
        else ()
    )
    return frozenset((*blocks, *layers))


@memoized
def _arrivals(step: Step, replication: Replication) -> list[_Arrival]:
    """Return gradients in the order in which they become ready; sums when the last is added."""
    others = _others(step, replication)
    owners = {
        p.gradient: index
        for index, p in enumerate(step.parameters)
        if p.gradient >= 0 and index not in others
    }
    added, found = adding_ops(step), []
    for storage in step.grad_order.tolist():
        if storage in owners:
            at = (
                int(step.storages.grad_ready_after[storage])
                if step.storages.producer[storage] >= 0
                else int(added[storage])
            )
            found.append(_Arrival(owners[storage], storage, at))
    return sorted(found, key=lambda arrival: arrival.at)


def _at_end(step: Step) -> list[_Arrival]:
    """Return gradients in reverse order of registration, all after the last backward."""
    gradient, end = columns_of(step.parameters).gradient, step.backward_end
    return [_Arrival(row, int(gradient[row]), end) for row in np.flatnonzero(gradient >= 0)[::-1].tolist()]


def _buckets(step: Step, arrivals: list[_Arrival], bucket_bytes: int) -> list[list[_Arrival]]:
    """Return ops `first` to `last` of `rows`, None if they use other storages or leave one behind."""
    full: list[list[_Arrival]] = []
    filling: dict[int, list[_Arrival]] = {}
    filled_bytes: dict[int, int] = {}
    for arrival in arrivals:
        itemsize = step.parameters[arrival.parameter].itemsize
        filling.setdefault(itemsize, []).append(arrival)
        filled_bytes[itemsize] = filled_bytes.get(itemsize, 0) + int(step.storages.bytes[arrival.storage])
        # Closed once it has reached the size, so a bucket may exceed it, as in torch's
        # compute_bucket_assignment_by_size.
        if filled_bytes[itemsize] >= bucket_bytes:
            full.append(filling.pop(itemsize))
            filled_bytes[itemsize] = 0
    return sorted([*full, *filling.values()], key=lambda bucket: bucket[0].at)


def _unused_bytes(step: Step, replication: Replication) -> int:
    """Return bytes of parameters without a gradient: they have places in the buckets, and zeros are sent."""
    columns, others = columns_of(step.parameters), _others(step, replication)
    unused = columns.trainable & (columns.gradient < 0)
    unused[list(others)] = False
    return int(columns.n_bytes[unused].sum())


def _copy_in(
    edit: Edit, step: Step, arrivals: list[_Arrival], bucket_of: dict[int, int], phase: Phase
) -> None:
    storages = np.asarray([a.storage for a in arrivals], np.int32)
    after = np.asarray([a.at for a in arrivals], np.int32)
    edit.add_ops(
        "aten.copy_.default",
        after=after,
        phase=phase,
        traffic_bytes=2 * step.storages.bytes[storages],
        call=step.ops.call[after],
        reads=storages,
        writes=np.asarray([bucket_of[a.parameter] for a in arrivals], np.int32),
    )
    # Freed by the copy: `.grad` is a view of the bucket from then on.
    edit.storages.held_until[storages] = -1
    edit.storages.grad_ready_after[storages] = -1


def _average(
    edit: Edit, replication: Replication, buckets: list[list[_Arrival]], rows: I32, n_bytes: I64, phase: Phase
) -> None:
    # Rule 3: a bucket that is full early waits for those before it.
    after = np.maximum.accumulate(np.asarray([bucket[-1].at for bucket in buckets], np.int32))
    edit.add_ops("aten.div_.Tensor", after=after, phase=phase, traffic_bytes=2 * n_bytes, writes=rows)
    edit.add_ops(
        "c10d.allreduce_.default",
        after=after,
        phase=phase,
        resource=Resource.INTRA_LINK,
        traffic_bytes=n_bytes,
        group=replication.ranks,
        writes=rows,
    )


def _broadcast_buffers(edit: Edit, step: Step, replication: Replication) -> bool:
    """Insert the broadcast of the first rank's buffers, one flat message; False if there are none."""
    buffers = np.flatnonzero(
        (step.storages.kind == Kind.BUFFER)
        & (step.storages.producer < 0)
        & (step.storages.tier == Tier.DEVICE)
    ).astype(np.int32)
    total = int(step.storages.bytes[buffers].sum())
    if not total:
        return False
    at = step.forward_starts[-1:].astype(np.int32)
    flat = edit.add_ops("aten.cat.default", before=at, phase=Phase.PROLOGUE, traffic_bytes=2 * total)
    message = edit.add_storages(np.asarray([total]), producer=flat, kind=Kind.COMMUNICATION)
    edit.add_uses(flat[0], buffers)
    edit.add_ops(
        "c10d.broadcast_.default",
        before=at,
        phase=Phase.PROLOGUE,
        resource=Resource.INTRA_LINK,
        traffic_bytes=total,
        group=replication.ranks,
        writes=message,
    )
    back = edit.add_ops(
        "aten.copy_.default", before=at, phase=Phase.PROLOGUE, traffic_bytes=2 * total, reads=message
    )
    edit.add_uses(back[0], writes=buffers)
    return True


def _rebound(
    edit: Edit, step: Step, replication: Replication, arrivals: list[_Arrival], bucket_of: dict[int, int]
) -> Step:
    """Make the optimizer read the buckets; a gradient made by this micro-batch becomes a temporary."""
    moved = np.full(step.storages.n, -1, np.int32)
    for arrival in arrivals:
        # From the boundary on: clipping and the optimizer read views of the buckets.
        moved[arrival.storage] = bucket_of[arrival.parameter]
    target = np.where(step.use_phase >= Phase.BOUNDARY, moved[step.uses.storage], -1)
    edit.set_uses(storage=np.where(target >= 0, target, edit.uses.storage))
    made = np.asarray([a.storage for a in arrivals if step.storages.producer[a.storage] >= 0], np.int32)
    edit.storages.kind[made] = Kind.TEMPORARY
    columns = columns_of(step.parameters)
    rows = np.asarray(sorted(_others(step, replication)), np.intp)
    others = columns.gradient[rows][columns.gradient[rows] >= 0]
    gradient = np.where(np.isin(columns.gradient, others), columns.gradient, -1).astype(np.int32)
    gradient[list(bucket_of)] = list(bucket_of.values())
    edit.parameters = replace(columns, gradient=gradient)
    buckets = np.asarray(sorted(set(bucket_of.values())), np.int32)
    edit.grad_order = np.concatenate([step.grad_order[np.isin(step.grad_order, others)], buckets])
    return edit.done()
