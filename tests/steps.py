"""Steps written as columns, for tests that need no model."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from memtune import _native
from memtune.program import Kind, Step

_OF_STORAGES = ("landing", "returned", "written_parts", "looked_at")


def make_step(ops: int, storages: int, **columns: Any) -> Step:
    """A step whose columns are neutral unless given: compute ops in forward, device temporaries made by op 0."""
    uses, saves = len(columns.get("use_op", ())), len(columns.get("save_storage", ()))
    lengths = {"op": ops, "use": uses, "save": saves, "input": 0, "call": 0}
    neutral = {"op_call": -1, "op_phase": 1, "op_node": -1, "op_copy_of": -1, "held_until": -1, "ready_after": -1, "owner": -1}
    kinds = {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "F64": np.float64}
    data: dict[str, Any] = {"names": ("aten.add.Tensor",), "modules": ("",), "blocks": (), "parameters": ()}
    for each in fields(Step):
        if each.name in data:
            data[each.name] = columns.get(each.name, data[each.name])
            continue
        if each.default is not MISSING:
            data[each.name] = columns.get(each.name, each.default)
            continue
        rows = 0 if each.name in _OF_STORAGES else lengths.get(each.name.split("_")[0], storages)
        default = {"kind": int(Kind.TEMPORARY)}.get(each.name, neutral.get(each.name, 0))
        data[each.name] = np.asarray(columns.get(each.name, [default] * rows), kinds[str(each.type)])
    return Step(**data)


def columns_of(step: Step, op_s: Any, issue_s: Any) -> _native.StepColumns:
    """What the native simulator is given."""
    return _native.StepColumns(
        step.op_phase, step.op_resource, np.asarray(op_s, float), np.asarray(issue_s, float), step.bytes, step.tier, step.kind,
        step.producer, step.held_until, step.use_op, step.use_storage, step.use_mutates, step.save_storage, step.save_until,
        step.op_stream, step.op_prefetch, step.op_match,
    )  # fmt: skip
