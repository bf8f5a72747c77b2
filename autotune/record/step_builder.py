"""The growing rows of a recording, and the Step built from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

OpRow = tuple[str, int, int, int, int, float, int, int, int, int, int, int]
"""Columns of an op: name, module, call of a block, phase, resource, FLOPs, traffic in bytes, kind of random
draw, ranks, autograd node number, bytes per element if it works element by element,
precision.
"""


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


def ops_of(columns: Sequence[Sequence[Any]], names: Mapping[str, int], calls: Calls, call_number: I32) -> Ops:
    """Return a Step's ops from their rows; `call_number` gives the row in `calls` of the rows' calls."""
    n_ops = len(columns[0])
    return Ops(
        name=np.asarray([names[name] for name in columns[0]], np.int32),
        module=np.asarray(columns[1], np.int32),
        call=call_number[np.asarray(columns[2], np.int32)],
        phase=np.asarray(columns[3], np.uint8),
        resource=np.asarray(columns[4], np.uint8),
        flops=np.asarray(columns[5], np.float64),
        traffic_bytes=np.asarray(columns[6], np.int64),
        rng=np.asarray(columns[7], np.uint8),
        group=np.asarray(columns[8], np.int32),
        sequence_nr=np.asarray(columns[9], np.int32),
        copy_of=np.full(n_ops, -1, np.int32),
        stream=np.zeros(n_ops, np.uint8),
        prefetch=np.zeros(n_ops, np.uint8),
        match=np.zeros(n_ops, np.int32),
        elementwise_bytes=np.asarray(columns[10], np.uint8),
        precision=np.asarray(columns[11], np.uint8),
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
        saves: Storage, op before which it is packed, op until which autograd holds it, op until which the
            unpacked tensor is used, call, is output, op before which it is unpacked, order of unpacking.
        modules: Number of each module's name.
        parameters: In the order of the model.
        enter: First op of each block, of the model last; `leave` has the last ones.
        calls: Of the blocks.
        inputs: Call and storage of the blocks' arguments, in order.
        outputs: Storages that the model returned.
        parts: Storages that were saved in parts, see `Step.partly_written`.
        lazy_values: As in `Step`.
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
        self.saves: list[list[int]] = []
        self.calls = BlockCalls(len(blocks))
        self.modules: dict[str, int] = {"(outside)": 0}
        self.parameters: list[Parameter] = []
        self.model_calls = 0
        self.lazy_values = False
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
        ops = list(zip(*self.ops, strict=True)) if self.ops else [()] * 11
        names = {name: i for i, name in enumerate(dict.fromkeys(ops[0]))}
        uses = np.asarray(self.uses, np.int32).reshape(-1, 3)
        saves = np.asarray(self.saves, np.int32).reshape(-1, 8)
        n_ops = len(self.ops)
        ready = np.full(len(self.bytes), -1, np.int32)
        ready[list(self.ready)] = list(self.ready.values())
        # A save that was never released belongs to a graph that the user still holds.
        until = np.where(saves[:, 2] < 0, n_ops - 1, saves[:, 2]).astype(np.int32)
        # A compiled graph takes all saved tensors from autograd before its first backward op, and uses them
        # later.
        until = np.maximum(until, saves[:, 3])
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
            ops=ops_of(ops, names, calls, numbered.number),
            storages=Storages(
                bytes=np.asarray(self.bytes, np.int64),
                tier=np.asarray(self.tier, np.uint8),
                kind=np.asarray(self.kind, np.uint8),
                producer=np.asarray(self.producer, np.int32),
                held_until=held,
                grad_ready_after=ready,
                owner=owners(len(self.bytes), self.parameters, self.producer, ops[3], uses),
                float_bytes=np.asarray(self.float_bytes, np.uint8),
            ),
            uses=Uses(op=uses[:, 0], storage=uses[:, 1], mode=uses[:, 2].astype(np.uint8)),
            saves=Saves(
                storage=saves[:, 0],
                packed_before=saves[:, 1],
                held_until=until,
                used_until=np.where(saves[:, 3] < 0, until, saves[:, 3]).astype(np.int32),
                unpacked_before=np.minimum(saves[:, 6], n_ops - 1),
                unpack_order=saves[:, 7],
                is_output=saves[:, 5].astype(np.uint8),
                call=numbered.number[saves[:, 4]],
                calls=calls,
            ),
            calls=calls,
            forward_starts=np.asarray(self.enter, np.int32),
            forward_ends=np.asarray(self.leave, np.int32),
            grad_order=np.asarray(list(self.ready), np.int32),
            returned=np.asarray(sorted(self.outputs), np.int32),
            partly_written=np.asarray(sorted(self.parts), np.int32),
            read_by_host=np.asarray(sorted(self.host_reads), np.int32),
            model_calls=self.model_calls,
            lazy_values=self.lazy_values,
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
