"""The growing rows of a recording, and the Step built from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from memtune.activations.recompute import autograd_saves
from memtune.program import (
    DONATES,
    FOREVER,
    I32,
    U8,
    CallInputs,
    Calls,
    Ops,
    Parameter,
    Phase,
    Saves,
    Step,
    Storages,
    Uses,
)
from memtune.workload import LONE


class OpRow(NamedTuple):
    """An op as recorded: columns of `program.Ops`, with its name and its call's number as they are here."""

    name: str
    module: int
    call: int
    """Number of the running call of a block, in the order of their beginnings; -1 outside of blocks."""
    phase: int
    resource: int
    flops: float = 0.0
    traffic_bytes: int = 0
    rng: int = 0
    group: int = 0
    sequence_nr: int = -1
    elementwise_bytes: int = 0
    precision: int = 0


@dataclass(slots=True)
class SaveRow:
    """A tensor that autograd saves, as recorded; -1 where it has not happened yet."""

    storage: int
    packed_before: int
    """Op before which it is packed."""
    call: int
    is_output: bool
    held_until: int = -1
    """Op until which autograd holds it."""
    used_until: int = -1
    """Op until which the unpacked tensor is used."""
    unpacked_before: int = -1
    """Op before which it is first unpacked."""
    unpack_order: int = -1


class Extent(NamedTuple):
    """Number of rows of each kind."""

    ops: int
    storages: int
    uses: int


class Mark(NamedTuple):
    """Position of a recording."""

    ops: int
    nodes: int
    """Autograd's next sequence number."""
    saves: int


class NewStorage(NamedTuple):
    """A storage that an op created, and the op after which Python released it."""

    storage: int
    op: int
    size_bytes: int
    tier: int
    kind: int
    until: int
    float_bytes: int


class RowSlice(NamedTuple):
    """Consecutive rows of a recording; ops are numbered from the first one."""

    ops: list[OpRow]
    signatures: list[str]
    uses: list[tuple[int, int, int]]
    """Op, storage, kind of use."""
    made: list[NewStorage]


def _ops_of(rows: Sequence[OpRow], names: Mapping[str, int], calls: Calls, call_number: I32) -> Ops:
    """Return a Step's ops from their rows; `call_number` gives the row in `calls` of the rows' calls."""

    def column(name: str, dtype: type[np.generic]) -> Any:
        return np.fromiter(map(attrgetter(name), rows), dtype, len(rows))

    return Ops(
        name=np.fromiter((names[row.name] for row in rows), np.int32, len(rows)),
        module=column("module", np.int32),
        call=call_number[column("call", np.int32)],
        phase=column("phase", np.uint8),
        resource=column("resource", np.uint8),
        flops=column("flops", np.float64),
        traffic_bytes=column("traffic_bytes", np.int64),
        rng=column("rng", np.uint8),
        group=column("group", np.int32),
        sequence_nr=column("sequence_nr", np.int32),
        copy_of=np.full(len(rows), -1, np.int32),
        stream=np.zeros(len(rows), np.uint8),
        prefetch=np.zeros(len(rows), np.uint8),
        match=np.zeros(len(rows), np.int32),
        elementwise_bytes=column("elementwise_bytes", np.uint8),
        precision=column("precision", np.uint8),
        calls=calls,
    )


def _saves_of(rows: Sequence[SaveRow], n_ops: int, calls: Calls, call_number: I32) -> Saves:
    """Return a Step's saves from their rows; `call_number` as in `_ops_of`."""

    def column(name: str) -> I32:
        return np.fromiter(map(attrgetter(name), rows), np.int32, len(rows))

    released, used = column("held_until"), column("used_until")
    # A save that was never released belongs to a graph that the user still holds.
    until = np.where(released < 0, n_ops - 1, released).astype(np.int32)
    # A compiled graph takes all saved tensors from autograd before its first backward op, and uses them
    # later.
    until = np.maximum(until, used)
    return Saves(
        storage=column("storage"),
        packed_before=column("packed_before"),
        held_until=until,
        used_until=np.where(used < 0, until, used).astype(np.int32),
        unpacked_before=np.minimum(column("unpacked_before"), n_ops - 1),
        unpack_order=column("unpack_order"),
        is_output=column("is_output").astype(np.uint8),
        call=call_number[column("call")],
        calls=calls,
    )


class Draft:
    """The rows of a recording so far; a row is final once appended, except for its ends of lifetimes.

    Attributes:
        blocks: Qualified names of the repeated blocks.
        ops: One row per op.
        signatures: Key of each op in a WorkspaceTable; empty for rows that are no ATen op.
        bytes: Of each storage; `tier`, `kind`, `producer`, `held` (the op after which Python releases it) and
            `float_bytes` are its other columns.
        uses: Op, storage, kind of use.
        saves: One row per tensor that autograd saves; completed as it is unpacked and released.
        modules: Number of each module's name.
        parameters: In the order of the model.
        enter: First op of each block, of the model last; `leave` has the last ones.
        calls: Of the blocks.
        inputs: Call and storage of the blocks' arguments, in order.
        outputs: Storages that the model returned.
        parts: Storages that were saved in parts, see `Step.partly_written`.
        lazy_values: As in `Step`, as `python_draws`.
        output_structures: Structure of each block's output, see `Step.block_outputs`.
        host_reads: Storages of which code read a number, see `Step.read_by_host`.
        ready: Gradient → op after which it was ready.
    """

    def __init__(self, blocks: list[str]) -> None:
        self.blocks = blocks
        self.ops: list[OpRow] = []
        self.signatures: list[str] = []
        self.bytes: list[int] = []
        self.tier: list[int] = []
        self.kind: list[int] = []
        self.producer: list[int] = []
        self.held: list[int] = []
        self.float_bytes: list[int] = []
        self.uses: list[tuple[int, int, int]] = []
        self.saves: list[SaveRow] = []
        self.calls = BlockCalls(len(blocks))
        self.modules: dict[str, int] = {"(outside)": 0}
        self.parameters: list[Parameter] = []
        self.model_calls = 0
        self.lazy_values = self.python_draws = False
        self.enter, self.leave = [-1] * (len(blocks) + 1), [-1] * (len(blocks) + 1)
        self.output_structures = [LONE] * len(blocks)
        self.inputs: dict[tuple[int, int], None] = {}
        self.outputs: set[int] = set()
        self.parts: set[int] = set()
        self.host_reads: set[int] = set()
        self.ready: dict[int, int] = {}

    def add(
        self,
        size_bytes: int,
        tier: int,
        kind: int,
        producer: int,
        held: int = int(FOREVER),
        float_bytes: int = 0,
    ) -> int:
        """Append a storage; return its row."""
        columns = self.bytes, self.tier, self.kind, self.producer, self.held, self.float_bytes
        for column, value in zip(columns, (size_bytes, tier, kind, producer, held, float_bytes), strict=True):
            column.append(value)
        return len(self.bytes) - 1

    def extent(self) -> Extent:
        """Return the number of rows so far."""
        return Extent(len(self.ops), len(self.bytes), len(self.uses))

    def rows(self, start: Extent) -> RowSlice:
        """Return the rows appended since `start`."""
        made = [
            NewStorage(
                i,
                self.producer[i] - start.ops,
                self.bytes[i],
                self.tier[i],
                self.kind[i],
                self.held[i] - start.ops,
                self.float_bytes[i],
            )
            for i in range(start.storages, len(self.bytes))
        ]
        uses = [(op - start.ops, storage, written) for op, storage, written in self.uses[start.uses :]]
        return RowSlice(self.ops[start.ops :], self.signatures[start.ops :], uses, made)

    def append(
        self,
        ops: Iterable[OpRow],
        signatures: Iterable[str],
        uses: Iterable[tuple[int, int, int]],
        made: Iterable[tuple[int, int, int, int, int, int]],
    ) -> None:
        """Append rows as if their ops had just run.

        `made` holds bytes, tier, kind, producer, last op and `float_bytes` of storages.
        """
        self.ops += ops
        self.signatures += signatures
        self.uses += uses
        for storage in made:
            self.add(*storage)

    def step(self) -> Step:
        """Build the Step recorded so far and check its invariants."""
        names = {name: i for i, name in enumerate(dict.fromkeys(row.name for row in self.ops))}
        uses = np.asarray(self.uses, np.int32).reshape(-1, 3)
        ready = np.full(len(self.bytes), -1, np.int32)
        ready[list(self.ready)] = list(self.ready.values())
        held = np.asarray(self.held, np.int32)
        donated = uses[uses[:, 2] == DONATES]
        numbered = self.calls.numbered()
        inputs = CallInputs(
            call=numbered.number[np.asarray([call for call, _ in self.inputs], np.int32)],
            storage=np.asarray([storage for _, storage in self.inputs], np.int32),
        )
        calls = Calls(numbered.block, numbered.grad, inputs)
        mine = donated[held[donated[:, 1]] == donated[:, 0]]
        # The last reference was the engine's: it held the gradient to add into it, so the op's input is free
        # when the op starts.
        held[mine[:, 1]] -= 1
        step = Step(
            names=tuple(names),
            modules=tuple(self.modules),
            blocks=tuple(self.blocks),
            parameters=tuple(self.parameters),
            ops=_ops_of(self.ops, names, calls, numbered.number),
            storages=Storages(
                bytes=np.asarray(self.bytes, np.int64),
                tier=np.asarray(self.tier, np.uint8),
                kind=np.asarray(self.kind, np.uint8),
                producer=np.asarray(self.producer, np.int32),
                held_until=held,
                grad_ready_after=ready,
                owner=owners(
                    len(self.bytes), self.parameters, self.producer, [row.phase for row in self.ops], uses
                ),
                float_bytes=np.asarray(self.float_bytes, np.uint8),
            ),
            uses=Uses(op=uses[:, 0], storage=uses[:, 1], mode=uses[:, 2].astype(np.uint8)),
            saves=_saves_of(self.saves, len(self.ops), calls, numbered.number),
            calls=calls,
            forward_starts=np.asarray(self.enter, np.int32),
            forward_ends=np.asarray(self.leave, np.int32),
            grad_order=np.asarray(list(self.ready), np.int32),
            returned=np.asarray(sorted(self.outputs), np.int32),
            partly_written=np.asarray(sorted(self.parts), np.int32),
            read_by_host=np.asarray(sorted(self.host_reads), np.int32),
            model_calls=self.model_calls,
            lazy_values=self.lazy_values,
            python_draws=self.python_draws,
            block_outputs=tuple(self.output_structures),
        )
        step.validate()
        return step


class _BlockCall(NamedTuple):
    """A call of a block; a block that runs several times in a step has several."""

    block: int
    node: int
    """Autograd's next sequence number."""
    grad: bool
    """True if autograd recorded the call, and no checkpoint of the model's own took its saved tensors."""


class CallColumns(NamedTuple):
    """The call columns of a Step."""

    block: I32  # (c,)
    grad: U8  # (c,)
    number: I32
    """(calls + 1,) number of each recorded call; the last entry maps -1."""


class BlockCalls:
    """Numbers the calls of blocks 0 to `n_blocks` - 1 as they begin."""

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._calls: list[_BlockCall] = []

    def enter(self, block: int) -> int:
        """Return the number of the call of `block` that begins now."""
        # In backward (recompute) it is the last call that began before the node being run.
        # A node has the sequence number that its op got in forward, so it tells which call it belongs to.
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._calls.append(_BlockCall(block, torch._C._autograd._get_sequence_nr(), autograd_saves()))
            return len(self._calls) - 1
        before = [
            i
            for i, call in enumerate(self._calls)
            if call.block == block and call.node <= node._sequence_nr()
        ]
        return before[-1] if before else -1

    def numbered(self) -> CallColumns:
        """Return all calls in forward order; if no block ran twice, one for each block in order."""
        ran = {call.block for call in self._calls}
        calls = [
            *self._calls,
            *(_BlockCall(block, 0, True) for block in range(self._n_blocks) if block not in ran),
        ]
        order = list(range(len(calls)))
        if len(calls) == self._n_blocks:
            order.sort(key=lambda call: calls[call].block)
        number = np.full(len(calls) + 1, -1, np.int32)
        number[order] = np.arange(len(calls), dtype=np.int32)
        block = np.asarray([calls[i].block for i in order], np.int32)
        return CallColumns(block, np.asarray([calls[i].grad for i in order], np.uint8), number)


def owners(
    n_storages: int,
    parameters: Sequence[Parameter],
    producer: Sequence[int],
    phases: Sequence[int],
    uses: I32,
) -> I32:
    """Return (n_storages,) index of the parameter that owns each storage, -1 for none.

    Args:
        n_storages: Number of storage rows.
        parameters: With their storages and gradients.
        producer: Op that makes each storage.
        phases: Phase of each op.
        uses: (n, 3) rows of op, storage and kind of use.
    """
    # A parameter owns its own storage, its gradient, its optimizer state and the optimizer's
    # temporaries for it; they are found as operands of the optimizer's ops.
    owner = np.full(n_storages, -1, np.int32)
    for i, parameter in enumerate(parameters):
        owner[parameter.storage] = i
        if parameter.gradient >= 0:
            owner[parameter.gradient] = i
    touched: dict[int, list[int]] = {}
    for op, storage, _ in uses.tolist():
        touched.setdefault(op, []).append(storage)
    unowned = set[int]()
    for storage, op in enumerate(producer):
        touched.setdefault(op, []).append(storage)
    for op, phase in enumerate(phases):
        if phase != Phase.OPTIMIZER:
            continue
        storages = touched.get(op, [])
        present = {int(owner[s]) for s in storages if owner[s] >= 0}
        if not present:
            unowned.update(storages)
        elif len(present) == 1:
            mine = present.pop()
            for s in storages:
                if owner[s] < 0:
                    owner[s] = mine
        else:
            _own_list_operands(owner, list(dict.fromkeys(storages)), unowned)
    return owner


def _own_list_operands(owner: I32, storages: list[int], unowned: set[int]) -> None:
    """Assign operands of an op on tensor lists (a fused or foreach step): equal positions have one owner."""
    # The lists follow each other (parameters, gradients, states): an owner that repeats begins the second
    # one.
    first: list[int] = owner[storages].tolist()
    seen, count = set[int](), len(first)
    for n, each in enumerate(first):
        if each < 0 or each in seen:
            count = n
            break
        seen.add(each)
    if count < 2:
        return
    for place, s in enumerate(storages[: len(storages) // count * count]):
        mine = first[place % count]
        if owner[s] >= 0 and owner[s] != mine:
            return  # the operands are not lists of equal length, so positions mean nothing
    for place, s in enumerate(storages[: len(storages) // count * count]):
        if owner[s] < 0 and s not in unowned:
            owner[s] = first[place % count]
