"""The pass of `runtime.update_at_gradient`: each parameter is updated inside backward, just after its gradient has landed.

The optimizer's phase is cut by parameter: an op over one parameter moves, an op over many (foreach kernels) becomes one per
parameter, with its share of the bytes, as torch runs it when it is given one parameter. What an op makes for all (a number
that is added to every counter) is made once per parameter.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.gradients_down import watched_row
from memtune.passes.landings import Landings, landed, landings_of
from memtune.program import F64, FOREVER, I32, WRITES, Kind, Phase, Step

_MOST_SHARED = 64
"""Ops over no parameter's own storages; an optimizer with more of them computes something over all parameters."""


_Rows = npt.NDArray[np.intp]


class Cut(NamedTuple):
    """The optimizer's ops by parameter, one row for each parameter that an op works on, sorted by parameter, then op."""

    parameter: I32
    op: I32
    share: F64
    """Of the op's bytes and FLOPs."""
    owner: I32
    """(m,) parameter that each storage of the optimizer belongs to, its counters too; -1 for what is for all."""
    why_not: str
    """Why the optimizer's phase cannot be cut, '' where it can."""

    def last_up_to(self, parameter: I32, op: I32, n_ops: int) -> I32:
        """The last row of each `parameter` whose op is at most `op`."""
        keys = self.parameter.astype(np.int64) * n_ops + self.op
        found: I32 = (np.searchsorted(keys, parameter.astype(np.int64) * n_ops + op, side="right") - 1).astype(np.int32)
        return found


@functools.lru_cache(maxsize=8)
def cut_by_parameter(step: Step) -> Cut:
    """Which ops of the optimizer's phase work on which parameter."""
    mine = step.op_phase == Phase.OPTIMIZER
    made = np.flatnonzero((step.producer >= 0) & mine[step.producer]).astype(np.int32)
    used = mine[step.use_op]
    owner = _owners(step)
    ops = np.concatenate([step.use_op[used], step.producer[made]])
    storages = np.concatenate([step.use_storage[used], made])
    owned = owner[storages] >= 0
    keys, inverse = np.unique(owner[storages[owned]].astype(np.int64) * step.n_ops + ops[owned], return_inverse=True)
    weight = np.bincount(inverse, step.bytes[storages[owned]], len(keys))
    op = (keys % step.n_ops).astype(np.int32)
    total = np.bincount(op, weight, step.n_ops)[op]
    share = np.where(total > 0, weight / np.maximum(total, 1.0), 1.0)
    shared = mine.copy()
    shared[op] = False
    results = made[step.kind[made] != Kind.WORKSPACE]  # scratch is an op's own, whatever it works on: made with each part of it
    orphans = results[(owner[results] < 0) & ~shared[step.producer[results]]]
    if int(shared.sum()) > _MOST_SHARED or len(orphans):
        first = int(step.producer[orphans[0]]) if len(orphans) else int(np.flatnonzero(shared)[0])
        why_not = f"{step.names[step.op_name[first]]} of the optimizer works on no single parameter"
        return Cut((keys // step.n_ops).astype(np.int32), op, share, owner, why_not)
    for each in np.flatnonzero(shared)[::-1].tolist():  # once for every parameter that reads what it makes
        readers = np.unique(step.use_op[np.isin(step.use_storage, made[step.producer[made] == each])])
        again = np.unique(keys[np.isin(keys % step.n_ops, readers)] // step.n_ops) * step.n_ops + each
        keys, share = np.concatenate([keys, again]), np.concatenate([share, np.ones(len(again))])
        if not len(again):
            why_not = f"{step.names[step.op_name[each]]} of the optimizer works on no parameter"
            return Cut(op, op, share, owner, why_not)
    order = np.argsort(keys)
    keys, share = keys[order], share[order]
    return Cut((keys // step.n_ops).astype(np.int32), (keys % step.n_ops).astype(np.int32), share, owner, "")


def _owners(step: Step) -> I32:
    """(m,) whose each storage is; counters, which ops touch by themselves, come before the other state of their parameter."""
    owner, parameter = step.owner.copy(), step.parameter_of
    owner[parameter >= 0] = parameter[parameter >= 0]
    state = np.flatnonzero((step.kind == Kind.OPTIMIZER) & (step.producer < 0))
    known = np.flatnonzero(owner[state] >= 0)
    if len(known):
        following = np.minimum(np.searchsorted(known, np.arange(len(state))), len(known) - 1)
        owner[state] = owner[state[known[following]]]
    return owner


def not_at_gradients(step: Step) -> str:
    """Why parameters of `step` cannot be updated when their gradients land, '' where they can."""
    optimizer = step.op_phase == Phase.OPTIMIZER
    columns = columns_of(step.parameters)
    if not optimizer.any() or not (columns.gradient >= 0).any():
        return "the optimizer has nothing to update"
    if step.op_rng[optimizer].any():
        return "the optimizer draws random numbers, in the order of its parameters"
    if why := cut_by_parameter(step).why_not:
        return why
    return needed_after_landing(step, *_updated(step))


def needed_after_landing(step: Step, mine: _Rows, watched: int, ranks: int = 1) -> str:
    """Which op needs one of the weights `mine` when its gradient is complete, '' for none; but for that of `mine[watched]`."""
    columns, (index, complete) = columns_of(step.parameters), landed(step, mine, watched, ranks)
    after = np.full(step.n_storages, FOREVER, np.int32)
    after[columns.storage[mine[index]]] = complete
    late = (step.use_op > after[step.use_storage]) & (step.use_phase < Phase.BOUNDARY)
    if not late.any():
        return ""
    use = int(late.argmax())
    name = columns.names[int(step.parameter_of[step.use_storage[use]])]
    return f"{step.names[step.op_name[step.use_op[use]]]} of backward needs {name} after its gradient is complete"


def _updated(step: Step) -> tuple[_Rows, int]:
    """Parameters that the optimizer updates, and which of these is the witness (-1: none)."""
    columns, updated = columns_of(step.parameters), np.zeros(len(step.parameters), bool)
    updated[cut_by_parameter(step).parameter] = True
    mine = np.flatnonzero(columns.trainable & (columns.gradient >= 0) & updated)
    at = np.flatnonzero(mine == watched_row(step))
    return mine, int(at[0]) if len(at) else -1


def updates_at_gradients(step: Step, accumulate: int) -> Step:
    """`step` with each parameter but the witness updated when its gradient is complete, which is then let go.

    Args:
        step: One that `not_at_gradients` has nothing to say about.
        accumulate: Micro-batches per step. From three on there is one in the middle that holds all sums through its backward:
            the step has those bytes, too.
    """
    cut, edit = cut_by_parameter(step), Edit(step)
    mine, watched = _updated(step)
    there = landings_of(step, mine, watched, 0)
    optimizer = step.op_phase == Phase.OPTIMIZER
    first, end = int(optimizer.argmax()), int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    edit.drop_ops(optimizer)
    rows = _ops(edit, step, cut, mine, there)
    _storages(edit, step, cut, rows)
    early = mine[there.index].astype(np.int32)
    gradients = columns_of(step.parameters).gradient[early]
    last = rows[cut.last_up_to(early, np.full(len(early), step.n_ops - 1, np.int32), step.n_ops)]
    edit.held_until[gradients] = -1
    edit.hold_through(gradients, last)
    if accumulate > 2:
        edit.hold_through(gradients, np.full(len(gradients), end, np.int32))
    if len(last) and there.after[-1] == end:
        edit.hold_to_the_end_of_backward(int(last[-1]))
    stays = (step.held_until >= first) & (step.held_until != FOREVER) & ((step.producer < 0) | ~optimizer[step.producer])
    stays[gradients] = False
    waits = np.flatnonzero(stays).astype(np.int32)
    edit.hold_through(waits, np.full(len(waits), rows.max(), np.int32))
    return edit.done()


def _ops(edit: Edit, step: Step, cut: Cut, mine: _Rows, there: Landings) -> I32:
    """One op for each row of the cut, after its gradient's landing or at the end of the step; returns their rows."""
    place = np.full(len(step.parameters), len(mine), np.int32)
    place[mine[there.index]] = np.arange(len(there.index), dtype=np.int32)
    order = np.argsort(place[cut.parameter], kind="stable")  # by landing, and of one parameter in the order of its ops
    early = place[cut.parameter[order]] < len(mine)
    rows = np.empty(len(order), np.int32)
    for part, at_end in ((order[early], False), (order[~early], True)):
        anchor = np.full(len(part), step.n_ops, np.int32) if at_end else there.after[place[cut.parameter[part]]]
        op, share = cut.op[part], cut.share[part]
        rows[part] = edit.add_ops(
            step.op_name[op],
            before=anchor if at_end else None,
            after=None if at_end else anchor,
            phase=Phase.OPTIMIZER,
            resource=step.op_resource[op],
            flops=step.op_flops[op] * share,
            traffic_bytes=np.rint(step.op_traffic_bytes[op] * share).astype(np.int64),
            module=step.op_module[op],
        )
    return rows


def _storages(edit: Edit, step: Step, cut: Cut, rows: I32) -> None:
    """What the new ops make and use; what they make is held until the same moment of the same parameter's update."""
    made = np.flatnonzero((step.producer >= 0) & (step.op_phase[step.producer] == Phase.OPTIMIZER)).astype(np.int32)
    at, makes = _pairs(cut, step.producer[made], cut.owner[made], step.n_ops)
    storage, parameter = made[makes], cut.parameter[at]
    held = step.held_until[storage]
    until = rows[cut.last_up_to(parameter, held, step.n_ops)]
    new = edit.add_storages(
        step.bytes[storage],
        producer=rows[at],
        tier=step.tier[storage],
        kind=step.kind[storage],
        held_until=np.where(held > step.producer[storage], until, -1).astype(np.int32),
        owner=np.where(cut.owner[storage] >= 0, parameter, -1).astype(np.int32),
    )
    keys = parameter.astype(np.int64) * step.n_storages + storage
    order = np.argsort(keys)
    used = np.flatnonzero(step.op_phase[step.use_op] == Phase.OPTIMIZER)
    at, uses = _pairs(cut, step.use_op[used], cut.owner[step.use_storage[used]], step.n_ops)
    storage, written = step.use_storage[used][uses], step.use_mutates[used][uses] == WRITES
    wanted = cut.parameter[at].astype(np.int64) * step.n_storages + storage
    found = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    own = keys[order][found] == wanted if len(keys) else np.zeros(len(wanted), bool)
    if len(keys):
        storage = np.where(own, new[order][found], storage).astype(np.int32)
    for mutates in (False, True):
        edit.add_uses(rows[at[written == mutates]], storage[written == mutates], mutates=mutates)


def _pairs(cut: Cut, ops: I32, owner: I32, n_ops: int) -> tuple[_Rows, _Rows]:
    """Rows of the cut and items whose op it is: those of the item's owner, or of every parameter where the item is for all."""
    keys = cut.parameter.astype(np.int64) * n_ops + cut.op
    mine, common = np.flatnonzero(owner >= 0), np.flatnonzero(owner < 0)
    rows = np.searchsorted(keys, owner[mine].astype(np.int64) * n_ops + ops[mine])
    by_op = np.argsort(cut.op, kind="stable")
    low, high = (np.searchsorted(cut.op[by_op], ops[common], side=side) for side in ("left", "right"))
    items = np.repeat(common, high - low)
    place = np.arange(len(items)) - np.repeat(np.cumsum(high - low) - (high - low), high - low) + np.repeat(low, high - low)
    return np.concatenate([rows, by_op[place]]), np.concatenate([mine, items])
