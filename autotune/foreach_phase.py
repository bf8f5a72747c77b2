"""The optimizer phase of a translated Step: foreach kernels over all parameters, their counters on the host as torch has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.edit import Edit
from memtune.program import FOREVER, I32, Kind, Phase, Resource, Step, Tier


def with_foreach(step: Step, phase: Step) -> Step:
    """`step` with the optimizer phase of `phase`: a few ops over all parameters in place of many over each."""
    old = step.op_phase == Phase.OPTIMIZER
    if not old.any() or not phase.n_ops:
        return step
    edit = Edit(step)
    edit.drop_ops(old)
    end = np.asarray([step.n_ops], np.int32)
    rows = np.concatenate([
        edit.add_ops(
            phase.names[phase.op_name[op]],
            before=end,
            phase=Phase.OPTIMIZER,
            traffic_bytes=int(phase.op_traffic_bytes[op]),
        )
        for op in range(phase.n_ops)
    ])  # fmt: skip
    new_of = _same_storages(step, phase)
    made = np.flatnonzero(phase.producer >= 0)
    held = phase.held_until[made]
    held = np.where((held >= 0) & (held != FOREVER), rows[np.clip(held, 0, phase.n_ops - 1)], held).astype(np.int32)
    owner = _owners(step, phase, new_of)
    new_of[made] = edit.add_storages(phase.bytes[made], producer=rows[phase.producer[made]], held_until=held, owner=owner[made])
    known = new_of[phase.use_storage] >= 0
    for mutates in (False, True):
        mine = known & (phase.use_mutates == mutates)
        edit.add_uses(rows[phase.use_op[mine]], new_of[phase.use_storage[mine]], mutates=mutates)
    first = int(np.flatnonzero(old)[0])
    waits = np.flatnonzero(
        (step.held_until >= first) & (step.held_until != FOREVER) & ((step.producer < 0) | ~old[step.producer])
    )
    edit.hold_through(waits.astype(np.int32), np.full(len(waits), rows[-1], np.int32))
    return edit.done()


def _same_storages(step: Step, phase: Step) -> I32:
    """(phase.m,) the storage of `step` behind each of `phase`, -1 where there is none: state in the same order, gradients."""
    new_of = np.full(phase.n_storages, -1, np.int32)
    state = np.isin(phase.kind, (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)) & (phase.producer < 0)
    rows = np.flatnonzero(state)
    rows = rows[rows < step.n_storages]
    rows = rows[(step.kind[rows] == phase.kind[rows]) & (step.bytes[rows] == phase.bytes[rows])]
    new_of[rows] = rows
    for ours, theirs in zip(step.parameters, phase.parameters, strict=True):
        if ours.gradient >= 0 and theirs.gradient >= 0:
            new_of[theirs.gradient] = ours.gradient
    return new_of


def _owners(step: Step, phase: Step, new_of: I32) -> I32:
    """(phase.m,) whose each temporary is: foreach ops return one tensor for each of their first list."""
    owner = np.where(new_of >= 0, step.owner[np.maximum(new_of, 0)], -1)
    made_by: dict[int, list[int]] = {}
    for storage in np.flatnonzero(phase.producer >= 0).tolist():
        made_by.setdefault(int(phase.producer[storage]), []).append(storage)
    for op in sorted(made_by):
        made, read = made_by[op], phase.use_storage[(phase.use_op == op) & (phase.use_mutates == 0)]
        if len(read) >= len(made):
            owner[made] = owner[read[: len(made)]]
    return owner.astype(np.int32)


def counters_on_host(step: Step, counters: tuple[int, ...]) -> Step:
    """Step counters in host memory, and the ops that touch nothing else on the host's threads."""
    if not counters:
        return step
    tier, resource = step.tier.copy(), step.op_resource.copy()
    tier[list(counters)] = Tier.HOST
    optimizer = (step.op_phase == Phase.OPTIMIZER) & (resource == Resource.COMPUTE)
    for _ in range(2):  # what is made for the counters goes where they are, and then what only reads that
        elsewhere = np.zeros(step.n_ops, bool)
        elsewhere[step.use_op[tier[step.use_storage] != Tier.HOST]] = True
        alone = optimizer & ~elsewhere
        tier[(step.producer >= 0) & alone[step.producer]] = Tier.HOST
    resource[alone] = Resource.HOST_THREADS
    return replace(step, tier=tier, op_resource=resource)
