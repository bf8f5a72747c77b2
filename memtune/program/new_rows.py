"""Shared by the three that make a Step of new rows: `Edit`, `RowReplay` and `UnrolledRows`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memtune.program.step import Resource, Step, Storages, Uses

EMPTY_ROWS = np.empty(0, np.int32)

NEW_OP: dict[str, Any] = {
    "module": 0,
    "call": -1,
    "resource": Resource.COMPUTE,
    "flops": 0.0,
    "traffic_bytes": 0,
    "rng": 0,
    "group": 0,
    "sequence_nr": -1,
    "copy_of": -1,
    "stream": 0,
    "prefetch": 0,
    "match": 0,
    "elementwise_bytes": 0,
    "precision": 0,
}
"""Columns of an op that a pass adds, other than its name and phase, unless it gives them."""


def sorted_uses(op: Any, storage: Any, mode: Any) -> Uses:
    """Return the uses in the order of their ops; those of an op keep theirs."""
    order = np.argsort(op, kind="stable")
    return Uses(
        op=op[order].astype(np.int32),
        storage=storage[order].astype(np.int32),
        mode=mode[order].astype(np.uint8),
    )


def step_of_rows(
    step: Step, ops: dict[str, Any], storages: dict[str, Any], uses: Uses, **changes: Any
) -> Step:
    """Return a Step of these rows, without what `step` knows of its own rows unless `changes` has it."""
    forgotten = ("grad_order", "returned", "partly_written", "read_by_host")
    count = np.full(len(storages["bytes"]), -1, np.int32)
    defaults: dict[str, Any] = {"grad_ready_after": count, "float_bytes": np.zeros(len(count), np.uint8)}
    return replace(
        step,
        ops=replace(step.ops, **ops),
        storages=Storages(**(defaults | storages)),
        uses=uses,
        calls=replace(step.calls, inputs=step.calls.inputs.rows(slice(0))),
        **(dict.fromkeys(forgotten, EMPTY_ROWS) | changes),
    )
