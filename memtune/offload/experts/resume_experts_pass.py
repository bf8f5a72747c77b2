"""The pass of `offload.experts.resume_experts`: writes of a kept step after the optimizer's step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memtune.program import (
    FOREVER,
    I32,
    I64,
    WRITES,
    WRITES_IN_FLIGHT,
    Edit,
    Kind,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
)

SLOTS = 2
"""SSD slots of all that is kept, used alternately."""


def spare_slots(edit: Edit, n_bytes: I64) -> I32:
    """Add the second slots of what is on SSD anyway."""
    return _on_ssd(edit, n_bytes[n_bytes > 0])


def write_resident(edit: Edit, step: Step, experts: npt.NDArray[np.intp]) -> I32:
    """Add D2H copies and writes of all trained parameters but `experts`; return the last row, if any.

    Call it after all other insertions at the end of the step.
    """
    n_bytes = _tensors(step, experts)
    if not len(n_bytes):
        return np.empty(0, np.int32)
    names = np.asarray(
        [edit.name_id(f"memtune.{name}.default") for name in ("to_host", "write_ssd_")], np.int32
    )
    rows = edit.add_ops(
        np.tile(names, len(n_bytes)),
        before=np.full(2 * len(n_bytes), step.ops.n, np.int32),
        phase=Phase.OPTIMIZER,
        resource=np.tile(np.asarray([Resource.DEVICE_TO_HOST, Resource.SSD_WRITE], np.uint8), len(n_bytes)),
        traffic_bytes=np.repeat(n_bytes, 2),
    )
    down, write = rows[::2], rows[1::2]
    host = edit.add_storages(n_bytes, producer=down, tier=Tier.HOST)
    edit.add_uses(write, host)
    edit.add_uses(write, _on_ssd(edit, n_bytes), mode=WRITES)
    _on_ssd(edit, n_bytes)
    edit.release_before(host[:-WRITES_IN_FLIGHT], down[WRITES_IN_FLIGHT:])
    edit.hold_through(host[-WRITES_IN_FLIGHT:], np.full(len(host[-WRITES_IN_FLIGHT:]), write[-1], np.int32))
    return write[-1:]


def hold_to_the_end(edit: Edit, step: Step, last: I32) -> None:
    """Hold what Python held at the last op of `step` (gradients, the loss) until the new op `last`."""
    held = np.flatnonzero(
        (step.storages.held_until == step.ops.n - 1) & (step.storages.producer >= 0)
    ).astype(np.int32)
    edit.hold_through(held, np.repeat(last, len(held)))


def _tensors(step: Step, experts: npt.NDArray[np.intp]) -> I64:
    """Return the bytes of weight and moments of each parameter, one after the other."""
    columns = columns_of(step.parameters)
    resident = columns.trainable.copy()
    resident[experts] = False
    mine = np.flatnonzero(resident)
    moments = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER)
        & (step.storages.producer < 0)
        & np.isin(step.storages.owner, mine)
    )
    owner = np.concatenate([mine, step.storages.owner[moments]])  # step counters have no owner
    n_bytes = np.concatenate([(columns.numel * columns.itemsize)[mine], step.storages.bytes[moments]])
    found: I64 = n_bytes[np.argsort(owner, kind="stable")]
    return found


def _on_ssd(edit: Edit, n_bytes: I64) -> I32:
    nowhere, forever = np.full(len(n_bytes), -1, np.int32), np.full(len(n_bytes), FOREVER, np.int32)
    return edit.add_storages(
        n_bytes, producer=nowhere, tier=Tier.SSD, kind=Kind.OPTIMIZER, held_until=forever
    )
