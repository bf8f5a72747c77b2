"""Build a step by replaying rows of another one, possibly several times, with new storages, and adding new
ops.

A storage that exists before the step has one number at a time (`initial_number`); a pass may replace it, for
example by the loaded copy of a weight or by a sum of gradients. The caller keeps one table (`made`) per
replay with the numbers of the storages that its rows made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.program.new_rows import EMPTY_ROWS, sorted_uses, step_of_rows
from memtune.program.parameter_columns import columns_of
from memtune.program.sample_rows import batched_rows
from memtune.program.step import FOREVER, I32, READS, WRITES, Kind, Phase, Resource, Step, Tier

RowIndex = npt.NDArray[np.intp]
RowMask = npt.NDArray[np.bool_]
_NONE = EMPTY_ROWS
_RECOMPUTE = np.uint8(Phase.RECOMPUTE)
_NEW_OP_COLUMNS = ("name", "call", "resource", "traffic_bytes", "group", "stream", "prefetch")


@dataclass(frozen=True)
class NewOp:
    """An op that is not in the old step."""

    name: str
    phase: Phase
    resource: Resource
    stream: int = 0
    prefetch: int = 0
    group: int = 0


class Stop(NamedTuple):
    """A call after `end` of the rows of a replay."""

    end: int
    call: Callable[[], None] = lambda: None


@dataclass(eq=False)
class RowRun:
    """One replay of old rows, in ascending order, and the storages that they made."""

    rows: list[RowIndex] = field(default_factory=list)  # old ops
    positions: list[I32] = field(default_factory=list)  # the same ops in the new step
    storages: list[I32] = field(default_factory=list)  # old storages that the rows make
    numbers: list[I32] = field(default_factory=list)  # the same storages in the new step


class _Table:
    """Columns that grow by parts, as columns, and by single rows.

    Args:
        refers: By column: the strides of the numbers in it (`_Strides`), None for other values.
    """

    def __init__(self, *refers: _Strides | None) -> None:
        self._refers = refers
        self.parts: list[tuple[Any, ...]] = []
        self.rows: list[tuple[int, ...]] = []

    def mark(self) -> tuple[int, int]:
        """Return the current length, for `since`."""
        return len(self.parts), len(self.rows)

    def since(self, mark: tuple[int, int] = (0, 0)) -> list[Any]:
        """Return the columns of everything since `mark`: parts, then single rows."""
        rows = np.asarray(self.rows[mark[1] :], np.int64).reshape(-1, len(self._refers)).T
        return [np.concatenate(columns) for columns in zip(*self.parts[mark[0] :], rows, strict=True)]

    def repeat(self, mark: tuple[int, int], count: int) -> None:
        """Append `count` copies of everything since `mark`, each further by one stride."""
        nth = np.arange(1, count + 1)[:, None]

        def copies(column: Any, strides: _Strides | None) -> Any:
            return (
                np.tile(column, count)
                if strides is None
                else (column + nth * strides.strides_of(column)).ravel()
            )

        self.parts.append(tuple(map(copies, self.since(mark), self._refers)))


@dataclass(frozen=True)
class Mark:
    """A position in a step under construction: what was appended so far."""

    n_ops: int
    n_storages: int
    tables: tuple[tuple[int, int], ...]


class _RowColumns(NamedTuple):
    """Rows of the old step as every replay appends them; positions count from the first of them."""

    rows: RowIndex
    phase: Any
    is_forward: RowMask
    made: I32
    """Old storages that the rows make."""
    columns: tuple[Any, ...]
    """Bytes, tier, kind and owner of these, and that nothing holds them yet."""
    n_made: I32
    """Number of storages that the rows before each one make; the last entry is that of all."""
    maker: I32
    """Position of the row that makes each."""
    used: I32
    """Old storages that the rows use."""
    user: I32
    """Position of the row of each use."""
    mode: Any
    initial: RowIndex
    """The uses of storages that exist before the step."""


class _Source:
    """The old step by op, and the rows of it that were replayed: packs and micro-batches repeat the same."""

    def __init__(self, step: Step) -> None:
        self._step = step
        # Stable: the outputs of an op keep the order of their numbers.
        self._by_producer = np.argsort(step.storages.producer, kind="stable").astype(np.int32)
        self._made = np.searchsorted(step.storages.producer[self._by_producer], np.arange(step.ops.n + 1))
        self._uses = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
        self.is_initial = step.storages.producer < 0
        self._known: dict[bytes, _RowColumns] = {}

    def columns_of_replay(self, rows: RowIndex) -> _RowColumns:
        """Return what a replay of `rows` appends."""
        key = rows.tobytes()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._columns(rows)
        return known

    def _columns(self, rows: RowIndex) -> _RowColumns:
        storages, uses, phase = self._step.storages, self._step.uses, self._step.ops.phase[rows]
        index, maker = _expanded(self._made, rows)
        made = self._by_producer[index]
        index, user = _expanded(self._uses, rows)
        used = uses.storage[index]
        stored = (each[made] for each in (storages.bytes, storages.tier, storages.kind, storages.owner))
        return _RowColumns(
            rows=rows,
            phase=phase,
            is_forward=phase == Phase.FORWARD,
            made=made,
            columns=(*stored, np.full(len(made), -1)),
            n_made=np.searchsorted(maker, np.arange(len(rows) + 1)).astype(np.int32),
            maker=maker.astype(np.int32),
            used=used,
            user=user.astype(np.int32),
            mode=uses.mode[index],
            initial=np.flatnonzero(self.is_initial[used]),
        )


# Candidates of a search replay the same few steps, whose rows are sorted once.
_source_of = functools.lru_cache(maxsize=8)(_Source)


class _Strides:
    """Distance of each op or storage number to its counterpart in the next equal iteration; 0: none."""

    def __init__(self) -> None:
        self._begin, self._end, self._stride = (np.empty(0, np.int64) for _ in range(3))

    def add(self, begin: int, end: int, stride: int) -> None:
        """Add the numbers in [begin, end), which are above all earlier ones."""
        columns = (self._begin, begin), (self._end, end), (self._stride, stride)
        self._begin, self._end, self._stride = (np.append(column, value) for column, value in columns)

    def strides_of(self, numbers: Any) -> Any:
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
        self._source = _source_of(step)
        self.is_initial = self._source.is_initial
        before = np.flatnonzero(self.is_initial)
        self.initial_number = np.full(step.storages.n, -1, np.int32)
        # The lowest numbers: in every Step storages that exist before it come first.
        self.initial_number[before] = np.arange(len(before), dtype=np.int32)
        self.n_storages = 0
        self._op_strides, self._storage_strides = ops, storages = _Strides(), _Strides()
        # Position, old row (or beyond them the number of a new op), `copy_of`, phase, micro-batches in one.
        self._ops = _Table(ops, None, ops, None, None)
        self._new_ops: list[tuple[int, ...]] = []
        # Number, bytes, tier, kind, producer, owner, last op that holds it.
        self._storages = _Table(storages, None, None, None, ops, None, ops)
        self._op_uses = _Table(ops, storages, None)
        self._holds = _Table(storages, ops)
        self._tables = self._ops, self._storages, self._op_uses, self._holds
        self._kinds: list[tuple[int, int]] = []
        self._emptied = _NONE
        self.add_storages(
            step.storages.bytes[before],
            step.storages.tier[before],
            step.storages.kind[before],
            -1,
            step.storages.owner[before],
            step.storages.held_until[before],
        )

    def add_storages(self, n_bytes: Any, tier: Any, kind: Any, producer: Any, owner: Any, held: Any) -> I32:
        """Add storages; each argument is a column or one value for all. Return their numbers."""
        count = len(n_bytes)
        if not count:
            return _NONE
        numbers = np.arange(self.n_storages, self.n_storages + count, dtype=np.int32)
        self.n_storages += count
        columns = (n_bytes, tier, kind, producer, owner, held)
        filled = (each if isinstance(each, np.ndarray) else np.full(count, each) for each in columns)
        self._storages.parts.append((numbers, *filled))
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
        at = self.n_ops
        self.n_ops += 1
        self._ops.rows.append((at, self.step.ops.n + len(self._new_ops), -1, op.phase, 1))
        self._new_ops.append((name, call, op.resource, traffic_bytes, op.group, op.stream, op.prefetch))
        self._op_uses.rows += [(at, storage, READS) for storage in reads]
        self._op_uses.rows += [(at, storage, WRITES) for storage in writes]
        if makes is None:
            return -1
        n_bytes, tier, kind, owner = makes
        self._storages.rows.append((self.n_storages, n_bytes, tier, kind, at, owner, -1))
        self.n_storages += 1
        return self.n_storages - 1

    def loads(
        self, allocate: NewOp, copy: NewOp, sources: I32, n_bytes: Any, owner: I32, *, call: int
    ) -> I32:
        """Append for each of `sources` an op that allocates its bytes on the device and one that fills it.

        Return the new storages.

        Args:
            allocate: The first op.
            copy: The second op.
            sources: Numbers of storages on the host.
            n_bytes: Bytes of each.
            owner: Parameter of each, as in `Storages`.
            call: As in `Ops`.
        """
        count = len(sources)
        at = np.arange(self.n_ops, self.n_ops + 2 * count, 2, dtype=np.int32)
        for op, position, traffic in ((allocate, at, np.zeros_like(n_bytes)), (copy, at + 1, n_bytes)):
            name = self._names.setdefault(op.name, len(self._names))
            number = self.step.ops.n + len(self._new_ops) + np.arange(count)
            self._ops.parts.append(
                (
                    position,
                    number,
                    np.full(count, -1, np.int32),
                    np.full(count, op.phase, np.uint8),
                    np.ones(count, np.int32),
                )
            )
            self._new_ops += [
                (name, call, op.resource, each, op.group, op.stream, op.prefetch) for each in traffic.tolist()
            ]
        self.n_ops += 2 * count
        numbers = self.add_storages(n_bytes, Tier.DEVICE, Kind.COMMUNICATION, at, owner, -1)
        for storages, mode in ((sources, READS), (numbers, WRITES)):
            self._op_uses.parts.append((at + 1, storages, np.full(count, mode, np.uint8)))
        return numbers

    def append_rows(
        self,
        run: RowRun,
        rows: RowIndex,
        made: I32,
        kept: I32,
        from_kept: RowMask,
        *,
        again: I32 | None = None,
        stops: Sequence[Stop] = (),
        joined: int = 1,
    ) -> None:
        """Append the old ops `rows` to the new step.

        Args:
            run: The replay that they are part of.
            rows: Ops of the old step, ascending.
            made: (m,) number of each old storage that the replay has made; updated with those of `rows`.
            kept: (m,) numbers that an earlier replay made, kept for this one.
            from_kept: (m,) True for storages that are read from `kept` instead of `made`.
            again: (n,) position at which each row ran first: forward rows become recomputation of those.
            joined: Micro-batches that the replay runs as one; its rows are of forward.
            stops: Calls between the rows, in order, which may append ops. They find the numbers of storages
                that were made before them in `made`, and must not change others that the rows use.
        """
        if not len(rows):
            return
        source = self._source.columns_of_replay(rows)
        positions, numbers = np.empty(len(rows), np.int32), np.empty(len(source.made), np.int32)
        begin = stored = 0
        # Numbers are given piece by piece, because a stop's ops and storages come in between; columns are
        # appended for all rows at once.
        for end, call in (*stops, Stop(len(rows))):
            until = int(source.n_made[end])
            positions[begin:end] = np.arange(self.n_ops, self.n_ops + end - begin)
            numbers[stored:until] = np.arange(self.n_storages, self.n_storages + until - stored)
            made[source.made[stored:until]] = numbers[stored:until]
            self.n_ops += end - begin
            self.n_storages += until - stored
            begin, stored = end, until
            call()
        phase = source.phase
        if again is None:
            copy_of = np.full(len(rows), -1, np.int32)
        else:
            repeated = source.is_forward & (again[rows] >= 0)
            # Rows of a pass that were recomputation before have no meaning in the new step.
            copy_of = np.where(repeated, again[rows], -1).astype(np.int32)
            phase = np.where(repeated, _RECOMPUTE, phase)
        self._ops.parts.append((positions, rows, copy_of, phase, np.full(len(rows), joined, np.int32)))
        n_bytes, tier, kind, owner, held = source.columns
        if joined > 1:
            n_bytes = np.where(batched_rows(self.step).storages[source.made], n_bytes * joined, n_bytes)
        self._storages.parts.append((numbers, n_bytes, tier, kind, positions[source.maker], owner, held))
        used = source.used
        storages = np.where(from_kept[used], kept[used], made[used])
        storages[source.initial] = self.initial_number[used[source.initial]]
        self._op_uses.parts.append((positions[source.user], storages, source.mode))
        run.rows.append(rows)
        run.positions.append(positions)
        run.storages.append(source.made)
        run.numbers.append(numbers)

    def mark(self) -> Mark:
        """Return the current position, for `repeat`."""
        return Mark(self.n_ops, self.n_storages, tuple(each.mark() for each in self._tables))

    def repeat(self, first: Mark, second: Mark, count: int) -> None:
        """Append `count` copies of everything since `second`, an iteration equal to the one since `first`.

        A copy refers to its own ops and storages where the original does, to those of the iteration before it
        where the original refers to that one, and to those of its own earlier iterations (of earlier repeats)
        likewise; all else is shared.
        """
        end = self.mark()
        ops, storages = end.n_ops - second.n_ops, end.n_storages - second.n_storages
        # Copies by strides are right for equal iterations only.
        assert (ops, storages) == (second.n_ops - first.n_ops, second.n_storages - first.n_storages)
        # From `first` on: the iteration before is one stride away as well, and a copy refers to its own
        # predecessor.
        self._op_strides.add(first.n_ops, end.n_ops, ops)
        self._storage_strides.add(first.n_storages, end.n_storages, storages)

        for table, since in zip(self._tables, second.tables, strict=True):
            table.repeat(since, count)
        self.n_ops += count * ops
        self.n_storages += count * storages

    def counterpart(self, number: int, count: int) -> int:
        """Return the storage that takes the place of `number` in the `count`th copy of an iteration."""
        return number + count * int(self._storage_strides.strides_of(number))

    def number(self, storages: I32, made: I32, kept: I32, from_kept: RowMask) -> I32:
        """Return the numbers of old `storages`; `made`, `kept` and `from_kept` as in `append_rows`."""
        mine = np.where(from_kept[storages], kept[storages], made[storages])
        found: I32 = np.where(self.is_initial[storages], self.initial_number[storages], mine).astype(np.int32)
        return found

    def hold(self, numbers: Any, until: Any) -> None:
        """Hold storages `numbers` through op `until`."""
        if np.ndim(numbers) == 0:
            self._holds.rows.append((int(numbers), int(until)))
        elif len(numbers):
            through = until if isinstance(until, np.ndarray) else np.full(len(numbers), until, np.int32)
            self._holds.parts.append((np.asarray(numbers, np.int32), through))

    def set_kind(self, number: int, kind: Kind) -> None:
        """Change the kind of the storage `number`."""
        self._kinds.append((number, int(kind)))

    def empty_initial(self, storages: I32) -> None:
        """Set the bytes of old `storages`, which exist before the step, to zero."""
        self._emptied = np.union1d(self._emptied, self.first_number(storages)).astype(np.int32)

    def _columns_of_ops(self) -> tuple[dict[str, Any], I32]:
        """Return the new columns, and (n,) the position at which each old row ran first, -1 for never."""
        source, copy_of, phase, joined = _in_order(self._ops)
        new = dict(zip(_NEW_OP_COLUMNS, np.asarray(self._new_ops, np.int64).reshape(-1, 7).T, strict=True))
        zeros = np.zeros(len(self._new_ops), np.int64)
        columns = {
            name: np.concatenate([column, new.get(name, zeros).astype(column.dtype)])[source]
            for name, column in self._columns.items()
            if name not in ("sequence_nr", "copy_of", "phase")
        }
        if (joined > 1).any():
            self._scale_joined(columns, source, joined)
        # Of several replays the first defines where blocks start and end.
        old = np.flatnonzero(source < self.step.ops.n)[::-1]
        first_position = np.full(self.step.ops.n, -1, np.int32)
        first_position[source[old]] = old
        return columns | {
            # The autograd nodes of the recording are not those of the replays.
            "sequence_nr": np.full(self.n_ops, -1, np.int32),
            "copy_of": copy_of.astype(np.int32),
            "phase": phase.astype(np.uint8),
        }, first_position

    def _scale_joined(self, columns: dict[str, Any], source: Any, joined: Any) -> None:
        """Give ops of several micro-batches in one their FLOPs and bytes, in place."""
        batched, at = batched_rows(self.step), np.flatnonzero(joined > 1)
        row, more = source[at], joined[at] - 1
        columns["flops"][at] *= 1 + more * batched.ops[row]
        for name in ("traffic_bytes", "elementwise_bytes"):
            scaled = columns[name][at] * (1 + more * batched.traffic[row])
            columns[name][at] = np.rint(scaled).astype(columns[name].dtype)

    def done(self, gradient: I32, grad_order: I32) -> Step:
        """Return the new step, with parameters' gradients in the order in which they are ready.

        Args:
            gradient: (parameters,) number of each parameter's gradient, -1 for none.
            grad_order: Numbers of the gradients in the order in which they are ready.
        """
        step = self.step
        ops, first_position = self._columns_of_ops()
        names = ("bytes", "tier", "kind", "producer", "owner", "held_until")
        columns: dict[str, Any] = {
            name: column.astype(getattr(step.storages, name).dtype)
            for name, column in zip(names, _in_order(self._storages), strict=True)
        }
        columns["bytes"][self._emptied] = 0
        for number, kind in self._kinds:
            columns["kind"][number] = kind
        numbers, until = self._holds.since()
        # Of one type: numpy converts others one by one.
        np.maximum.at(columns["held_until"], numbers, until.astype(columns["held_until"].dtype))
        blocks = columns_of(step.parameters)
        known = self.first_number(blocks.storage)
        return step_of_rows(  # nothing is compressed in a replay
            step,
            ops,
            columns,
            sorted_uses(*self._op_uses.since()),
            names=tuple(self._names),
            parameters=replace(blocks, storage=known, gradient=gradient),
            saves=step.saves.rows(slice(0)),
            grad_order=grad_order,
            forward_starts=first_position[np.maximum(step.forward_starts, 0)],
            forward_ends=first_position[np.maximum(step.forward_ends, 0)],
        )

    def first_number(self, storages: I32) -> I32:
        """Return the numbers that storages from before the step began with."""
        order = np.cumsum(self.is_initial) - 1
        found: I32 = order[storages].astype(np.int32)
        return found


def _in_order(table: _Table) -> list[Any]:
    """Return the columns of a table in the order of their numbers, its first column."""
    at, *columns = table.since()
    found = [np.empty_like(column) for column in columns]
    for each, column in zip(found, columns, strict=True):
        each[at] = column
    return found


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
