"""Build a step by replaying rows of another one, possibly several times, with new storages, and adding new
ops.

A storage that exists before the step has one number at a time (`initial_number`); a pass may replace it, for
example by the loaded copy of a weight or by a sum of gradients. The caller keeps one table (`made`) per
replay with the numbers of the storages that its rows made.
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
_NEW_OP_COLUMNS = ("name", "call", "phase", "resource", "traffic_bytes", "group", "stream", "prefetch")
_PHASE = _NEW_OP_COLUMNS.index("phase")


@dataclass(frozen=True)
class NewOp:
    """An op that is not in the old step."""

    name: str
    phase: Phase
    resource: Resource
    stream: int = 0
    prefetch: int = 0
    group: int = 0


@dataclass(eq=False)
class RowRun:
    """One replay of old rows, in ascending order, and the storages that they made."""

    rows: list[RowIndex] = field(default_factory=list)  # old ops
    positions: list[I32] = field(default_factory=list)  # the same ops in the new step
    storages: list[I32] = field(default_factory=list)  # old storages that the rows make
    numbers: list[I32] = field(default_factory=list)  # the same storages in the new step


@dataclass(frozen=True)
class Mark:
    """A position in a step under construction: counts of everything that was appended so far."""

    n_ops: int
    n_storages: int
    op_parts: int
    storage_parts: int
    use_parts: int
    new_uses: int
    holds: int


class _Strides:
    """Distance of each op or storage number to its counterpart in the next equal iteration; 0: none."""

    def __init__(self) -> None:
        self._begin, self._end, self._stride = (np.empty(0, np.int64) for _ in range(3))

    def add(self, begin: int, end: int, stride: int) -> None:
        """Add the numbers in [begin, end), which are above all earlier ones."""
        columns = (self._begin, begin), (self._end, end), (self._stride, stride)
        self._begin, self._end, self._stride = (np.append(column, value) for column, value in columns)

    def of(self, numbers: Any) -> Any:
        """Return the stride of each of `numbers`."""
        at = np.searchsorted(self._begin, numbers, side="right") - 1
        return np.where((at >= 0) & (numbers < self._end[at]), self._stride[at], 0)


class RowReplay:
    """A step under construction from the rows of another one.

    Args:
        step: The old step.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.n_ops = step, 0
        self._columns = step.ops.columns()
        self._names = {name: number for number, name in enumerate(step.names)}
        self._by_producer = np.argsort(step.storages.producer, kind="stable")
        self._made = np.searchsorted(step.storages.producer[self._by_producer], np.arange(step.ops.n + 1))
        self._uses = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
        self.is_initial = step.storages.producer < 0
        before = np.flatnonzero(self.is_initial)
        self.initial_number = np.full(step.storages.n, -1, np.int32)
        self.initial_number[before] = np.arange(len(before), dtype=np.int32)
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
        # Parts of three columns: old row (or beyond them the number of a new op), `copy_of`, phase.
        self._ops: list[tuple[Any, ...]] = []
        self._new_ops: list[tuple[int, ...]] = []
        self._n_flushed = 0
        self._op_uses: list[tuple[I32, I32, Any]] = []
        self._new_uses: list[tuple[int, int, int]] = []
        self._holds: list[tuple[I32, Any]] = []
        self._kinds: list[tuple[int, int]] = []
        self._emptied = _NONE
        self.first_position = np.full(step.ops.n, -1, np.int32)
        self._op_strides, self._storage_strides = _Strides(), _Strides()

    def add_storages(self, n_bytes: Any, tier: Any, kind: Any, producer: Any, owner: Any, held: Any) -> I32:
        """Add storages; each argument is a column or one value for all. Return their numbers."""
        self._flush_storages()
        # Numbers are positions in the list of parts, so pending single storages go first.
        count = len(n_bytes)
        if not count:
            return _NONE
        numbers = np.arange(self.n_storages, self.n_storages + count, dtype=np.int32)
        self.n_storages += count
        self._storages.append(
            tuple(
                each if isinstance(each, np.ndarray) else np.full(count, each)
                for each in (n_bytes, tier, kind, producer, owner, held)
            )
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
        """Append `op`; return the number of the storage that it makes, -1 for none.

        Args:
            op: The op.
            traffic_bytes: As in `Ops`.
            reads: Numbers of the storages that it reads.
            writes: Numbers of the storages that it writes to.
            makes: Bytes, tier, kind and owner of its output; None: it makes none.
            call: As in `Ops`.
        """
        name = self._names.setdefault(op.name, len(self._names))
        self._new_ops.append(
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

    def append_rows(
        self,
        run: RowRun,
        rows: RowIndex,
        made: I32,
        kept: I32,
        from_kept: RowMask,
        *,
        again: I32 | None = None,
    ) -> None:
        """Append the old ops `rows` to the new step.

        Args:
            run: The replay that they are part of.
            rows: Ops of the old step, ascending.
            made: (m,) number of each old storage that the replay has made; updated with those of `rows`.
            kept: (m,) numbers that an earlier replay made, kept for this one.
            from_kept: (m,) True for storages that are read from `kept` instead of `made`.
            again: (n,) position at which each row ran first: forward rows become recomputation of those.
        """
        if not len(rows):
            return
        self._flush()
        step = self.step
        positions = np.arange(self.n_ops, self.n_ops + len(rows), dtype=np.int32)
        self.n_ops += len(rows)
        phase = step.ops.phase[rows]
        if again is None:
            copy_of = np.full(len(rows), -1, np.int32)
        else:
            repeated = (phase == Phase.FORWARD) & (again[rows] >= 0)
            # Rows of a pass that were recomputation before have no meaning in the new step.
            copy_of = np.where(repeated, again[rows], -1).astype(np.int32)
            phase = np.where(repeated, np.uint8(Phase.RECOMPUTE), phase)
        self._ops.append((rows, copy_of, phase))
        # Of several replays the first defines where blocks start and end.
        fresh = self.first_position[rows] < 0
        self.first_position[rows[fresh]] = positions[fresh]
        index, maker = _expanded(self._made, rows)
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
        index, user = _expanded(self._uses, rows)
        storages = self.number(step.uses.storage[index], made, kept, from_kept)
        self._op_uses.append((positions[user], storages, step.uses.mode[index]))
        run.rows.append(rows)
        run.positions.append(positions)
        run.storages.append(new.astype(np.int32))
        run.numbers.append(numbers)

    def mark(self) -> Mark:
        """Return the current position, for `repeat`."""
        self._flush()
        self._flush_storages()
        lists = self._ops, self._storages, self._op_uses, self._new_uses, self._holds
        return Mark(self.n_ops, self.n_storages, *(len(each) for each in lists))

    def repeat(self, first: Mark, second: Mark, count: int) -> None:
        """Append `count` copies of everything since `second`, an iteration equal to the one since `first`.

        A copy refers to its own ops and storages where the original does, to those of the iteration before it
        where the original refers to that one, and to those of its own earlier iterations (of earlier repeats)
        likewise; all else is shared.
        """
        end = self.mark()
        ops, storages = end.n_ops - second.n_ops, end.n_storages - second.n_storages
        assert (ops, storages) == (second.n_ops - first.n_ops, second.n_storages - first.n_storages)
        self._op_strides.add(first.n_ops, end.n_ops, ops)
        self._storage_strides.add(first.n_storages, end.n_storages, storages)

        def copies(column: Any, strides: _Strides | None = None) -> Any:
            column = np.asarray(column)
            repeated = np.tile(column, count)
            if strides is None or not len(column):
                return repeated
            nth = np.repeat(np.arange(1, count + 1), len(column))
            return (repeated + nth * np.tile(strides.of(column), count)).astype(column.dtype)

        if op_parts := self._ops[second.op_parts :]:
            source, copy_of, phase = map(np.concatenate, zip(*op_parts, strict=True))
            self._ops.append((copies(source), copies(copy_of, self._op_strides), copies(phase)))
        if storage_parts := self._storages[second.storage_parts :]:
            n_bytes, tier, kind, producer, owner, held = map(np.concatenate, zip(*storage_parts, strict=True))
            self._storages.append(
                (
                    *(copies(each) for each in (n_bytes, tier, kind)),
                    copies(producer, self._op_strides),
                    copies(owner),
                    copies(held, self._op_strides),
                )
            )
        new_uses = np.asarray(self._new_uses[second.new_uses :], np.int32).reshape(-1, 3).T
        parts = [*self._op_uses[second.use_parts :], tuple(new_uses)]
        op, storage, mode = map(np.concatenate, zip(*parts, strict=True))
        self._op_uses.append(
            (copies(op, self._op_strides), copies(storage, self._storage_strides), copies(mode))
        )
        if holds := self._holds[second.holds :]:
            numbers, until = map(np.concatenate, zip(*holds, strict=True))
            self._holds.append((copies(numbers, self._storage_strides), copies(until, self._op_strides)))
        self.n_ops += count * ops
        self.n_storages += count * storages

    def counterpart(self, number: int, count: int) -> int:
        """Return the storage that takes the place of `number` in the `count`th copy of an iteration."""
        return number + count * int(self._storage_strides.of(number))

    def number(self, storages: I32, made: I32, kept: I32, from_kept: RowMask) -> I32:
        """Return the numbers of old `storages`; `made`, `kept` and `from_kept` as in `append_rows`."""
        mine = np.where(from_kept[storages], kept[storages], made[storages])
        found: I32 = np.where(self.is_initial[storages], self.initial_number[storages], mine).astype(np.int32)
        return found

    def hold(self, numbers: Any, until: Any) -> None:
        """Hold storages `numbers` through op `until`."""
        numbers = np.atleast_1d(np.asarray(numbers, np.int32))
        if len(numbers):
            self._holds.append((numbers, np.broadcast_to(np.asarray(until, np.int32), len(numbers))))

    def set_kind(self, number: int, kind: Kind) -> None:
        """Change the kind of the storage `number`."""
        self._kinds.append((number, int(kind)))

    def empty_initial(self, storages: I32) -> None:
        """Set the bytes of old `storages`, which exist before the step, to zero."""
        self._emptied = np.union1d(self._emptied, self.first_number(storages)).astype(np.int32)

    def _flush(self) -> None:
        """Convert pending new ops to columns, so that the next rows follow them in order."""
        pending = self._new_ops[self._n_flushed :]
        if pending:
            first, count = self.step.ops.n + self._n_flushed, len(pending)
            phase = np.asarray([each[_PHASE] for each in pending], np.uint8)
            self._ops.append((np.arange(first, first + count), np.full(count, -1, np.int32), phase))
            self._n_flushed += count

    def _columns_of_ops(self) -> dict[str, Any]:
        source, copy_of, phase = map(np.concatenate, zip(*self._ops, strict=True))
        new = (
            dict(zip(_NEW_OP_COLUMNS, zip(*self._new_ops, strict=True), strict=True)) if self._new_ops else {}
        )
        zeros = [0] * len(self._new_ops)
        columns = {
            name: np.concatenate([column, np.asarray(new.get(name, zeros)).astype(column.dtype)])[source]
            for name, column in self._columns.items()
            if name not in ("sequence_nr", "copy_of", "phase")
        }
        return columns | {
            "sequence_nr": np.full(self.n_ops, -1, np.int32),
            "copy_of": copy_of,
            "phase": phase,
        }

    def _flush_storages(self) -> None:
        if self._pending_storages:
            self._storages.append(
                tuple(np.asarray(each, np.int64) for each in zip(*self._pending_storages, strict=True))
            )
            self._pending_storages = []

    def done(self, gradient: I32, grad_order: I32) -> Step:
        """Return the new step.

        Args:
            gradient: (parameters,) number of each parameter's gradient, -1 for none.
            grad_order: Numbers of the gradients in the order in which they are ready.
        """
        self._flush()
        self._flush_storages()
        step = self.step
        ops = self._columns_of_ops()
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
        known = self.first_number(blocks.storage)
        columns["grad_ready_after"] = np.full(self.n_storages, -1, np.int32)
        columns["float_bytes"] = np.zeros(self.n_storages, np.uint8)  # nothing is compressed in a replay
        return replace(
            step,
            names=tuple(self._names),
            parameters=replace(blocks, storage=known, gradient=gradient),
            ops=replace(step.ops, **ops),
            storages=Storages(**columns),
            uses=self._uses_of_all(),
            saves=step.saves.rows(slice(0)),
            calls=replace(step.calls, inputs=step.calls.inputs.rows(slice(0))),
            grad_order=grad_order,
            returned=_NONE,
            partly_written=_NONE,
            read_by_host=_NONE,
            forward_starts=self.first_position[np.maximum(step.forward_starts, 0)],
            forward_ends=self.first_position[np.maximum(step.forward_ends, 0)],
        )

    def first_number(self, storages: I32) -> I32:
        """Return the numbers that storages from before the step began with."""
        order = np.cumsum(self.is_initial) - 1
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


def set_lifetimes(
    replay: RowReplay, run: RowRun, saved: Saved, cap: int, end: int, *, ignore: RowMask
) -> None:
    """Hold the storages that `run` made: by Python as long as in the old step, by autograd until it frees
    them.

    Args:
        replay: The step under construction.
        run: A replay whose rows have all been appended.
        saved: Tensors that autograd saved in these rows: numbers, and the old rows after which it frees them.
        cap: Old row at which the user's code returns and drops its references.
        end: Position of that row in the new step.
        ignore: (m,) storages whose lifetime is set by the caller.
    """
    step = replay.step
    rows, positions = np.concatenate(run.rows), np.concatenate(run.positions)
    storages, numbers = np.concatenate(run.storages), np.concatenate(run.numbers)
    held = step.storages.held_until[storages]
    mine = (held >= 0) & ~ignore[storages]
    storages, numbers, held = storages[mine], numbers[mine], held[mine]
    # Made in forward and held by the user's code: until that returns, whenever the replay runs.
    to_end = (held >= cap) & (step.ops.phase[step.storages.producer[storages]] == Phase.FORWARD)
    # Otherwise the last replayed row up to the old one: later rows belong to another replay.
    until = np.where(to_end, end, positions[np.maximum(np.searchsorted(rows, held, side="right") - 1, 0)])
    replay.hold(numbers, np.where(held == FOREVER, FOREVER, until))
    if len(saved[0]):
        replay.hold(saved[0], positions[np.maximum(np.searchsorted(rows, saved[1], side="right") - 1, 0)])


Saved = tuple[I32, I32]  # numbers, old rows after which autograd frees them


def _expanded(starts: Any, rows: RowIndex) -> tuple[Any, Any]:
    """Return all indices of the ranges [starts[row], starts[row + 1]), and the position in `rows` of each."""
    begin = starts[rows]
    count = starts[rows + 1] - begin
    total = np.cumsum(count)
    within = np.arange(total[-1]) - np.repeat(total - count - begin, count)
    return within, np.repeat(np.arange(len(count)), count)
