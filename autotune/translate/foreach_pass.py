"""Replace the optimizer phase of a translated Step by foreach kernels, with counters on the host."""

from __future__ import annotations

import numpy as np

from memtune.program import (
    FOREVER,
    I32,
    READS,
    Edit,
    Kind,
    Phase,
    Resource,
    Step,
    Tier,
)


def with_foreach(step: Step, phase: Step) -> Step:
    """Return `step` with the optimizer phase of `phase`.

    A few ops over all parameters instead of many over each.
    """
    old = step.ops.phase == Phase.OPTIMIZER
    if not old.any() or not phase.ops.n:
        return step
    edit = Edit(step)
    edit.drop_ops(old)
    end = np.asarray([step.ops.n], np.int32)
    rows = np.concatenate(
        [
            edit.add_ops(
                phase.names[phase.ops.name[op]],
                before=end,
                phase=Phase.OPTIMIZER,
                traffic_bytes=int(phase.ops.traffic_bytes[op]),
            )
            for op in range(phase.ops.n)
        ]
    )
    # The phase was recorded with the same model, so state has the same numbers in both.
    new_of = _same_storages(step, phase)
    made = np.flatnonzero(phase.storages.producer >= 0)
    held = phase.storages.held_until[made]
    held = np.where((held >= 0) & (held != FOREVER), rows[np.clip(held, 0, phase.ops.n - 1)], held).astype(
        np.int32
    )
    owner = _owners(step, phase, new_of)
    new_of[made] = edit.add_storages(
        phase.storages.bytes[made],
        producer=rows[phase.storages.producer[made]],
        held_until=held,
        owner=owner[made],
        float_bytes=phase.storages.float_bytes[made],
    )
    known = new_of[phase.uses.storage] >= 0
    for mutates in (False, True):
        mine = known & (phase.uses.mode == mutates)
        edit.add_uses(rows[phase.uses.op[mine]], new_of[phase.uses.storage[mine]], mode=mutates)
    first = int(np.flatnonzero(old)[0])
    waits = np.flatnonzero(
        (step.storages.held_until >= first)
        & (step.storages.held_until != FOREVER)
        & ((step.storages.producer < 0) | ~old[step.storages.producer])
    )
    # References that outlived the old optimizer phase outlive the new one.
    edit.hold_through(waits.astype(np.int32), np.full(len(waits), rows[-1], np.int32))
    return edit.done()


def _same_storages(step: Step, phase: Step) -> I32:
    """Return (phase.m,) the storage of `step` behind each of `phase`, -1 for none.

    State in the same order, gradients.
    """
    new_of = np.full(phase.storages.n, -1, np.int32)
    state = np.isin(phase.storages.kind, (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)) & (
        phase.storages.producer < 0
    )
    rows = np.flatnonzero(state)
    rows = rows[rows < step.storages.n]
    rows = rows[
        (step.storages.kind[rows] == phase.storages.kind[rows])
        & (step.storages.bytes[rows] == phase.storages.bytes[rows])
    ]
    new_of[rows] = rows
    for ours, theirs in zip(step.parameters, phase.parameters, strict=True):
        if ours.gradient >= 0 and theirs.gradient >= 0:
            new_of[theirs.gradient] = ours.gradient
    return new_of


def _owners(step: Step, phase: Step, new_of: I32) -> I32:
    """Return (phase.m,) the owner of each temporary."""
    # Foreach ops return one tensor for each of their first list.
    owner = np.where(new_of >= 0, step.storages.owner[np.maximum(new_of, 0)], -1)
    made_by: dict[int, list[int]] = {}
    for storage in np.flatnonzero(phase.storages.producer >= 0).tolist():
        made_by.setdefault(int(phase.storages.producer[storage]), []).append(storage)
    for op in sorted(made_by):
        made, read = made_by[op], phase.uses.storage[(phase.uses.op == op) & (phase.uses.mode == READS)]
        if len(read) >= len(made):
            owner[made] = owner[read[: len(made)]]
    return owner.astype(np.int32)


def counters_on_host(step: Step, counters: tuple[int, ...]) -> Step:
    """Return `step` with step counters in host memory, and ops on them alone on host threads."""
    if not counters:
        return step
    tier, resource = step.storages.tier.copy(), step.ops.resource.copy()
    tier[list(counters)] = Tier.HOST
    optimizer = (step.ops.phase == Phase.OPTIMIZER) & (resource == Resource.COMPUTE)
    for _ in range(2):  # what is made for the counters goes where they are, and then what only reads that
        off_host = np.zeros(step.ops.n, bool)
        off_host[step.uses.op[tier[step.uses.storage] != Tier.HOST]] = True
        alone = optimizer & ~off_host
        tier[(step.storages.producer >= 0) & alone[step.storages.producer]] = Tier.HOST
    resource[alone] = Resource.HOST_THREADS
    return step.with_storages(tier=tier).with_ops(resource=resource)
