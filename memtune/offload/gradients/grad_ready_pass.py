"""Grad-ready order of a step, on one rank or after reductions by several: the order of their D2H copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.offload.core import bucket_ends
from memtune.offload.gradients.block_grad_ready_pass import Rows, average_in_buckets, in_ready_order
from memtune.program import (
    FOREVER,
    I32,
    READS,
    WRITES,
    Edit,
    Kind,
    Mask,
    Phase,
    Step,
    Tier,
    columns_of,
    complete_after,
    raw_gradients,
)


@dataclass(frozen=True, eq=False)
class ReadyGradients:
    """Gradients in grad-ready order without the sentinel's; indices are into the updated parameters."""

    index: I32
    raw: I32
    """The storage that this micro-batch produces."""
    sums: I32
    """The sum that it is added to; -1 in the only or first micro-batch."""
    after: I32
    bucket: I32
    full: Mask
    """True where the gradient fills its bucket."""
    watched: int
    """The sentinel's gradient on the device."""
    adds: I32
    """Ops that sum micro-batches on the device; under offload the host sums."""


def ready_gradients(step: Step, parameters: Rows, watched: int, bucket_bytes: int) -> ReadyGradients:
    """Return the grad-ready order of `parameters`, without `parameters[watched]`."""
    ready = in_ready_order(step, parameters)
    index, raw, sums, after = (column[ready[0] != watched] for column in ready)
    full = np.zeros(len(index), np.int32)
    full[bucket_ends(step.storages.bytes[raw].tolist(), bucket_bytes)] = 1
    bucket, adds = (np.cumsum(full) - full).astype(np.int32), after[sums >= 0]
    resident = int(columns_of(step.parameters).gradient[parameters][watched]) if len(parameters) else -1
    return ReadyGradients(index, raw, sums, after, bucket, full.astype(bool), resident, adds)


def average_ready(edit: Edit, step: Step, offloaded: Rows, ranks: int) -> None:
    """Insert an all-reduce of each ready gradient over `ranks` replicas (`grad_all_reduce`).

    Args:
        edit: Of `step`.
        step: Of a replica.
        offloaded: Parameters whose gradients are offloaded; these are averaged in each micro-batch, all
            others as sums.
        ranks: Number of replicas; with one there is nothing to do.
    """
    if ranks == 1:
        return
    gradient, raw = columns_of(step.parameters).gradient, raw_gradients(step)
    rows = np.flatnonzero(gradient >= 0)
    after = complete_after(step, gradient[rows], raw[rows])
    # Offloaded gradients are averaged in each micro-batch, before their copy; the others once, as sums.
    what = np.where(np.isin(rows, offloaded), raw[rows], gradient[rows]).astype(np.int32)
    order = np.argsort(after, kind="stable")
    after, what = after[order], what[order]
    alone = np.arange(len(what), dtype=np.int32)
    average_in_buckets(edit, step, what, after, step.storages.bytes[what], alone, ranks)


def ready_or_reduced(
    edit: Edit, step: Step, parameters: Rows, watched: int, bucket_bytes: int, ranks: int, *, delayed: bool
) -> ReadyGradients:
    """Return `ready_gradients`, or on several ranks the order in which reductions end."""
    # Reduced gradients are parts of one storage of their unit or bucket. Their sums are therefore made
    # on the host, and the sentinel is copied into a storage of its own.
    if ranks == 1:
        return ready_gradients(step, parameters, watched, bucket_bytes)
    columns, reduced = columns_of(step.parameters), reduced_among(step, parameters)
    # Gradients of one reduction are ready in FSDP2's order, or in that of
    # `parallel.sharding.sharded_buckets`.
    # FSDP2 calls hooks in the order of the unit's parameters; ZeRO's buckets fill from the last one back.
    row = parameters if "fsdp.chunk_cat.default" in step.names else -parameters
    index = np.lexsort((row, reduced.after))
    index = index[index != watched].astype(np.int32)
    sizes, summed = columns.n_bytes[parameters], columns.gradient[parameters] != reduced.raw
    sums = np.full(len(index), -1, np.int32)
    sums[summed[index]] = edit.add_storages(
        sizes[index][summed[index]],
        tier=Tier.HOST,
        kind=Kind.GRADIENT,
        owner=parameters[index][summed[index]].astype(np.int32),
        held_until=int(FOREVER) if delayed else -1,
    )
    on_device = columns.gradient[parameters][summed]
    edit.storages.bytes[on_device], edit.storages.held_until[on_device] = 0, -1
    full = np.zeros(len(index), np.int32)
    full[bucket_ends(sizes[index].tolist(), bucket_bytes)] = 1
    bucket, after = (np.cumsum(full) - full).astype(np.int32), reduced.after[index]
    resident = own_storage(edit, step, reduced, watched, int(sizes[watched]), bool(summed[watched]))
    return ReadyGradients(
        index, reduced.raw[index], sums, after, bucket, full.astype(bool), resident, reduced.adds
    )


def ready_after(step: Step, parameters: Rows, watched: int, ranks: int) -> tuple[I32, I32]:
    """Return the indices into `parameters` of offloaded gradients, and the op that completes each."""
    if ranks == 1:
        there = ready_gradients(step, parameters, watched, 0)
        return there.index, there.after
    index = np.flatnonzero(np.arange(len(parameters)) != watched).astype(np.int32)
    return index, reduced_among(step, parameters).after[index]


@dataclass(frozen=True, eq=False)
class Reduced:
    """Gradients reduced over ranks: arrays over `parameters`, except `adds`."""

    raw: I32
    """The storage that this micro-batch's reduction produces."""
    after: I32
    adds: I32
    """Ops that add it to the sum of earlier micro-batches."""


def reduced_among(step: Step, parameters: Rows) -> Reduced:
    """Return the reduced gradients of `parameters` on several ranks."""
    gradient = columns_of(step.parameters).gradient[parameters]
    written = np.full(step.storages.n, -1, np.int32)
    writes = np.flatnonzero((step.uses.mode == WRITES) & (step.use_phase < Phase.OPTIMIZER))
    # The last write completes a gradient, or the cast that makes it where narrow gradients are reduced.
    np.maximum.at(written, step.uses.storage[writes], step.uses.op[writes])
    written[gradient] = np.maximum(written[gradient], step.storages.producer[gradient])
    is_sum = np.zeros(step.storages.n, bool)
    is_sum[gradient[step.storages.producer[gradient] < 0]] = True
    adds = np.unique(step.uses.op[writes[is_sum[step.uses.storage[writes]]]]).astype(np.int32)
    added = np.full(step.ops.n, -1, np.int32)
    reads = step.uses.mode == READS
    # An addition reads one storage, the micro-batch's reduced gradient.
    added[step.uses.op[reads]] = step.uses.storage[reads]
    after = written[gradient]
    return Reduced(np.where(is_sum[gradient], added[after], gradient).astype(np.int32), after, adds)


def own_storage(edit: Edit, step: Step, reduced: Reduced, index: int, n_bytes: int, summed: bool) -> int:
    """Return a storage of its own for the resident gradient `index`; insert the op that fills it."""
    raw, after = reduced.raw[index : index + 1], reduced.after[index : index + 1]
    # It fills its storage already.
    if not summed and int(edit.storages.bytes[raw[0]]) == n_bytes:
        return int(raw[0])
    op = edit.add_ops(
        "aten.add_.Tensor" if summed else "aten.clone.default",
        after=after,
        phase=step.ops.phase[after],
        traffic_bytes=(3 if summed else 2) * n_bytes,
        stream=step.ops.stream[after],
        reads=raw,
    )
    producer = np.full(1, -1, np.int32) if summed else op
    alone = edit.add_storages(np.asarray([n_bytes]), producer=producer, kind=Kind.GRADIENT)
    if summed:
        edit.add_uses(op, writes=alone)
    return int(alone[0])


def end_of_backward(step: Step, grads: ReadyGradients) -> int:
    """Return the last op of backward, or of a reduction that runs once per step at its end."""
    last = step.backward_end
    return max(last, int(grads.after[-1])) if len(grads.after) else last
