"""The pass of `runtime.frozen`: the model's forward and backward as a schedule says, op by op and value by value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memtune.calls import ALLOCATES, EMPTY
from memtune.passes.in_parts import PartRow, PartStorages, Role, part_columns, part_rows, part_storages, use_columns
from memtune.passes.random_states import states_of
from memtune.passes.region import Region
from memtune.program import FOREVER, I32, Phase, Step
from memtune.schedule import Action, Schedule

_COPY = "aten.copy_.default"


def run_schedule(step: Step, region: Region, schedule: Schedule, *, by_readers: bool = False) -> Step:
    """`step` with `region`, which is its own, run as `schedule` says; the schedule must be right for it and move nothing.

    With `by_readers` it lets go of each value with its last reader, so nobody but readers holds it.
    """
    step = step.without_handing_over(region.rows)
    order, first, let_go, parts = _sequence(step, region, schedule)
    again = first != np.arange(len(order))
    begins, position = np.empty(step.n_ops, np.int32), np.empty(step.n_ops, np.int32)
    once = np.flatnonzero(~again)
    position[order[once]] = once  # of an op in parts the last row
    begins[order[once[::-1]]] = once[::-1]
    storages, patches = _storages(step, region, order, again, (begins, position), [] if by_readers else let_go, parts)
    states = states_of(np.isin(order, region.rows[sorted(region.graph.random)]), again, first)
    storages = {name: np.concatenate([column, states[name]]) for name, column in storages.items()}
    ops = {name: column[order] for name, column in step.columns("op_").items()}
    forward_again = again & (step.op_phase[order] == Phase.FORWARD)
    ops["op_phase"] = np.where(forward_again, np.uint8(Phase.RECOMPUTE), ops["op_phase"]).astype(np.uint8)
    ops["op_copy_of"] = np.where(again, first, -1).astype(np.int32)
    ops["op_node"] = np.where(again, -1, ops["op_node"]).astype(np.int32)
    names = tuple(dict.fromkeys((*step.names, ALLOCATES, _COPY)))
    by_shape = np.isin(order, region.rows[[name in EMPTY for name in region.graph.names]])
    ops["op_name"][by_shape] = names.index(ALLOCATES)
    if parts:
        part_columns(ops, parts, names.index(ALLOCATES), names.index(_COPY))
    return replace(
        step, names=names, **ops, **storages, **use_columns(step, order, patches, parts, by_shape),
        **_saves(step, region, position),
        enter=np.where(step.enter < 0, -1, begins[step.enter]).astype(np.int32),
        leave=np.where(step.leave < 0, -1, position[step.leave]).astype(np.int32),
    )  # fmt: skip


def _sequence(step: Step, region: Region, schedule: Schedule) -> tuple[I32, I32, list[tuple[int, int]], dict[int, PartRow]]:
    """Which rows run, and when values are let go.

    Returns:
        (n',) old row of each new one, (n',) new row in which it ran first, (value, new row after which it is let go), and what
        those new rows do that are of ops in parts.
    """
    rows, n_forward = region.rows.tolist(), region.graph.n_forward
    carried = {row for along in region.carried for row in along}
    middle = [row for row in range(rows[n_forward - 1] + 1, rows[n_forward]) if row not in carried]
    last = max(rows[-1], *carried, 0)
    order: list[int] = list(range(rows[0]))
    ran: dict[int, int] = {}
    first: dict[int, int] = {}
    let_go: list[tuple[int, int]] = []
    parts: dict[int, PartRow] = {}
    latest = -1  # a gradient that is added follows it, when what the op alone needed is gone
    for steps, then in ((schedule.forward, middle), (schedule.backward, range(last + 1, step.n_ops))):
        for each in steps:
            if each.action == Action.COMPUTE:
                pieces = part_rows(step, region, each) if each.along else []
                for part in pieces:
                    parts[len(order)] = part
                    if part.op in ran:
                        first[len(order)] = ran[part.op]
                    order.append(rows[part.op])
                if not pieces:
                    if each.of in ran:
                        first[len(order)] = ran[each.of]
                    order.append(rows[each.of])
                latest = len(order) - 1
                if each.of not in ran:
                    ran[each.of] = latest
                    order += region.carried[each.of]
            elif each.action == Action.FREE:
                let_go.append((each.of, latest))
        order += then
    found = np.arange(len(order), dtype=np.int32)
    found[list(first)] = list(first.values())
    return np.asarray(order, np.int32), found, let_go, parts


def _storages(
    step: Step,
    region: Region,
    order: I32,
    again: Any,
    where: tuple[I32, I32],
    let_go: list[tuple[int, int]],
    parts: dict[int, PartRow],
) -> tuple[dict[str, Any], dict[int, dict[int, int]]]:
    """Storage columns, with a new storage for each value made again; and (new row → storage read → storage to read instead).

    `where`: (n,) first and last new row of each old one, when it runs first.
    """
    begins, position = where
    held = step.held_until.copy()
    some = (held >= 0) & (held != FOREVER)
    held[some] = position[held[some]]
    mine = region.outside_until < 0
    held[region.storages[mine]] = -1  # what the plain model's own variables hold is no more
    producer = np.where(step.producer >= 0, begins[step.producer], -1).astype(np.int32)
    made_by = _made_by(step, np.unique(order[again | np.isin(np.arange(len(order)), list(parts))]))
    more: list[tuple[int, int]] = []  # (storage that it is like, new row that makes it)
    now: dict[int, int] = {}
    patches: dict[int, dict[int, int]] = {}
    frees: dict[int, list[int]] = {}
    for value, row in let_go:
        frees.setdefault(row, []).append(int(region.storages[value]))
    reads = {int(row): values for row, values in zip(region.rows, region.graph.reads, strict=True)}
    end: dict[int, int] = {}
    pieces, part_bytes = PartStorages(step, region, parts), {}
    for new, row in enumerate(order.tolist()):
        if new in parts:
            if parts[new].role is Role.EMPTY and again[new]:
                now[made_by[row][0]] = step.n_storages + len(more)
                more.append((made_by[row][0], new))
            if pieces.enter(new, now, step.n_storages + len(more)):
                part_bytes[step.n_storages + len(more)] = parts[new].bytes
                more.append((made_by[row][0], new))
            for storage in frees.get(new, ()):
                end[now.get(storage, storage)] = new
            continue
        if row in reads:
            changed = {s: now[s] for s in (int(region.storages[v]) for v in reads[row]) if s in now}
            if changed:
                patches[new] = changed
        if again[new]:
            for storage in made_by.get(row, ()):
                now[storage] = step.n_storages + len(more)
                more.append((storage, new))
                patches.setdefault(new, {})[storage] = now[storage]
        for storage in frees.get(new, ()):
            end[now.get(storage, storage)] = new
    like = np.asarray([storage for storage, _ in more], np.int32)
    columns: dict[str, Any] = {name: getattr(step, name) for name in ("bytes", "tier", "kind", "owner", "ready_after")}
    columns["ready_after"] = np.where(step.ready_after >= 0, position[step.ready_after], -1).astype(np.int32)
    columns = {name: np.concatenate([column, column[like]]) for name, column in columns.items()}
    part_storages(columns, part_bytes)
    columns["producer"] = np.concatenate([producer, np.asarray([row for _, row in more], np.int32)])
    columns["held_until"] = np.concatenate([held, np.full(len(more), -1, np.int32)])
    at = np.asarray(list(end), np.int32)
    columns["held_until"][at] = np.maximum(columns["held_until"][at], np.asarray(list(end.values()), np.int32))
    return columns, patches


def _made_by(step: Step, rows: I32) -> dict[int, list[int]]:
    """Row → storages that it makes, its scratch among them."""
    found: dict[int, list[int]] = {}
    for storage in np.flatnonzero(np.isin(step.producer, rows)).tolist():
        found.setdefault(int(step.producer[storage]), []).append(storage)
    return found


def _saves(step: Step, region: Region, position: I32) -> dict[str, Any]:
    """What autograd saves outside; inside, the schedule says what stays."""
    keep = ~np.isin(step.save_before - step.save_is_output, region.rows[: region.graph.n_forward])
    columns = {name: column[keep] for name, column in step.columns("save_").items()}
    for name in ("save_before", "save_until", "save_used_until", "save_asked"):
        column = columns[name]
        columns[name] = np.where(column < 0, -1, position[np.minimum(column, step.n_ops - 1)]).astype(np.int32)
    return columns
