"""The pass of `runtime.ssd_beside_backward`: gradients leave, pieces are read, updated and written while backward goes on."""

from __future__ import annotations

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.gradients_down import (
    ADD,
    COPY,
    READ,
    UP,
    UPDATE,
    WITNESS,
    WRITE,
    Turn,
    Turns,
    host_gradients,
    insert_turns,
    let_go_buckets,
    sums_to_host,
    watched_row,
)
from memtune.passes.host_optimizer import without_own_update
from memtune.passes.landings import Landings, Rows, end_of_backward, landings_in
from memtune.passes.ssd_optimizer import Pieces
from memtune.passes.update_at_gradient import needed_after_landing
from memtune.program import Phase, Step


def not_beside_backward(step: Step, ranks: int = 1) -> str:
    """Why weights of `step` cannot be replaced while backward goes on, '' where they can."""
    mine = _updated(step)
    return needed_after_landing(step, mine, int(np.searchsorted(mine, watched_row(step))), ranks)


def optimizer_on_ssd_beside_backward(step: Step, bucket_bytes: int, ranks: int = 1, slots: int = 1) -> Step:
    """`step` with weights and state on SSD and every update beside backward.

    Args:
        step: One that `not_beside_backward` has nothing to say about.
        bucket_bytes: Of gradients that go down together, and whose pieces are read meanwhile.
        ranks: That train, as for `optimizer_beside_backward`.
        slots: Places on SSD for each piece, which take turns.
    """
    mine = _updated(step)
    if not len(mine) or not (step.op_phase == Phase.OPTIMIZER).any():
        return step
    columns, watched = columns_of(step.parameters), int(np.searchsorted(mine, watched_row(step)))
    edit = Edit(step)
    landings = landings_in(edit, step, mine, watched, bucket_bytes, ranks, late=False)
    first = int(without_own_update(edit, step)[0])
    turns = _turns(step, landings, watched, first)
    pieces = Pieces.on_ssd(edit, step, mine, slots)
    traffic = {READ: pieces.n_bytes, UPDATE: pieces.update_bytes, WRITE: pieces.n_bytes}
    rows = insert_turns(edit, step, mine, landings, turns, watched, first, traffic)
    gradients, _ = host_gradients(edit, step, mine, landings, watched, turns, rows, False)

    what, row, _ = turns
    by_kind = {kind: np.empty(len(mine), np.int32) for kind in (READ, UPDATE, UP, WRITE)}
    for kind, ops in by_kind.items():
        ops[row[what == kind]] = rows[what == kind]
    host = pieces.stream(edit, by_kind[READ], by_kind[UPDATE], by_kind[WRITE], row[what == WRITE].astype(np.intp))
    edit.add_uses(by_kind[UPDATE], gradients, mutates=True)
    edit.add_uses(by_kind[UP], np.where(columns.itemsize[mine] == 4, host, gradients))
    edit.add_uses(by_kind[UP], columns.storage[mine], mutates=True)
    early = landings.index
    edit.hold_through(gradients[early], by_kind[UP][early])
    let_go_buckets(edit, step, landings, turns, rows)
    sums_to_host(edit, step, landings)
    return edit.done()


def _updated(step: Step) -> Rows:
    columns = columns_of(step.parameters)
    return np.flatnonzero(columns.trainable & (columns.gradient >= 0))


def _turns(step: Step, landings: Landings, watched: int, first: int) -> Turns:
    """All ops in their order; the rules are those of `runtime.ssd_beside_backward`."""
    end = end_of_backward(step, landings)
    turns: list[Turn] = []
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
    last = ((READ, watched), (COPY, WITNESS), (UPDATE, watched), (UP, watched), (WRITE, watched))
    return Turns.of(turns + [(kind, index, first) for kind, index in last])
