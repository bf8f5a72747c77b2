"""The pass of `runtime.frozen`: the model's forward and backward as a schedule says, op by op and value by value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memtune.passes.region import Region
from memtune.program import FOREVER, I32, Phase, Step
from memtune.schedule import Action, Schedule


def run_schedule(step: Step, region: Region, schedule: Schedule) -> Step:
    """`step` with `region`, which is its own, run as `schedule` says; the schedule must be right for it and move nothing."""
    step = step.without_handing_over(region.rows)
    order, first, let_go = _sequence(step, region, schedule)
    again = first != np.arange(len(order))
    position = np.empty(step.n_ops, np.int32)
    position[order[~again]] = np.flatnonzero(~again)
    storages, patches = _storages(step, region, order, again, position, let_go)
    ops = {name: column[order] for name, column in step.columns("op_").items()}
    forward_again = again & (step.op_phase[order] == Phase.FORWARD)
    ops["op_phase"] = np.where(forward_again, np.uint8(Phase.RECOMPUTE), ops["op_phase"]).astype(np.uint8)
    ops["op_copy_of"] = np.where(again, first, -1).astype(np.int32)
    ops["op_node"] = np.where(again, -1, ops["op_node"]).astype(np.int32)
    return replace(
        step, **ops, **storages, **_uses(step, order, patches), **_saves(step, region, position),
        enter=np.where(step.enter < 0, -1, position[step.enter]).astype(np.int32),
        leave=np.where(step.leave < 0, -1, position[step.leave]).astype(np.int32),
    )  # fmt: skip


def _sequence(step: Step, region: Region, schedule: Schedule) -> tuple[I32, I32, list[tuple[int, int]]]:
    """(n',) old row of each new one, (n',) new row in which it ran first, and (value, new row after which it is let go)."""
    rows, n_forward = region.rows.tolist(), region.graph.n_forward
    carried = {row for along in region.carried for row in along}
    middle = [row for row in range(rows[n_forward - 1] + 1, rows[n_forward]) if row not in carried]
    last = max(rows[-1], *carried, 0)
    order: list[int] = list(range(rows[0]))
    ran: dict[int, int] = {}
    first: dict[int, int] = {}
    let_go: list[tuple[int, int]] = []
    latest = -1  # a gradient that is added follows it, when what the op alone needed is gone
    for steps, then in ((schedule.forward, middle), (schedule.backward, range(last + 1, step.n_ops))):
        for action, of in steps:
            if action == Action.COMPUTE:
                latest = len(order)
                if of in ran:
                    first[len(order)] = ran[of]
                    order.append(rows[of])
                else:
                    ran[of] = len(order)
                    order += [rows[of], *region.carried[of]]
            elif action == Action.FREE:
                let_go.append((of, latest))
        order += then
    found = np.arange(len(order), dtype=np.int32)
    found[list(first)] = list(first.values())
    return np.asarray(order, np.int32), found, let_go


def _storages(
    step: Step, region: Region, order: I32, again: Any, position: I32, let_go: list[tuple[int, int]]
) -> tuple[dict[str, Any], dict[int, dict[int, int]]]:
    """Storage columns, with a new storage for each value made again; and (new row → storage read → storage to read instead)."""
    held = step.held_until.copy()
    some = (held >= 0) & (held != FOREVER)
    held[some] = position[held[some]]
    mine = region.outside_until < 0
    held[region.storages[mine]] = -1  # what the plain model's own variables hold is no more
    producer = np.where(step.producer >= 0, position[step.producer], -1).astype(np.int32)
    made_by = _made_by(step, np.unique(order[again]))
    more: list[tuple[int, int]] = []  # (storage that it is like, new row that makes it)
    now: dict[int, int] = {}
    patches: dict[int, dict[int, int]] = {}
    frees: dict[int, list[int]] = {}
    for value, row in let_go:
        frees.setdefault(row, []).append(int(region.storages[value]))
    reads = {int(row): values for row, values in zip(region.rows, region.graph.reads, strict=True)}
    end: dict[int, int] = {}
    for new, row in enumerate(order.tolist()):
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


def _uses(step: Step, order: I32, patches: dict[int, dict[int, int]]) -> dict[str, Any]:
    start = np.searchsorted(step.use_op, np.arange(step.n_ops + 1))
    count = (start[1:] - start[:-1])[order]
    new_start = np.concatenate([[0], np.cumsum(count)])
    index = np.arange(new_start[-1]) - np.repeat(new_start[:-1], count) + np.repeat(start[:-1][order], count)
    storage = step.use_storage[index]
    for row, changed in patches.items():
        at = slice(new_start[row], new_start[row + 1])
        storage[at] = [changed.get(each, each) for each in storage[at].tolist()]
    use_op = np.repeat(np.arange(len(order), dtype=np.int32), count)
    return {"use_op": use_op, "use_storage": storage, "use_mutates": step.use_mutates[index]}


def _saves(step: Step, region: Region, position: I32) -> dict[str, Any]:
    """What autograd saves outside; inside, the schedule says what stays."""
    before = step.save_before - step.save_is_output
    keep = (before < region.rows[0]) | (before > region.rows[region.graph.n_forward - 1])
    columns = {name: column[keep] for name, column in step.columns("save_").items()}
    for name in ("save_before", "save_until", "save_used_until", "save_asked"):
        column = columns[name]
        columns[name] = np.where(column < 0, -1, position[np.minimum(column, step.n_ops - 1)]).astype(np.int32)
    return columns
