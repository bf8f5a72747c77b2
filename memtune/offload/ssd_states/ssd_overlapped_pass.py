"""The pass of `offload.ssd_states.ssd_overlapped_optimizer`: gradients leave, pieces are read, updated and
written while backward goes on.
"""

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
from memtune.program import WRITES, Edit, Phase, Step, columns_of


def not_beside_backward(step: Step, ranks: int = 1) -> str:
    """Why weights of `step` cannot be replaced while backward goes on, '' where they can."""
    mine = _updated(step)
    return needed_after_ready(step, mine, int(np.searchsorted(mine, sentinel_row(step))), ranks)


def optimizer_on_ssd_beside_backward(
    step: Step, bucket_bytes: int, ranks: int = 1, slots: int = 1, replicas: int = 1
) -> Step:
    """`step` with weights and state on SSD and every update beside backward.

    Args:
        step: One that `not_beside_backward` has nothing to say about.
        bucket_bytes: Of gradients that go down together, and whose pieces are read meanwhile.
        ranks: That train, as for `optimizer_beside_backward`.
        slots: Places on SSD for each piece, which take turns.
        replicas: Ranks that have all weights, and average each gradient as it lands; `ranks` is 1 then.
    """
    mine = _updated(step)
    if not len(mine) or not (step.ops.phase == Phase.OPTIMIZER).any():
        return step
    columns, watched = columns_of(step.parameters), int(np.searchsorted(mine, sentinel_row(step)))
    edit = Edit(step)
    landings = ready_or_reduced(edit, step, mine, watched, bucket_bytes, ranks, late=False)
    average_ready(edit, step, mine[landings.index], replicas)
    first = int(without_own_update(edit, step)[0])
    turns = _turns(step, landings, watched, first)
    pieces = Pieces.on_ssd(edit, step, mine, slots)
    traffic = {READ: pieces.n_bytes, UPDATE: pieces.update_bytes, WRITE: pieces.n_bytes}
    rows = insert_ops(edit, step, mine, landings, turns, watched, first, traffic)
    gradients, _ = host_gradients(edit, step, mine, landings, watched, turns, rows, False)

    what, row, _ = turns
    by_kind = {kind: np.empty(len(mine), np.int32) for kind in (READ, UPDATE, UP, WRITE)}
    for kind, ops in by_kind.items():
        ops[row[what == kind]] = rows[what == kind]
    host = pieces.stream(
        edit, by_kind[READ], by_kind[UPDATE], by_kind[WRITE], row[what == WRITE].astype(np.intp)
    )
    edit.add_uses(by_kind[UPDATE], gradients, mode=WRITES)
    edit.add_uses(by_kind[UP], np.where(columns.itemsize[mine] == 4, host, gradients))
    edit.add_uses(by_kind[UP], columns.storage[mine], mode=WRITES)
    early = landings.index
    edit.hold_through(gradients[early], by_kind[UP][early])
    free_buckets(edit, step, landings, turns, rows)
    sums_to_host(edit, step, landings)
    return edit.done()


def _updated(step: Step) -> Rows:
    columns = columns_of(step.parameters)
    return np.flatnonzero(columns.trainable & (columns.gradient >= 0))


def _turns(step: Step, landings: ReadyGradients, watched: int, first: int) -> InsertedOps:
    """All ops in their order; the rules are those of `offload.ssd_states.ssd_overlapped_optimizer`."""
    end = end_of_backward(step, landings)
    turns: list[InsertedOp] = []
    sent: list[int] = []
    updating: list[int] = []

    def settle(anchor: int) -> None:
        turns.extend((kind, index, anchor) for index in updating for kind in (UP, WRITE))

    def arrive(anchor: int) -> None:
        turns.extend((ADD, row, anchor) for row in sent if landings.sums[row] >= 0)
        if sent:
            settle(anchor)
            updating[:] = landings.index[sent].tolist()
            turns.extend((UPDATE, index, anchor) for index in updating)

    for each in np.unique(landings.bucket):
        members = np.flatnonzero(landings.bucket == each).tolist()
        anchor = int(landings.after[members[-1]]) if landings.full[members[-1]] else end
        arrive(anchor)
        turns += [(READ, int(landings.index[row]), anchor) for row in members]
        turns += [(COPY, row, anchor) for row in members]
        sent[:] = members
    arrive(end)
    settle(first)
    last = ((READ, watched), (COPY, SENTINEL), (UPDATE, watched), (UP, watched), (WRITE, watched))
    return InsertedOps.of(turns + [(kind, index, first) for kind, index in last])
