"""Pass of `HostOptimizer(resident=...)`: some parameters have resident optimizer state and are updated first.

Source: Twin-Flow of ZeRO-Offload++ (DeepSpeed, `ratio`), and the device cache of Angel-PTM.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.offload.optimizer.fused_backward_pass import Cut, cut_by_parameter
from memtune.offload.optimizer.grad_offload_pass import OffloadTiming, overlap_optimizer, resident_rows
from memtune.offload.optimizer.host_optimizer_pass import Native
from memtune.program import FOREVER, I32, WRITES, Edit, Mask, Phase, Step, columns_of


def cannot_part(step: Step) -> str:
    """Return the reason why the optimizer of `step` cannot update some parameters alone; '' if it can."""
    if step.ops.rng[step.ops.phase == Phase.OPTIMIZER].any():
        return "the optimizer draws random numbers, in the order of its parameters"
    return cut_by_parameter(step).why_not


def updated_first(step: Step, resident: Mask) -> tuple[Step, int]:
    """Return `step` with its optimizer run for the parameters `resident` first, then for the others.

    Args:
        step: One that `cannot_part` accepts.
        resident: (parameters,) those with resident state.

    Returns:
        The step, and the number of optimizer ops that come first. Resident parameters belong to none of its
        blocks.
    """
    cut, columns = cut_by_parameter(step), columns_of(step.parameters)
    # So later passes, which offload blocks, leave them where they are.
    moved = replace(columns, block=np.where(resident, -1, columns.block).astype(columns.block.dtype))
    mine, first = resident[cut.parameter], int((step.ops.phase == Phase.OPTIMIZER).argmax())
    if not mine.any():
        return replace(step, parameters=moved), 0
    # A foreach op updates several parameters: it is cut in two, each with its share of FLOPs and traffic.
    ops = np.unique(cut.op[mine])
    share = np.minimum(np.bincount(cut.op[mine], cut.share[mine], step.ops.n), 1.0)
    flops, traffic = step.ops.flops * share, np.rint(step.ops.traffic_bytes * share).astype(np.int64)
    edit = Edit(step.with_ops(flops=step.ops.flops - flops, traffic_bytes=step.ops.traffic_bytes - traffic))
    rows = edit.add_ops(
        step.ops.name[ops],
        before=np.full(len(ops), first, np.int32),
        phase=Phase.OPTIMIZER,
        resource=step.ops.resource[ops],
        flops=flops[ops],
        traffic_bytes=traffic[ops],
        module=step.ops.module[ops],
    )
    own = np.full(step.ops.n, -1, np.int32)
    own[ops] = rows
    _storages(edit, step, resident, cut.owner, ops, own)
    alone = np.zeros(step.ops.n, bool)
    # Ops of resident parameters only need no second half.
    alone[np.setdiff1d(ops, cut.op[~mine])] = True
    edit.drop_ops(alone)
    _hold_on(edit, step, cut, alone)
    gradients = columns.gradient[resident & (columns.gradient >= 0)]
    # Freed after the update on the device, before the host begins.
    edit.storages.held_until[gradients] = rows[-1]
    edit.parameters = moved
    return edit.done(), len(rows)


def _hold_on(edit: Edit, step: Step, cut: Cut, moved: Mask) -> None:
    """Correct the lifetimes of results held until the next parameter's update makes its own."""
    # For parameters that are not moved, the next update is a different one now.
    optimizer = step.ops.phase == Phase.OPTIMIZER
    until = np.maximum(step.storages.held_until, 0)
    held = (
        (step.storages.held_until >= 0)
        & (step.storages.held_until != FOREVER)
        & (step.storages.producer >= 0)
    )
    held &= (
        moved[np.where(held, until, 0)]
        & optimizer[np.where(held, step.storages.producer, 0)]
        & ~moved[np.maximum(step.storages.producer, 0)]
    )
    parameter_of = np.full(step.ops.n, -1, np.int32)
    parameter_of[cut.op] = cut.parameter
    for storage in np.flatnonzero(held).tolist():
        op = int(until[storage])
        rank = int(np.searchsorted(_ops_of(cut, int(parameter_of[op])), op))
        following = np.flatnonzero(optimizer[op:] & ~moved[op:])
        if len(following):
            same = _ops_of(cut, int(parameter_of[op + following[0]]))
            edit.storages.held_until[storage] = same[min(rank, len(same) - 1)]


def _ops_of(cut: Cut, parameter: int) -> I32:
    found: I32 = cut.op[cut.parameter == parameter]
    return found


def _storages(edit: Edit, step: Step, resident: Mask, owner: I32, ops: I32, own: I32) -> None:
    """Move uses and results of resident parameters to the new ops, and duplicate shared results."""
    belongs = (owner >= 0) & resident[np.maximum(owner, 0)]
    inside = (step.storages.producer >= 0) & (step.ops.phase[step.storages.producer] == Phase.OPTIMIZER)
    made = np.flatnonzero(inside & belongs)
    edit.storages.producer[made] = own[step.storages.producer[made]]
    last = own[ops[np.searchsorted(ops, np.maximum(step.storages.held_until, ops[0]), side="right") - 1]]
    held = inside & (step.storages.held_until >= ops[0])
    edit.storages.held_until[made] = np.where(held, last, -1)[made]
    # Results that belong to no parameter (a scalar of the whole step) exist in both halves.
    both = np.flatnonzero(inside & (owner < 0) & (own[np.maximum(step.storages.producer, 0)] >= 0)).astype(
        np.int32
    )
    again = np.full(step.storages.n, -1, np.int32)
    again[both] = edit.add_storages(
        step.storages.bytes[both],
        producer=own[step.storages.producer[both]],
        tier=step.storages.tier[both],
        kind=step.storages.kind[both],
        held_until=np.where(held, last, -1)[both].astype(np.int32),
    )
    of_op = own[step.uses.op] >= 0
    moves = of_op & belongs[step.uses.storage]
    copied = of_op & (owner[step.uses.storage] < 0)
    for uses in (moves, copied):
        storage = np.where(again[step.uses.storage] >= 0, again[step.uses.storage], step.uses.storage).astype(
            np.int32
        )
        for mutates in (False, True):
            rows = np.flatnonzero(uses & ((step.uses.mode == WRITES) == mutates))
            edit.add_uses(own[step.uses.op[rows]], storage[rows], mode=mutates)
    edit.drop_uses(moves)


def overlap_optimizer_partly(
    step: Step, native: Native, timing: OffloadTiming, ranks: int, ratio: float
) -> Step:
    """Return the step of `overlap_optimizer` with `ratio` of the bytes offloaded, the others resident."""
    resident, block = resident_rows(step, ratio), columns_of(step.parameters).block
    parted, ops = updated_first(step, resident)
    parted = replace(parted, parameters=replace(columns_of(parted.parameters), block=block))
    return overlap_optimizer(parted, native, timing, ranks, resident, ops)
