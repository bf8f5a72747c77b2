"""The pass of `offload.ssd_states.ssd_overlapped_optimizer`: updates from SSD overlapped with backward."""

from __future__ import annotations

import numpy as np

from memtune.offload.gradients import ReadyGradients, Rows, average_ready, end_of_backward, ready_or_reduced
from memtune.offload.optimizer import (
    ADD,
    COPY,
    READ,
    SENTINEL,
    UP,
    UPDATE,
    WRITE,
    InsertedOp,
    InsertedOps,
    free_buckets,
    host_gradients,
    insert_ops,
    needed_after_ready,
    sentinel_row,
    sums_to_host,
    without_own_update,
)
from memtune.offload.ssd_states.ssd_optimizer_pass import Pieces
from memtune.program import Edit, Phase, Step, columns_of


def not_overlappable(step: Step, ranks: int = 1) -> str:
    """Return the reason why weights of `step` cannot be updated during backward; empty if they can."""
    mine = _updated(step)
    return needed_after_ready(step, mine, int(np.searchsorted(mine, sentinel_row(step))), ranks)


def optimizer_on_ssd_overlapped(
    step: Step, bucket_bytes: int, ranks: int = 1, slots: int = 1, replicas: int = 1
) -> Step:
    """Return `step` with weights and state on SSD and all updates overlapped with backward.

    Args:
        step: A step without a reason of `not_overlappable`.
        bucket_bytes: Size of a bucket, whose gradients are offloaded and records read together.
        ranks: Number of ranks that shard gradients, as for the host optimizer's pass.
        slots: SSD slots of each record, used alternately.
        replicas: Replicas, which average each gradient when it is ready; `ranks` is 1 then.
    """
    mine = _updated(step)
    if not len(mine) or not (step.ops.phase == Phase.OPTIMIZER).any():
        return step
    columns, watched = columns_of(step.parameters), int(np.searchsorted(mine, sentinel_row(step)))
    edit = Edit(step)
    ready = ready_or_reduced(edit, step, mine, watched, bucket_bytes, ranks, delayed=False)
    average_ready(edit, step, mine[ready.index], replicas)
    first = int(without_own_update(edit, step)[0])
    in_order = _ops_in_order(step, ready, watched, first)
    pieces = Pieces.on_ssd(edit, step, mine, slots)
    traffic = {READ: pieces.n_bytes, UPDATE: pieces.update_bytes, WRITE: pieces.n_bytes}
    rows = insert_ops(edit, step, mine, ready, in_order, watched, traffic)
    gradients, _ = host_gradients(edit, step, mine, ready, watched, in_order, rows, False)

    what, row, _ = in_order
    by_kind = {kind: np.empty(len(mine), np.int32) for kind in (READ, UPDATE, UP, WRITE)}
    for kind, ops in by_kind.items():
        ops[row[what == kind]] = rows[what == kind]
    host = pieces.stream(
        edit, by_kind[READ], by_kind[UPDATE], by_kind[WRITE], row[what == WRITE].astype(np.intp)
    )
    # A bfloat16 weight is written over its gradient, from where it is copied up.
    edit.add_uses(by_kind[UPDATE], writes=gradients)
    edit.add_uses(
        by_kind[UP], np.where(columns.itemsize[mine] == 4, host, gradients), writes=columns.storage[mine]
    )
    early = ready.index
    edit.hold_through(gradients[early], by_kind[UP][early])
    free_buckets(edit, step, ready, in_order, rows)
    sums_to_host(edit, step, ready)
    return edit.done()


def _updated(step: Step) -> Rows:
    columns = columns_of(step.parameters)
    return np.flatnonzero(columns.trainable & (columns.gradient >= 0))


def _ops_in_order(step: Step, ready: ReadyGradients, watched: int, first: int) -> InsertedOps:
    """Return all ops in order, by the rules of `offload.ssd_states.ssd_overlapped_optimizer`."""
    end = end_of_backward(step, ready)
    in_order: list[InsertedOp] = []
    sent: list[int] = []
    updating: list[int] = []

    def settle(anchor: int) -> None:
        in_order.extend((kind, index, anchor) for index in updating for kind in (UP, WRITE))

    def arrive(anchor: int) -> None:
        in_order.extend((ADD, row, anchor) for row in sent if ready.sums[row] >= 0)
        if sent:
            settle(anchor)
            updating[:] = ready.index[sent].tolist()
            in_order.extend((UPDATE, index, anchor) for index in updating)

    for each in np.unique(ready.bucket):
        members = np.flatnonzero(ready.bucket == each).tolist()
        anchor = int(ready.after[members[-1]]) if ready.full[members[-1]] else end
        arrive(anchor)
        in_order += [(READ, int(ready.index[row]), anchor) for row in members]
        in_order += [(COPY, row, anchor) for row in members]
        sent[:] = members
    arrive(end)
    settle(first)
    # The sentinel gradient is used in the step only: until then it shows whether clipping has scaled it.
    last = ((READ, watched), (COPY, SENTINEL), (UPDATE, watched), (UP, watched), (WRITE, watched))
    return InsertedOps.from_rows(in_order + [(kind, index, first) for kind, index in last])
