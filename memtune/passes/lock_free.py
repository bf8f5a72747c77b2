"""The pass of `runtime.lock_free`: the update is a sweep over all weights, beside the step that follows its gradients.

How many steps a sweep takes up is known only when they run; in the Step it keeps pace: one step's gradients wait for it.
"""

from __future__ import annotations

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.host_optimizer import Native, update_by, update_bytes
from memtune.program import FOREVER, Kind, Phase, Resource, Step, Tier


def swept_beside_the_next_step(step: Step) -> Step:
    """`step` with its optimizer's ops replaced by a sweep at its beginning, and its gradients left for the next one's.

    Args:
        step: What `optimizer_on_host` made, with the optimizer's own ops on the host.
    """
    columns, edit = columns_of(step.parameters), Edit(step)
    own = (step.op_phase == Phase.OPTIMIZER) & (step.op_resource == Resource.HOST_THREADS)
    used = np.unique(step.use_storage[own[step.use_op]])
    gradients = used[(step.kind[used] == Kind.GRADIENT) & (step.tier[used] == Tier.HOST)].astype(np.int32)
    edit.drop_ops(own)
    edit.held_until[gradients] = FOREVER
    swept = np.flatnonzero(columns.trainable)
    updated = np.isin(swept, step.owner[gradients])
    sizes = columns.numel * columns.itemsize
    native, mine = Native(), swept[updated]
    row = np.repeat(np.arange(len(swept)), 1 + updated)
    is_copy = np.append(True, row[1:] != row[:-1])
    traffic = 2 * sizes[swept][row]
    traffic[~is_copy] = update_bytes(step, native, mine)
    names = np.asarray([edit.name_id("memtune.host_update_.default"), edit.name_id("aten.copy_.default")], np.int32)
    ops = edit.add_ops(
        names[is_copy.astype(int)],
        before=np.zeros(len(row), np.int32),
        phase=Phase.BOUNDARY,
        resource=Resource.HOST_THREADS,
        traffic_bytes=traffic,
    )
    nowhere, owner = np.full(len(mine), -1, np.int32), mine.astype(np.int32)
    old = edit.add_storages(sizes[mine], producer=nowhere, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)
    edit.add_uses(ops[~is_copy], old)
    update_by(edit, step, native, mine, ops[~is_copy])
    front = np.flatnonzero((step.kind == Kind.PARAMETER) & (step.tier == Tier.HOST) & (step.producer < 0))
    edit.add_storages(
        step.bytes[front],
        producer=np.full(len(front), -1, np.int32),
        tier=Tier.HOST,
        kind=Kind.PARAMETER,
        held_until=np.full(len(front), FOREVER, np.int32),
        owner=step.owner[front],
    )
    return edit.done()
