"""Steps made from columns, for tests that need no model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from memtune import _native
from memtune.program.step import CallInputs, Calls, Kind, Ops, Saves, Step, Storages, Table, Uses

T = TypeVar("T", bound=Table)

_TYPES = {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "F64": np.float64}
_NEUTRAL = {
    "ops_call": -1,
    "ops_phase": 1,
    "ops_sequence_nr": -1,
    "ops_copy_of": -1,
    "storages_kind": int(Kind.TEMPORARY),
    "storages_held_until": -1,
    "storages_grad_ready_after": -1,
    "storages_owner": -1,
}


def make_step(n_ops: int, n_storages: int, **given: Any) -> Step:
    """Return a step whose columns are neutral unless given: compute ops in forward, device temporaries made
    by op 0.

    Columns are given as `ops_phase=`, `storages_bytes=` and so on, other fields by their own name.
    """

    def table(kind: type[T], name: str, rows: int, **more: Any) -> T:
        columns: dict[str, Any] = {}
        for each in fields(kind):
            if str(each.type) in _TYPES:
                key = f"{name}_{each.name}"
                columns[each.name] = np.asarray(
                    given.pop(key, [_NEUTRAL.get(key, 0)] * rows), _TYPES[str(each.type)]
                )
        return kind(**columns, **more)

    return Step(
        ops=table(Ops, "ops", n_ops),
        storages=table(Storages, "storages", n_storages),
        uses=table(Uses, "uses", len(given.get("uses_op", ()))),
        saves=table(Saves, "saves", len(given.get("saves_storage", ()))),
        calls=table(Calls, "calls", 0, inputs=table(CallInputs, "inputs", 0)),
        **(_plain(n_storages) | given),
    )


def _plain(n_storages: int) -> dict[str, Any]:
    """Return the fields that are no tables, of a step without blocks."""
    names = ("grad_order", "returned", "partly_written", "read_by_host")
    none: dict[str, Any] = {name: np.empty(0, np.int32) for name in names}
    whole: dict[str, Any] = {
        name: np.zeros(n_storages, np.int32) for name in ("forward_starts", "forward_ends")
    }
    return {"names": ("aten.add.Tensor",), "modules": ("",), "blocks": (), "parameters": ()} | none | whole


def columns_of(step: Step, op_s: Any, issue_s: Any) -> _native.StepColumns:
    """Return the columns that the native simulator takes."""
    ops, storages, uses, saves = step.ops, step.storages, step.uses, step.saves
    return _native.StepColumns(
        ops.phase,
        ops.resource,
        np.asarray(op_s, float),
        np.asarray(issue_s, float),
        storages.bytes,
        storages.tier,
        storages.kind,
        storages.producer,
        storages.held_until,
        uses.op,
        uses.storage,
        uses.mode,
        saves.storage,
        saves.held_until,
        ops.stream,
        ops.prefetch,
        ops.match,
    )
