"""Pass of `offload.optimizer.fused_backward`: parameters are updated when their gradients are ready.

The optimizer's phase is cut by parameter: an op over one parameter moves; an op over many (foreach kernels)
becomes one op per parameter with its share of the bytes, as torch runs it when it is given one parameter. The
result of an op for all parameters (a number that is added to every counter) is computed once per parameter.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.offload.gradients import ReadyGradients, ready_after, ready_gradients
from memtune.offload.optimizer.grad_offload_pass import sentinel_row
from memtune.program import F64, FOREVER, I32, WRITES, Edit, Kind, Phase, Step, columns_of, owners_in_update

_MOST_SHARED = 64
"""Limit of ops that use no parameter's storages; an optimizer with more computes over all parameters."""


_Rows = npt.NDArray[np.intp]


class Cut(NamedTuple):
    """Ops of the optimizer by parameter: a row for each parameter of an op, sorted by parameter, then op."""

    parameter: I32
    op: I32
    share: F64
    """Share of the op's bytes and FLOPs."""
    owner: I32
    """(m,) parameter of each optimizer storage, counters included; -1: of all parameters."""
    why_not: str
    """Reason why the optimizer's phase cannot be cut; '' if it can."""

    def last_up_to(self, parameter: I32, op: I32, n_ops: int) -> I32:
        """Return the last row of each `parameter` whose op is at most `op`."""
        # Rows are sorted by parameter, then op, so this one number ascends.
        keys = self.parameter.astype(np.int64) * n_ops + self.op
        found: I32 = (
            np.searchsorted(keys, parameter.astype(np.int64) * n_ops + op, side="right") - 1
        ).astype(np.int32)
        return found


@functools.lru_cache(maxsize=8)
def cut_by_parameter(step: Step) -> Cut:
    """Cut the optimizer's phase of `step` by parameter."""
    parameters = step.ops.phase == Phase.OPTIMIZER
    made = np.flatnonzero((step.storages.producer >= 0) & parameters[step.storages.producer]).astype(np.int32)
    used = parameters[step.uses.op]
    owner = owners_in_update(step)
    ops = np.concatenate([step.uses.op[used], step.storages.producer[made]])
    storages = np.concatenate([step.uses.storage[used], made])
    owned = owner[storages] >= 0
    keys, inverse = np.unique(
        owner[storages[owned]].astype(np.int64) * step.ops.n + ops[owned], return_inverse=True
    )
    # An op's cost is divided by the bytes that it uses of each parameter.
    weight = np.bincount(inverse, step.storages.bytes[storages[owned]], len(keys))
    op = (keys % step.ops.n).astype(np.int32)
    total = np.bincount(op, weight, step.ops.n)[op]
    share = np.where(total > 0, weight / np.maximum(total, 1.0), 1.0)
    shared = parameters.copy()
    shared[op] = False
    # A workspace belongs to its op and needs no owner: each part of the op allocates its own.
    results = made[step.storages.kind[made] != Kind.WORKSPACE]
    orphans = results[(owner[results] < 0) & ~shared[step.storages.producer[results]]]
    if int(shared.sum()) > _MOST_SHARED or len(orphans):
        first = int(step.storages.producer[orphans[0]]) if len(orphans) else int(np.flatnonzero(shared)[0])
        why_not = f"{step.names[step.ops.name[first]]} of the optimizer works on no single parameter"
        return Cut((keys // step.ops.n).astype(np.int32), op, share, owner, why_not)
    # A shared op runs once for every parameter that reads its result; the last first, as it may read
    # another's.
    for each in np.flatnonzero(shared)[::-1].tolist():
        readers = np.unique(
            step.uses.op[np.isin(step.uses.storage, made[step.storages.producer[made] == each])]
        )
        again = np.unique(keys[np.isin(keys % step.ops.n, readers)] // step.ops.n) * step.ops.n + each
        keys, share = np.concatenate([keys, again]), np.concatenate([share, np.ones(len(again))])
        if not len(again):
            why_not = f"{step.names[step.ops.name[each]]} of the optimizer works on no parameter"
            return Cut(op, op, share, owner, why_not)
    order = np.argsort(keys)
    keys, share = keys[order], share[order]
    return Cut((keys // step.ops.n).astype(np.int32), (keys % step.ops.n).astype(np.int32), share, owner, "")


def not_at_gradients(step: Step) -> str:
    """Return the reason why `step` cannot update parameters at their gradients; '' if it can."""
    optimizer = step.ops.phase == Phase.OPTIMIZER
    columns = columns_of(step.parameters)
    if not optimizer.any() or not (columns.gradient >= 0).any():
        return "the optimizer has nothing to update"
    if step.ops.rng[optimizer].any():
        return "the optimizer draws random numbers, in the order of its parameters"
    if why := cut_by_parameter(step).why_not:
        return why
    return needed_after_ready(step, *_updated(step))


def needed_after_ready(step: Step, parameters: _Rows, watched: int, ranks: int = 1) -> str:
    """Return the op of backward that reads a weight of `parameters` after its gradient; '' for none.

    The weight of `parameters[watched]` is excluded: it is updated in the step.
    """
    columns, (index, complete) = columns_of(step.parameters), ready_after(step, parameters, watched, ranks)
    after = np.full(step.storages.n, FOREVER, np.int32)
    # An op that reads the weight later would see the updated one.
    after[columns.storage[parameters[index]]] = complete
    used_after = (step.uses.op > after[step.uses.storage]) & (step.use_phase < Phase.BOUNDARY)
    if not used_after.any():
        return ""
    use = int(used_after.argmax())
    name = columns.names[int(step.parameter_of[step.uses.storage[use]])]
    return (
        f"{step.names[step.ops.name[step.uses.op[use]]]} of backward needs {name} after its gradient is"
        " complete"
    )


def _updated(step: Step) -> tuple[_Rows, int]:
    """Return the parameters that are updated, and the sentinel's index among them (-1: none)."""
    columns, updated = columns_of(step.parameters), np.zeros(len(step.parameters), bool)
    updated[cut_by_parameter(step).parameter] = True
    parameters = np.flatnonzero(columns.trainable & (columns.gradient >= 0) & updated)
    at = np.flatnonzero(parameters == sentinel_row(step))
    return parameters, int(at[0]) if len(at) else -1


def updates_at_gradients(step: Step, accumulate: int) -> Step:
    """Return `step` with parameters, except the sentinel's, updated when their gradients are complete.

    Args:
        step: One that `not_at_gradients` accepts.
        accumulate: Micro-batches per step. From three on, one in the middle holds all sums through its
            backward, so the step includes these bytes.
    """
    cut, edit = cut_by_parameter(step), Edit(step)
    parameters, watched = _updated(step)
    there = ready_gradients(step, parameters, watched, 0)
    optimizer = step.ops.phase == Phase.OPTIMIZER
    first, end = int(optimizer.argmax()), step.backward_end
    # Foreach ops are cut into one op per parameter, which the hooks run at different times.
    edit.drop_ops(optimizer)
    rows = _ops(edit, step, cut, parameters, there)
    _storages(edit, step, cut, rows)
    early = parameters[there.index].astype(np.int32)
    gradients = columns_of(step.parameters).gradient[early]
    last = rows[cut.last_up_to(early, np.full(len(early), step.ops.n - 1, np.int32), step.ops.n)]
    edit.storages.held_until[gradients] = -1
    edit.hold_through(gradients, last)
    # The recorded step has two micro-batches; one in the middle holds sums through its whole backward.
    if accumulate > 2:
        edit.hold_through(gradients, end)
    if len(last) and there.after[-1] == end:
        edit.hold_to_the_end_of_backward(int(last[-1]))
    # Results of backward that the optimizer's own ops were to read live until the last of the new ops.
    resident = (
        (step.storages.held_until >= first)
        & (step.storages.held_until != FOREVER)
        & ((step.storages.producer < 0) | ~optimizer[step.storages.producer])
    )
    resident[gradients] = False
    waits = np.flatnonzero(resident).astype(np.int32)
    edit.hold_through(waits, rows.max())
    return edit.done()


def _ops(edit: Edit, step: Step, cut: Cut, parameters: _Rows, there: ReadyGradients) -> I32:
    """Insert an op for each row of the cut, at its ready gradient or at the step's end; return rows."""
    place = np.full(len(step.parameters), len(parameters), np.int32)
    place[parameters[there.index]] = np.arange(len(there.index), dtype=np.int32)
    # By grad-ready order; stable, so a parameter's ops keep their order.
    order = np.argsort(place[cut.parameter], kind="stable")
    # The sentinel, and parameters without a gradient, are updated at the end of the step.
    early = place[cut.parameter[order]] < len(parameters)
    rows = np.empty(len(order), np.int32)
    for part, at_end in ((order[early], False), (order[~early], True)):
        anchor = (
            np.full(len(part), step.ops.n, np.int32) if at_end else there.after[place[cut.parameter[part]]]
        )
        op, share = cut.op[part], cut.share[part]
        rows[part] = edit.add_ops(
            step.ops.name[op],
            before=anchor if at_end else None,
            after=None if at_end else anchor,
            phase=Phase.OPTIMIZER,
            resource=step.ops.resource[op],
            flops=step.ops.flops[op] * share,
            traffic_bytes=np.rint(step.ops.traffic_bytes[op] * share).astype(np.int64),
            module=step.ops.module[op],
        )
    return rows


def _storages(edit: Edit, step: Step, cut: Cut, rows: I32) -> None:
    """Add storages and uses of the new ops; results are held to the same op of their parameter's update."""
    made = np.flatnonzero(
        (step.storages.producer >= 0) & (step.ops.phase[step.storages.producer] == Phase.OPTIMIZER)
    ).astype(np.int32)
    at, makes = _pairs(cut, step.storages.producer[made], cut.owner[made], step.ops.n)
    storage, parameter = made[makes], cut.parameter[at]
    held = step.storages.held_until[storage]
    until = rows[cut.last_up_to(parameter, held, step.ops.n)]
    new = edit.add_storages(
        step.storages.bytes[storage],
        producer=rows[at],
        tier=step.storages.tier[storage],
        kind=step.storages.kind[storage],
        held_until=np.where(held > step.storages.producer[storage], until, -1).astype(np.int32),
        owner=np.where(cut.owner[storage] >= 0, parameter, -1).astype(np.int32),
    )
    # Parameter and storage as one number: a use finds the new copy of what it read by binary search.
    keys = parameter.astype(np.int64) * step.storages.n + storage
    order = np.argsort(keys)
    used = np.flatnonzero(step.ops.phase[step.uses.op] == Phase.OPTIMIZER)
    at, uses = _pairs(cut, step.uses.op[used], cut.owner[step.uses.storage[used]], step.ops.n)
    storage, written = step.uses.storage[used][uses], step.uses.mode[used][uses] == WRITES
    wanted = cut.parameter[at].astype(np.int64) * step.storages.n + storage
    found = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    own = keys[order][found] == wanted if len(keys) else np.zeros(len(wanted), bool)
    # A storage from outside the optimizer, such as a gradient, has no copy and is used itself.
    if len(keys):
        storage = np.where(own, new[order][found], storage).astype(np.int32)
    for mutates in (False, True):
        edit.add_uses(rows[at[written == mutates]], storage[written == mutates], mode=mutates)


def _pairs(cut: Cut, ops: I32, owner: I32, n_ops: int) -> tuple[_Rows, _Rows]:
    """Return matching rows of the cut and items: of the item's owner, or of every parameter if none."""
    # Unique by parameter and op, and sorted: the cut lists parameters in order.
    keys = cut.parameter.astype(np.int64) * n_ops + cut.op
    parameters, common = np.flatnonzero(owner >= 0), np.flatnonzero(owner < 0)
    rows = np.searchsorted(keys, owner[parameters].astype(np.int64) * n_ops + ops[parameters])
    by_op = np.argsort(cut.op, kind="stable")
    low, high = (np.searchsorted(cut.op[by_op], ops[common], side=side) for side in ("left", "right"))
    items = np.repeat(common, high - low)
    # For each common item the rows low, …, high - 1 of the cut, without a loop.
    place = (
        np.arange(len(items))
        - np.repeat(np.cumsum(high - low) - (high - low), high - low)
        + np.repeat(low, high - low)
    )
    return np.concatenate([rows, by_op[place]]), np.concatenate([parameters, items])
