"""A step written anew from another one: ranges of its rows, each as often as it runs, with storages of their
own, and new ops.

A storage that was there before the step has one number throughout (`here`), which may come to stand for
another one: a weight that has been brought in, a sum of gradients. What a range of rows makes is looked up in
a table that the caller keeps (`made`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program.parameter_columns import columns_of
from memtune.program.step import (
    FOREVER,
    I32,
    READS,
    WRITES,
    Kind,
    Phase,
    Resource,
    Step,
    Storages,
    Tier,
    Uses,
)

RowIndex = npt.NDArray[np.intp]
RowMask = npt.NDArray[np.bool_]
_NONE = np.empty(0, np.int32)
_OF_NEW = ("name", "call", "phase", "resource", "traffic_bytes", "group", "stream", "prefetch")
_NEUTRAL = {"sequence_nr": -1, "copy_of": -1}


@dataclass(frozen=True)
class NewOp:
    """An op that the old step does not have."""

    name: str
    phase: Phase
    resource: Resource
    stream: int = 0
    prefetch: int = 0
    group: int = 0


@dataclass(eq=False)
class Turn:
    """Rows that run together once, in ascending order, and what they made."""

    rows: list[RowIndex] = field(default_factory=list)
    positions: list[I32] = field(default_factory=list)
    storages: list[I32] = field(default_factory=list)
    numbers: list[I32] = field(default_factory=list)


class Replay:
    """A step under construction.

    Args:
        step: What its rows are taken from.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.n_ops = step, 0
        self._columns = step.ops.columns()
        self._names = {name: number for number, name in enumerate(step.names)}
        self._by_producer = np.argsort(step.storages.producer, kind="stable")
        self._made = np.searchsorted(step.storages.producer[self._by_producer], np.arange(step.ops.n + 1))
        self._uses = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
        self.there = step.storages.producer < 0
        before = np.flatnonzero(self.there)
        self.here = np.full(step.storages.n, -1, np.int32)
        self.here[before] = np.arange(len(before), dtype=np.int32)
        self.n_storages = 0
        self._storages: list[tuple[Any, ...]] = []
        self._pending_storages: list[tuple[int, ...]] = []
        self.add_storages(
            step.storages.bytes[before],
            step.storages.tier[before],
            step.storages.kind[before],
            -1,
            step.storages.owner[before],
            step.storages.held_until[before],
        )
        self._ops: list[dict[str, Any]] = []
        self._pending: list[tuple[int, ...]] = []
        self._op_uses: list[tuple[I32, I32, Any]] = []
        self._new_uses: list[tuple[int, int, int]] = []
        self._holds: list[tuple[I32, Any]] = []
        self._kinds: list[tuple[int, int]] = []
        self._emptied = _NONE
        self.first_position = np.full(step.ops.n, -1, np.int32)

    def add_storages(self, n_bytes: Any, tier: Any, kind: Any, producer: Any, owner: Any, held: Any) -> I32:
        """New storages; each argument is a column or one value for all. Returns their numbers."""
        self._flush_storages()
        count = len(n_bytes)
        numbers = np.arange(self.n_storages, self.n_storages + count, dtype=np.int32)
        self.n_storages += count
        self._storages.append(
            tuple(np.broadcast_to(each, count) for each in (n_bytes, tier, kind, producer, owner, held))
        )
        return numbers

    def new_op(
        self,
        op: NewOp,
        traffic_bytes: int = 0,
        *,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        makes: tuple[int, Tier, Kind, int] | None = None,
        call: int = -1,
    ) -> int:
        """Append `op`; `makes`: bytes, tier, kind and owner of what it makes. Returns the number of that, -1
        for nothing.
        """
        name = self._names.setdefault(op.name, len(self._names))
        self._pending.append(
            (name, call, op.phase, op.resource, traffic_bytes, op.group, op.stream, op.prefetch)
        )
        at = self.n_ops
        self.n_ops += 1
        self._new_uses += [(at, storage, READS) for storage in reads] + [
            (at, storage, WRITES) for storage in writes
        ]
        if makes is None:
            return -1
        n_bytes, tier, kind, owner = makes
        self._pending_storages.append((n_bytes, tier, kind, at, owner, -1))
        self.n_storages += 1
        return self.n_storages - 1

    def run(
        self,
        turn: Turn,
        rows: RowIndex,
        made: I32,
        kept: I32,
        from_kept: RowMask,
        *,
        again: I32 | None = None,
    ) -> None:
        """Append the ops `rows`.

        Args:
            turn: What they are part of.
            rows: Of the old step, ascending.
            made: (m,) the number of each old storage that a run has made; gets those of this one.
            kept: (m,) numbers of an earlier run …
            from_kept: (m,) … which are read in the place of `made` where this is True.
            again: (n,) where each row ran first; then this is a recomputation of those of forward.
        """
        if not len(rows):
            return
        self._flush()
        step = self.step
        positions = np.arange(self.n_ops, self.n_ops + len(rows), dtype=np.int32)
        self.n_ops += len(rows)
        columns = {name: column[rows] for name, column in self._columns.items()}
        columns["sequence_nr"] = columns["copy_of"] = np.full(len(rows), -1, np.int32)
        if again is not None:
            repeated = (columns["phase"] == Phase.FORWARD) & (again[rows] >= 0)
            columns["copy_of"] = np.where(repeated, again[rows], -1).astype(np.int32)
            columns["phase"] = np.where(repeated, np.uint8(Phase.RECOMPUTE), columns["phase"])
        self._ops.append(columns)
        fresh = rows[self.first_position[rows] < 0]
        self.first_position[fresh] = positions[self.first_position[rows] < 0]
        index, maker = _expanded(self._made[rows], self._made[rows + 1])
        new = self._by_producer[index]
        numbers = self.add_storages(
            step.storages.bytes[new],
            step.storages.tier[new],
            step.storages.kind[new],
            positions[maker],
            step.storages.owner[new],
            -1,
        )
        made[new] = numbers
        index, user = _expanded(self._uses[rows], self._uses[rows + 1])
        storages = self.number(step.uses.storage[index], made, kept, from_kept)
        self._op_uses.append((positions[user], storages, step.uses.mode[index]))
        turn.rows.append(rows)
        turn.positions.append(positions)
        turn.storages.append(new.astype(np.int32))
        turn.numbers.append(numbers)

    def number(self, storages: I32, made: I32, kept: I32, from_kept: RowMask) -> I32:
        """New numbers of old `storages`; see `run`."""
        mine = np.where(from_kept[storages], kept[storages], made[storages])
        found: I32 = np.where(self.there[storages], self.here[storages], mine).astype(np.int32)
        return found

    def hold(self, numbers: Any, until: Any) -> None:
        """Storages `numbers` are there through op `until`."""
        numbers = np.atleast_1d(np.asarray(numbers, np.int32))
        if len(numbers):
            self._holds.append((numbers, np.broadcast_to(np.asarray(until, np.int32), len(numbers))))

    def remake(self, number: int, kind: Kind) -> None:
        """The storage `number` turns out to be of another kind."""
        self._kinds.append((number, int(kind)))

    def empty(self, storages: I32) -> None:
        """Of old `storages`, which were there before the step, no byte is left."""
        self._emptied = np.union1d(self._emptied, self.here_before(storages)).astype(np.int32)

    def _flush(self) -> None:
        """New ops become columns: rows follow in their order."""
        if not self._pending:
            return
        values = dict(zip(_OF_NEW, zip(*self._pending, strict=True), strict=True))
        count, columns = len(self._pending), self._columns
        neutral = {name: [_NEUTRAL.get(name, 0)] * count for name in columns}
        self._ops.append(
            {
                name: np.asarray(column).astype(columns[name].dtype)
                for name, column in (neutral | values).items()
            }
        )
        self._pending = []

    def _flush_storages(self) -> None:
        if self._pending_storages:
            self._storages.append(
                tuple(np.asarray(each, np.int64) for each in zip(*self._pending_storages, strict=True))
            )
            self._pending_storages = []

    def done(self, gradient: I32, landing: I32) -> Step:
        """The new step.

        Args:
            gradient: (parameters,) number of each one's gradient, -1 for none.
            landing: Numbers of the gradients in the order in which they land.
        """
        self._flush()
        self._flush_storages()
        step = self.step
        ops: dict[str, Any] = {
            name: np.concatenate([part[name] for part in self._ops]).astype(column.dtype)
            for name, column in self._columns.items()
        }
        names = ("bytes", "tier", "kind", "producer", "owner", "held_until")
        columns: dict[str, Any] = {
            name: np.concatenate(parts).astype(getattr(step.storages, name).dtype)
            for name, parts in zip(names, zip(*self._storages, strict=True), strict=True)
        }
        columns["bytes"][self._emptied] = 0
        for number, kind in self._kinds:
            columns["kind"][number] = kind
        if self._holds:
            numbers, until = (np.concatenate(parts) for parts in zip(*self._holds, strict=True))
            np.maximum.at(columns["held_until"], numbers, until)
        blocks = columns_of(step.parameters)
        known = self.here_before(blocks.storage)
        columns["grad_ready_after"] = np.full(self.n_storages, -1, np.int32)
        return replace(
            step,
            names=tuple(self._names),
            parameters=replace(blocks, storage=known, gradient=gradient),
            ops=replace(step.ops, **ops),
            storages=Storages(**columns),
            uses=self._uses_of_all(),
            saves=step.saves.rows(slice(0)),
            calls=replace(step.calls, inputs=step.calls.inputs.rows(slice(0))),
            grad_order=landing,
            returned=_NONE,
            partly_written=_NONE,
            read_by_host=_NONE,
            forward_starts=self.first_position[np.maximum(step.forward_starts, 0)],
            forward_ends=self.first_position[np.maximum(step.forward_ends, 0)],
        )

    def here_before(self, storages: I32) -> I32:
        """The numbers that storages which were there before the step have always had."""
        order = np.cumsum(self.there) - 1
        found: I32 = order[storages].astype(np.int32)
        return found

    def _uses_of_all(self) -> Uses:
        new = np.asarray(self._new_uses, np.int32).reshape(-1, 3)
        op, storage, mutates = (
            np.concatenate([*(part[i] for part in self._op_uses), new[:, i]]).astype(dtype)
            for i, dtype in enumerate((np.int32, np.int32, np.uint8))
        )
        order = np.argsort(op, kind="stable")
        return Uses(op=op[order], storage=storage[order], mode=mutates[order])


def settle(replay: Replay, turn: Turn, saved: Saved, cap: int, end: int, *, ignore: RowMask) -> None:
    """Say how long the storages that `turn` made are held: by Python as in the old step, by autograd until it
    lets go.

    Args:
        replay: The step under construction.
        turn: All its rows have run.
        saved: What autograd saved in these rows: numbers, and the rows after which it lets go.
        cap: Row of the old step with which the code that holds on to things returns …
        end: … and where that is in the new one.
        ignore: (m,) storages that are held in another way.
    """
    step = replay.step
    rows, positions = np.concatenate(turn.rows), np.concatenate(turn.positions)
    storages, numbers = np.concatenate(turn.storages), np.concatenate(turn.numbers)
    held = step.storages.held_until[storages]
    mine = (held >= 0) & ~ignore[storages]
    storages, numbers, held = storages[mine], numbers[mine], held[mine]
    late = (held >= cap) & (step.ops.phase[step.storages.producer[storages]] == Phase.FORWARD)
    until = np.where(late, end, positions[np.maximum(np.searchsorted(rows, held, side="right") - 1, 0)])
    replay.hold(numbers, np.where(held == FOREVER, FOREVER, until))
    if len(saved[0]):
        replay.hold(saved[0], positions[np.maximum(np.searchsorted(rows, saved[1], side="right") - 1, 0)])


Saved = tuple[I32, I32]


def _expanded(begin: Any, end: Any) -> tuple[Any, Any]:
    """All indices of the ranges [begin, end), and the range that each is of."""
    count = end - begin
    total = np.cumsum(count)
    within = np.arange(total[-1] if len(total) else 0) - np.repeat(total - count, count)
    return within + np.repeat(begin, count), np.repeat(np.arange(len(count)), count)
