"""Steps made from columns, for tests that need no model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from memtune import _native
from memtune.program.step import FOREVER, CallInputs, Calls, Kind, Ops, Saves, Step, Storages, Table, Uses

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


def drawn_storages(
    draw: st.DrawFn, n: int, m: int, *, most_bytes: int, tiers: list[int], uses: int, saves: int
) -> dict[str, Any]:
    """Return columns, for `make_step`, of `m` random storages that `n` ops make, use and save.

    Args:
        draw: Hypothesis'.
        n: Number of ops.
        m: Number of storages.
        most_bytes: Largest storage.
        tiers: Tiers to draw from.
        uses: Largest number of uses.
        saves: Largest number of saved tensors.
    """
    some, ops = st.integers(0, m - 1), st.integers(0, n - 1)

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=m, max_size=m))

    producer = column(st.integers(-1, n - 1))
    pairs = draw(st.lists(st.tuples(ops, some, st.integers(0, 2)), max_size=uses))
    used = sorted((max(op, producer[s]), s, mutates) for op, s, mutates in pairs)
    saved = draw(st.lists(st.tuples(some, ops), max_size=saves))
    return {
        "storages_bytes": column(st.integers(0, most_bytes)),
        "storages_tier": column(st.sampled_from(tiers)),
        "storages_kind": column(st.integers(0, 7)),
        "storages_producer": producer,
        "storages_held_until": column(st.sampled_from([-1, 0, n - 1, int(FOREVER)])),
        "uses_op": [u[0] for u in used],
        "uses_storage": [u[1] for u in used],
        "uses_mode": [u[2] for u in used],
        "saves_storage": [s for s, _ in saved],
        "saves_held_until": [max(until, producer[s]) for s, until in saved],
    }
