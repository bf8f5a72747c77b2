"""Pass of `offload.chunks.lock_free`: the update is a sweep over all weights, overlapped with the next step.

The number of steps per sweep depends on time. In the Step one sweep runs per step: one step's gradients wait
for it.
"""

from __future__ import annotations

import numpy as np

from memtune.offload.optimizer import Native, update_by, update_bytes
from memtune.program import FOREVER, Edit, Kind, Phase, Resource, Step, Tier, columns_of


def sweep_in_next_step(step: Step) -> Step:
    """Return `step` with a sweep at its start, which uses the last step's gradients, instead of its update.

    Args:
        step: A result of `optimizer_on_host`, with the optimizer's own ops on the host.
    """
    columns, edit = columns_of(step.parameters), Edit(step)
    own = (step.ops.phase == Phase.OPTIMIZER) & (step.ops.resource == Resource.HOST_THREADS)
    used = np.unique(step.uses.storage[own[step.uses.op]])
    gradients = used[
        (step.storages.kind[used] == Kind.GRADIENT) & (step.storages.tier[used] == Tier.HOST)
    ].astype(np.int32)
    edit.drop_ops(own)
    # The next step's sweep reads them, so they outlive this step.
    edit.storages.held_until[gradients] = FOREVER
    # A sweep visits every parameter; those without a new gradient are only copied.
    swept = np.flatnonzero(columns.trainable)
    updated = np.isin(swept, step.storages.owner[gradients])
    sizes = columns.n_bytes
    native, mine = Native(), swept[updated]
    row = np.repeat(np.arange(len(swept)), 1 + updated)
    is_copy = np.append(True, row[1:] != row[:-1])
    traffic = 2 * sizes[swept][row]
    traffic[~is_copy] = update_bytes(step, native, mine)
    names = np.asarray(
        [edit.name_id("memtune.host_update_.default"), edit.name_id("aten.copy_.default")], np.int32
    )
    ops = edit.add_ops(
        names[is_copy.astype(int)],
        before=np.zeros(len(row), np.int32),
        phase=Phase.BOUNDARY,
        resource=Resource.HOST_THREADS,
        traffic_bytes=traffic,
    )
    owner = mine.astype(np.int32)
    old = edit.add_storages(sizes[mine], tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)
    edit.add_uses(ops[~is_copy], old)
    update_by(edit, step, native, mine, ops[~is_copy])
    front = np.flatnonzero(
        (step.storages.kind == Kind.PARAMETER)
        & (step.storages.tier == Tier.HOST)
        & (step.storages.producer < 0)
    )
    # The second set of weights: the sweep writes one while forward loads the other.
    edit.add_persistent(step.storages.bytes[front], Kind.PARAMETER, Tier.HOST, step.storages.owner[front])
    return edit.done()
