"""Pass of `activations.schedules.scheduled_region`: forward and backward by a schedule, op by op.

An op that runs in parts, with other ops along, has its output allocated first. Then, for each part, the ops
along compute their part, the op computes its own from those, and the result is copied to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.activations.recompute import states_of
from memtune.activations.schedules.region_pass import Region
from memtune.program import (
    ALLOCATES,
    EMPTY,
    FOREVER,
    I32,
    ON_GPU_ONLY,
    READS,
    WRITES,
    Action,
    Edit,
    Kind,
    Phase,
    Resource,
    Saves,
    Schedule,
    ScheduleStep,
    Step,
    Storages,
    Tier,
    Uses,
    parts_of,
)

_COPY = "aten.copy_.default"


@dataclass
class _HostCopy:
    """A step that copies a value to the host, or back."""

    value: int
    back: bool
    row: int
    """The new row after which it begins; of a reload, before which."""
    phase: Phase
    read_at: int = -1
    """The new row that reads a reloaded value first; `row` itself unless it is prefetched."""
    storage: int = -1
    """Its storage on the device."""


def run_schedule(step: Step, region: Region, schedule: Schedule, *, by_readers: bool = False) -> Step:
    """Return `step` with its `region` run by `schedule`, which must be valid for it.

    With `by_readers` each value is freed with its last reader, so that only readers hold it.
    """
    step = step.without_donations(region.rows)
    order, first, freed_after_row, parts, copies = _sequence(step, region, schedule)
    again = first != np.arange(len(order))
    begins, position = np.empty(step.ops.n, np.int32), np.empty(step.ops.n, np.int32)
    once = np.flatnonzero(~again)
    position[order[once]] = once  # the last row of an op in parts; `begins` has the first
    begins[order[once[::-1]]] = once[::-1]
    columns, patches = _storages(
        step, region, order, again, (begins, position), [] if by_readers else freed_after_row, parts, copies
    )
    states = states_of(np.isin(order, region.rows[sorted(region.graph.random)]), again, first)
    storages = Storages(**{name: np.concatenate([column, states[name]]) for name, column in columns.items()})
    ops = {name: column[order] for name, column in step.ops.columns().items()}
    forward_again = again & (step.ops.phase[order] == Phase.FORWARD)
    ops["phase"] = np.where(forward_again, np.uint8(Phase.RECOMPUTE), ops["phase"]).astype(np.uint8)
    ops["copy_of"] = np.where(again, first, -1).astype(np.int32)
    # Autograd makes a node when an op first runs; its repetition in backward makes none.
    ops["sequence_nr"] = np.where(again, -1, ops["sequence_nr"]).astype(np.int32)
    names = tuple(dict.fromkeys((*step.names, ALLOCATES, _COPY)))
    # Generated code calls `empty_strided`, whatever op had made the shape.
    by_shape = np.isin(order, region.rows[[name in EMPTY for name in region.graph.names]])
    ops["name"][by_shape] = names.index(ALLOCATES)
    if parts:
        part_columns(ops, parts, names.index(ALLOCATES), names.index(_COPY))
    run = replace(
        step,
        names=names,
        ops=replace(step.ops, **ops),
        storages=storages,
        uses=uses_of(step, order, patches, parts, by_shape),
        saves=_saves(step, region, position),
        forward_starts=np.where(step.forward_starts < 0, -1, begins[step.forward_starts]).astype(np.int32),
        forward_ends=np.where(step.forward_ends < 0, -1, position[step.forward_ends]).astype(np.int32),
    )
    return _with_host_copies(run, copies) if copies else run


def _with_host_copies(step: Step, copies: Sequence[_HostCopy]) -> Step:
    """Return `step` with `copies`, in order; it has the storages that they copy and make on the device."""
    edit = Edit(step)
    n_bytes, on_host = step.storages.bytes, dict[int, I32]()
    begun: dict[int, I32] = {}  # new row → the last reload that begins before it
    held: list[tuple[I32, int]] = []
    for copy in copies:
        size, row = n_bytes[[copy.storage]], np.asarray([copy.row], np.int32)
        if copy.back:
            prefetches = copy.read_at != copy.row
            op = edit.add_ops(
                "memtune.to_device.default",
                before=row,
                phase=copy.phase,
                resource=Resource.HOST_TO_DEVICE,
                traffic_bytes=size,
                stream=int(not prefetches),
                prefetch=int(prefetches),
                reads=on_host[copy.value],
            )
            edit.storages.producer[copy.storage] = op[0]
            begun[copy.row] = op
            if prefetches:
                held.append((on_host[copy.value], copy.read_at))
            continue
        op = edit.add_ops(
            "memtune.to_host.default",
            after=row,
            phase=copy.phase,
            resource=Resource.DEVICE_TO_HOST,
            traffic_bytes=size,
            prefetch=1,
            reads=np.asarray([copy.storage], np.int32),
        )
        on_host[copy.value] = edit.add_storages(size, producer=op, tier=Tier.HOST)
    for host, read_at in held:
        # Generated code drops the host copy just before the reader, after reloads that begin there.
        edit.hold_through(host, begun.get(read_at, np.asarray([read_at - 1], np.int32)))
    return edit.done()


def _sequence(
    step: Step, region: Region, schedule: Schedule
) -> tuple[I32, I32, list[tuple[int, int]], dict[int, PartRow], list[_HostCopy]]:
    """Return the rows that run, and when values are freed.

    Returns:
        (n',) old row of each new one, (n',) new row of its first run, (value, new row after which it is
        freed), the functions of new rows of ops in parts, and copies to the host and back.
    """
    rows, n_forward = region.rows.tolist(), region.graph.n_forward
    carried = {row for along in region.carried for row in along}
    # The loss: rows between forward and backward that follow no op of the region.
    middle = [row for row in range(rows[n_forward - 1] + 1, rows[n_forward]) if row not in carried]
    last = max(rows[-1], *carried, 0)
    order: list[int] = list(range(rows[0]))
    ran: dict[int, int] = {}
    first: dict[int, int] = {}
    freed_after_row: list[tuple[int, int]] = []
    parts: dict[int, PartRow] = {}
    copies: list[_HostCopy] = []
    coming: dict[int, _HostCopy] = {}
    latest = -1  # an added gradient follows this row, after values that only this op needed are freed
    for steps, then in ((schedule.forward, middle), (schedule.backward, range(last + 1, step.ops.n))):
        phase = Phase.FORWARD if steps is schedule.forward else Phase.BACKWARD
        for each in steps:
            if each.action == Action.COMPUTE:
                for value in coming.keys() & set(each.reads(region.graph)):
                    coming.pop(value).read_at = len(order)
                pieces = part_rows(step, region, each) if each.along else []
                for part in pieces:
                    parts[len(order)] = part
                    if part.op in ran:
                        first[len(order)] = ran[part.op]
                    order.append(rows[part.op])
                if not pieces:
                    if each.target in ran:
                        first[len(order)] = ran[each.target]
                    order.append(rows[each.target])
                latest = len(order) - 1
                if each.target not in ran:
                    ran[each.target] = latest
                    order += region.carried[each.target]
            elif each.action == Action.FREE:
                freed_after_row.append((each.target, latest))
            elif each.action == Action.TO_HOST:
                copies.append(_HostCopy(each.target, False, latest, phase))
            else:
                copies.append(_HostCopy(each.target, True, len(order), phase))
                coming[each.target] = copies[-1]
        order += then
    found = np.arange(len(order), dtype=np.int32)
    found[list(first)] = list(first.values())
    return np.asarray(order, np.int32), found, freed_after_row, parts, copies


def _storages(
    step: Step,
    region: Region,
    order: I32,
    again: Any,
    where: tuple[I32, I32],
    freed_after_row: list[tuple[int, int]],
    parts: dict[int, PartRow],
    copies: Sequence[_HostCopy],
) -> tuple[dict[str, Any], dict[int, dict[int, int]]]:
    """Return the storage columns, with a new storage for each recomputed or reloaded value, and (new row →
    storage → replacement).
    """
    # `where`: (n,) first and last new row of each old row's first run.
    begins, position = where
    held = step.storages.held_until.copy()
    some = (held >= 0) & (held != FOREVER)
    held[some] = position[held[some]]
    mine = region.outside_until < 0
    held[region.storages[mine]] = -1  # generated code has no local variables of the plain model's code
    producer = np.where(step.storages.producer >= 0, begins[step.storages.producer], -1).astype(np.int32)
    made_by = _made_by(step, np.unique(order[again | np.isin(np.arange(len(order)), list(parts))]))
    more: list[tuple[int, int]] = []  # (storage that it is like, new row that makes it)
    now: dict[int, int] = {}
    patches: dict[int, dict[int, int]] = {}
    frees: dict[int, list[int]] = {}
    for value, row in freed_after_row:
        frees.setdefault(row, []).append(int(region.storages[value]))
    end: dict[int, int] = {}
    pieces, part_bytes = PartStorages(step, region, parts), {}
    leave, back = dict[int, list[_HostCopy]](), dict[int, list[_HostCopy]]()
    for copy in copies:
        (back if copy.back else leave).setdefault(copy.row, []).append(copy)
    for new, row in enumerate(order.tolist()):
        for copy in back.get(new, ()):
            storage, copy.storage = int(region.storages[copy.value]), step.storages.n + len(more)
            now[storage] = copy.storage
            more.append((storage, new))  # the copy's own row is its producer, once that is there
        if new in parts:
            if parts[new].role is Role.EMPTY and again[new]:
                now[made_by[row][0]] = step.storages.n + len(more)
                more.append((made_by[row][0], new))
            if pieces.enter(new, now, step.storages.n + len(more)):
                part_bytes[step.storages.n + len(more)] = parts[new].bytes
                more.append((made_by[row][0], new))
        else:
            changed = {s: now[s] for s in region.reads_of_row.get(row, ()) if s in now}
            if changed:
                patches[new] = changed
            if again[new]:
                for storage in made_by.get(row, ()):
                    now[storage] = step.storages.n + len(more)
                    more.append((storage, new))
                    patches.setdefault(new, {})[storage] = now[storage]
        for copy in leave.get(new, ()):
            storage = int(region.storages[copy.value])
            copy.storage = now.get(storage, storage)
        for storage in frees.get(new, ()):
            end[now.get(storage, storage)] = new
    columns = _extended(step, position, more)
    part_storages(columns, part_bytes)
    columns["producer"] = np.concatenate([producer, np.asarray([row for _, row in more], np.int32)])
    columns["held_until"] = np.concatenate([held, np.full(len(more), -1, np.int32)])
    at = np.asarray(list(end), np.int32)
    columns["held_until"][at] = np.maximum(
        columns["held_until"][at], np.asarray(list(end.values()), np.int32)
    )
    return columns, patches


def _extended(step: Step, position: I32, more: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return columns of the storages, those in `more` (storage that one is like, its maker) included."""
    like = np.asarray([storage for storage, _ in more], np.int32)
    columns: dict[str, Any] = {
        name: getattr(step.storages, name)
        for name in ("bytes", "tier", "kind", "owner", "grad_ready_after", "float_bytes")
    }
    columns["grad_ready_after"] = np.where(
        step.storages.grad_ready_after >= 0, position[step.storages.grad_ready_after], -1
    ).astype(np.int32)
    return {name: np.concatenate([column, column[like]]) for name, column in columns.items()}


def _made_by(step: Step, rows: I32) -> dict[int, list[int]]:
    """Return by row the storages that it makes, including workspace."""
    found: dict[int, list[int]] = {}
    for storage in np.flatnonzero(np.isin(step.storages.producer, rows)).tolist():
        found.setdefault(int(step.storages.producer[storage]), []).append(storage)
    return found


def _saves(step: Step, region: Region, position: I32) -> Saves:
    """Return the saves outside the region; inside it the schedule determines what is kept."""
    keep = ~np.isin(step.saves.packed_before - step.saves.is_output, region.rows[: region.graph.n_forward])
    saves = step.saves.rows(keep)
    moved: dict[str, Any] = {}
    for name in ("packed_before", "held_until", "used_until", "unpacked_before"):
        column = getattr(saves, name)
        moved[name] = np.where(column < 0, -1, position[np.minimum(column, step.ops.n - 1)]).astype(np.int32)
    return replace(saves, **moved)


class Role(Enum):
    """Function of a row in its step."""

    EMPTY = auto()
    """Allocates the op's output."""
    ALONG = auto()
    """Computes a part of a value that never exists whole."""
    RESULT = auto()
    """Computes a part of the op's output."""
    COPY = auto()
    """Copies that part to its place."""


@dataclass(frozen=True)
class PartRow:
    """Row of a step that runs in parts."""

    role: Role
    op: int
    """Number in the region."""
    share: float
    """Fraction of all elements."""
    bytes: int = 0
    """Bytes of the storage that it makes; 0 for EMPTY, which makes the op's own."""
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(storage, use), set when storages are known."""


def elements_of(step: Step, region: Region) -> Sequence[int]:
    """Return (n,) the elements of each elementwise op's output in the region, 0 for other ops."""
    graph = region.graph
    found = []
    for op, (row, made) in enumerate(zip(region.rows.tolist(), graph.makes, strict=True)):
        size = int(step.ops.elementwise_bytes[row])
        written = bool(graph.writes[op]) or any(value in graph.writers for value in made)
        # An op that mutates, or whose output is mutated, cannot be computed part by part.
        plain = 0 < size < ON_GPU_ONLY and len(made) == 1 and not written and not region.scratch_bytes[op]
        found.append(int(region.bytes[made[0]]) // size if plain else 0)
    return found


def part_rows(step: Step, region: Region, compute: ScheduleStep) -> list[PartRow]:
    """Return the rows of `compute`, in order."""
    size = {op: int(step.ops.elementwise_bytes[region.rows[op]]) for op in (*compute.along, compute.target)}
    n_elements = int(region.bytes[region.graph.makes[compute.target][0]]) // size[compute.target]
    rows = [PartRow(Role.EMPTY, compute.target, 0.0)]
    for start, end in parts_of(n_elements, compute.parts):
        share = (end - start) / n_elements
        rows += [PartRow(Role.ALONG, op, share, (end - start) * size[op]) for op in compute.along]
        rows += [
            PartRow(role, compute.target, share, (end - start) * size[compute.target])
            for role in (Role.RESULT, Role.COPY)
        ]
    return rows


class PartStorages:
    """Assigns storages to the rows of such steps.

    Args:
        step: The plain step.
        region: Region of the step.
        rows: New row → its function.
    """

    def __init__(self, step: Step, region: Region, rows: dict[int, PartRow]) -> None:
        self._step, self._region, self._rows = step, region, rows
        self._start = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
        self._parts: dict[int, int] = {}  # storage of the plain step → its current part
        self._result = -1

    def enter(self, new: int, now: dict[int, int], number: int) -> bool:
        """Set the uses of row `new`; return whether it makes a part, which becomes storage `number`."""
        part, region = self._rows[new], self._region
        storage = int(region.storages[region.graph.makes[part.op][0]])
        if part.role is Role.EMPTY:
            # The start of an op: parts of the previous one are no longer valid.
            self._parts.clear()
            return False
        if part.role is Role.COPY:
            whole = now.get(storage, storage)
            # `copy_` of a slice keeps the rest of the whole, so it reads as well as writes it.
            part.uses[:] = [(whole, int(READS)), (self._result, int(READS)), (whole, int(WRITES))]
            return False
        row = int(region.rows[part.op])
        span = slice(self._start[row], self._start[row + 1])
        read, how = self._step.uses.storage[span].tolist(), self._step.uses.mode[span].tolist()
        part.uses[:] = [(self._parts.get(s, now.get(s, s)), h) for s, h in zip(read, how, strict=True)]
        if part.role is Role.ALONG:
            self._parts[storage] = number
        else:
            self._result = number
        return True


def part_columns(ops: dict[str, Any], rows: dict[int, PartRow], empty: int, copy: int) -> None:
    """Change the op columns of rows of such steps; `empty` and `copy` are names."""
    at = np.asarray(list(rows), np.int32)
    share = np.asarray([part.share for part in rows.values()])
    ops["flops"][at] *= share
    ops["traffic_bytes"][at] = (ops["traffic_bytes"][at] * share).astype(np.int64)
    # No longer an op that a schedule may divide into parts.
    ops["elementwise_bytes"][at] = 0
    for new, part in rows.items():
        if part.role is Role.EMPTY:
            ops["name"][new], ops["resource"][new] = empty, Resource.NOTHING
        elif part.role is Role.COPY:
            ops["name"][new], ops["flops"][new], ops["traffic_bytes"][new] = copy, 0.0, 2 * part.bytes


def part_storages(columns: dict[str, Any], bytes_of: dict[int, int]) -> None:
    """Change the storage columns of parts: their sizes, and that they are no gradients."""
    at = np.asarray(list(bytes_of), np.int32)
    columns["bytes"][at] = list(bytes_of.values())
    columns["kind"][at], columns["owner"][at], columns["grad_ready_after"][at] = Kind.TEMPORARY, -1, -1


def uses_of(
    step: Step,
    order: I32,
    patches: dict[int, dict[int, int]],
    rows: dict[int, PartRow],
    by_shape: npt.NDArray[np.bool_],
) -> Uses:
    """Return the uses of the new step: those of the old rows with storages replaced by `patches`, or those of
    a part.

    Rows where `by_shape` is true use nothing.
    """
    start = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
    count = (start[1:] - start[:-1])[order]
    count[by_shape] = 0
    count[list(rows)] = [len(part.uses) for part in rows.values()]
    new_start = np.concatenate([[0], np.cumsum(count)])
    index = np.arange(new_start[-1]) - np.repeat(new_start[:-1], count) + np.repeat(start[:-1][order], count)
    index = np.minimum(index, step.uses.n - 1)  # parts may have more uses than the op; overwritten below
    storage, how = step.uses.storage[index], step.uses.mode[index]
    for row, part in rows.items():
        at = slice(new_start[row], new_start[row + 1])
        storage[at], how[at] = [each for each, _ in part.uses], [each for _, each in part.uses]
    for row, changed in patches.items():
        at = slice(new_start[row], new_start[row + 1])
        storage[at] = [changed.get(each, each) for each in storage[at].tolist()]
    return Uses(op=np.repeat(np.arange(len(order), dtype=np.int32), count), storage=storage, mode=how)
