"""The pass of `HostOptimizer(stays=...)`: some parameters keep their optimizer state on the device; their update comes first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.update_at_gradient import Cut, cut_by_parameter
from memtune.program import FOREVER, I32, WRITES, Phase, Step

Mask = npt.NDArray[np.bool_]


def cannot_part(step: Step) -> str:
    """Why the optimizer of `step` cannot update some parameters by themselves, '' where it can."""
    if step.op_rng[step.op_phase == Phase.OPTIMIZER].any():
        return "the optimizer draws random numbers, in the order of its parameters"
    return cut_by_parameter(step).why_not


def updated_first(step: Step, stays: Mask) -> tuple[Step, int]:
    """`step` with its optimizer run for the parameters `stays` first, then for the others.

    Args:
        step: One that `cannot_part` has nothing to say about.
        stays: (parameters,) which ones.

    Returns:
        The step, and how many of its optimizer's ops come first. Parameters that stay are in none of its blocks.
    """
    cut, columns = cut_by_parameter(step), columns_of(step.parameters)
    moved = replace(columns, block=np.where(stays, -1, columns.block).astype(columns.block.dtype))
    mine, first = stays[cut.parameter], int((step.op_phase == Phase.OPTIMIZER).argmax())
    if not mine.any():
        return replace(step, parameters=moved), 0
    ops = np.unique(cut.op[mine])
    share = np.minimum(np.bincount(cut.op[mine], cut.share[mine], step.n_ops), 1.0)
    flops, traffic = step.op_flops * share, np.rint(step.op_traffic_bytes * share).astype(np.int64)
    edit = Edit(replace(step, op_flops=step.op_flops - flops, op_traffic_bytes=step.op_traffic_bytes - traffic))
    rows = edit.add_ops(
        step.op_name[ops],
        before=np.full(len(ops), first, np.int32),
        phase=Phase.OPTIMIZER,
        resource=step.op_resource[ops],
        flops=flops[ops],
        traffic_bytes=traffic[ops],
        module=step.op_module[ops],
    )
    own = np.full(step.n_ops, -1, np.int32)
    own[ops] = rows
    _storages(edit, step, stays, cut.owner, ops, own)
    alone = np.zeros(step.n_ops, bool)
    alone[np.setdiff1d(ops, cut.op[~mine])] = True
    edit.drop_ops(alone)
    _hold_on(edit, step, cut, alone)
    gradients = columns.gradient[stays & (columns.gradient >= 0)]
    edit.held_until[gradients] = rows[-1]
    edit.parameters = moved
    return edit.done(), len(rows)


def _hold_on(edit: Edit, step: Step, cut: Cut, moved: Mask) -> None:
    """What an update makes may be held until the next one makes its own: of those that do not move, that is another one now."""
    optimizer = step.op_phase == Phase.OPTIMIZER
    until = np.maximum(step.held_until, 0)
    held = (step.held_until >= 0) & (step.held_until != FOREVER) & (step.producer >= 0)
    held &= moved[np.where(held, until, 0)] & optimizer[np.where(held, step.producer, 0)] & ~moved[np.maximum(step.producer, 0)]
    parameter_of = np.full(step.n_ops, -1, np.int32)
    parameter_of[cut.op] = cut.parameter
    for storage in np.flatnonzero(held).tolist():
        op = int(until[storage])
        rank = int(np.searchsorted(_ops_of(cut, int(parameter_of[op])), op))
        following = np.flatnonzero(optimizer[op:] & ~moved[op:])
        if len(following):
            same = _ops_of(cut, int(parameter_of[op + following[0]]))
            edit.held_until[storage] = same[min(rank, len(same) - 1)]


def _ops_of(cut: Cut, parameter: int) -> I32:
    found: I32 = cut.op[cut.parameter == parameter]
    return found


def _storages(edit: Edit, step: Step, stays: Mask, owner: I32, ops: I32, own: I32) -> None:
    """What the new ops use and make: all that belongs to what stays, and results for all once more."""
    belongs = (owner >= 0) & stays[np.maximum(owner, 0)]
    inside = (step.producer >= 0) & (step.op_phase[step.producer] == Phase.OPTIMIZER)
    made = np.flatnonzero(inside & belongs)
    edit.producer[made] = own[step.producer[made]]
    last = own[ops[np.searchsorted(ops, np.maximum(step.held_until, ops[0]), side="right") - 1]]
    held = inside & (step.held_until >= ops[0])
    edit.held_until[made] = np.where(held, last, -1)[made]
    both = np.flatnonzero(inside & (owner < 0) & (own[np.maximum(step.producer, 0)] >= 0)).astype(np.int32)
    again = np.full(step.n_storages, -1, np.int32)
    again[both] = edit.add_storages(
        step.bytes[both],
        producer=own[step.producer[both]],
        tier=step.tier[both],
        kind=step.kind[both],
        held_until=np.where(held, last, -1)[both].astype(np.int32),
    )
    of_op = own[step.use_op] >= 0
    moves = of_op & belongs[step.use_storage]
    copied = of_op & (owner[step.use_storage] < 0)
    for uses in (moves, copied):
        storage = np.where(again[step.use_storage] >= 0, again[step.use_storage], step.use_storage).astype(np.int32)
        for mutates in (False, True):
            rows = np.flatnonzero(uses & ((step.use_mutates == WRITES) == mutates))
            edit.add_uses(own[step.use_op[rows]], storage[rows], mutates=mutates)
    edit.drop_uses(moves)
