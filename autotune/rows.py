"""A Step in the making: the rows that a tracer writes down, parts of them that are written again, and the Step they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memtune.autotune.block_calls import BlockCalls
from memtune.autotune.owners import owners
from memtune.block_outputs import LONE
from memtune.program import FOREVER, HANDS_OVER, I32, Parameter, Step

OpRow = tuple[str, int, int, int, int, float, int, int, int, int, int]
"""Name, module, call of a block, phase, resource, FLOPs, traffic, whether it draws, ranks, autograd's number, bytes of an element
where it works by elements: an op's columns."""


class Extent(NamedTuple):
    """How many rows there are of each sort."""

    ops: int
    storages: int
    uses: int


class Mark(NamedTuple):
    """How far a recording has come."""

    ops: int
    nodes: int
    """Autograd's next sequence number."""
    saves: int


class Made(NamedTuple):
    """A storage that an op made, and the op after which it was let go."""

    storage: int
    op: int
    size_bytes: int
    tier: int
    kind: int
    until: int


class Rows(NamedTuple):
    """Part of a recording; ops are counted from its first one."""

    ops: list[OpRow]
    signatures: list[str]
    uses: list[tuple[int, int, int]]
    """Op, storage, whether it is written."""
    made: list[Made]


def op_columns(columns: Sequence[Sequence[Any]], names: Mapping[str, int], call_number: I32) -> dict[str, Any]:
    """The columns of a Step's ops from those of their rows; `call_number` says what the rows' calls are called there."""
    n_ops = len(columns[0])
    return {
        "op_name": np.asarray([names[name] for name in columns[0]], np.int32),
        "op_module": np.asarray(columns[1], np.int32),
        "op_call": call_number[np.asarray(columns[2], np.int32)],
        "op_phase": np.asarray(columns[3], np.uint8),
        "op_resource": np.asarray(columns[4], np.uint8),
        "op_flops": np.asarray(columns[5], np.float64),
        "op_traffic_bytes": np.asarray(columns[6], np.int64),
        "op_rng": np.asarray(columns[7], np.uint8),
        "op_group": np.asarray(columns[8], np.int32),
        "op_node": np.asarray(columns[9], np.int32),
        "op_copy_of": np.full(n_ops, -1, np.int32),
        "op_stream": np.zeros(n_ops, np.uint8),
        "op_prefetch": np.zeros(n_ops, np.uint8),
        "op_match": np.zeros(n_ops, np.int32),
        "op_by_element": np.asarray(columns[10], np.uint8),
    }


class Draft:
    """What a tracer has written down so far; a row is final once it is there, but for what ends later.

    Attributes:
        blocks: Qualified names of the repeated blocks.
        ops: One row an op.
        signatures: What to look each op up by in a WorkspaceTable; empty for what is not an op.
        bytes: Of each storage; `tier`, `kind`, `producer` and `held` (the op after which Python lets go) are its other columns.
        uses: Op, storage, how it is used.
        saves: Storage, before, until, used until, call, is output, asked, turn.
        modules: Number of each module's name.
        parameters: In the order of the model.
        enter: First op of each block, of the model last; `leave` has the last ones.
        calls: Of the blocks.
        inputs: Call and storage of the blocks' arguments, in order.
        outputs: Storages that the model returned.
        parts: Storages that were saved in parts, see `Step.written_parts`.
        lazy_values: As in `Step`.
        outputs_of: What each block has returned, see `Step.block_outputs`.
        looks: Storages of which code asked for a number, see `Step.looked_at`.
        ready: Gradient → op after which it was in place.
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
        self.uses: list[tuple[int, int, int]] = []
        self.saves: list[list[int]] = []
        self.calls = BlockCalls(len(blocks))
        self.modules: dict[str, int] = {"(outside)": 0}
        self.parameters: list[Parameter] = []
        self.model_calls = 0
        self.lazy_values = False
        self.enter, self.leave = [-1] * (len(blocks) + 1), [-1] * (len(blocks) + 1)
        self.outputs_of = [LONE] * len(blocks)
        self.inputs: dict[tuple[int, int], None] = {}
        self.outputs: set[int] = set()
        self.parts: set[int] = set()
        self.looks: set[int] = set()
        self.ready: dict[int, int] = {}

    def add(self, size_bytes: int, tier: int, kind: int, producer: int, held: int = int(FOREVER)) -> int:
        """Write a storage down; returns its row."""
        columns = self.bytes, self.tier, self.kind, self.producer, self.held
        for column, value in zip(columns, (size_bytes, tier, kind, producer, held), strict=True):
            column.append(value)
        return len(self.bytes) - 1

    def extent(self) -> Extent:
        """How many rows have been written."""
        return Extent(len(self.ops), len(self.bytes), len(self.uses))

    def rows(self, start: Extent) -> Rows:
        """What was written since `start`."""
        made = [
            Made(i, self.producer[i] - start.ops, self.bytes[i], self.tier[i], self.kind[i], self.held[i] - start.ops)
            for i in range(start.storages, len(self.bytes))
        ]
        uses = [(op - start.ops, storage, written) for op, storage, written in self.uses[start.uses :]]
        return Rows(self.ops[start.ops :], self.signatures[start.ops :], uses, made)

    def append(
        self,
        ops: Iterable[OpRow],
        signatures: Iterable[str],
        uses: Iterable[tuple[int, int, int]],
        made: Iterable[tuple[int, int, int, int, int]],
    ) -> None:
        """Write rows as if ops had just run; `made` holds bytes, tier, kind, producer and the op after which it goes."""
        self.ops += ops
        self.signatures += signatures
        self.uses += uses
        for storage in made:
            self.add(*storage)

    def step(self) -> Step:
        """The Step recorded so far; checks its invariants."""
        ops = list(zip(*self.ops, strict=True)) if self.ops else [()] * 11
        names = {name: i for i, name in enumerate(dict.fromkeys(ops[0]))}
        uses = np.asarray(self.uses, np.int32).reshape(-1, 3)
        saves = np.asarray(self.saves, np.int32).reshape(-1, 8)
        n_ops = len(self.ops)
        ready = np.full(len(self.bytes), -1, np.int32)
        ready[list(self.ready)] = list(self.ready.values())
        until = np.where(saves[:, 2] < 0, n_ops - 1, saves[:, 2]).astype(np.int32)
        until = np.maximum(until, saves[:, 3])  # a compiled graph takes all from autograd before its first backward op
        held = np.asarray(self.held, np.int32)
        handed = uses[uses[:, 2] == HANDS_OVER]
        calls = self.calls.numbered()
        mine = handed[held[handed[:, 1]] == handed[:, 0]]
        held[mine[:, 1]] -= 1  # the engine held it, to add to it
        step = Step(
            names=tuple(names),
            modules=tuple(self.modules),
            blocks=tuple(self.blocks),
            call_block=calls.block,
            call_grad=calls.grad,
            parameters=tuple(self.parameters),
            **op_columns(ops, names, calls.number),
            bytes=np.asarray(self.bytes, np.int64),
            tier=np.asarray(self.tier, np.uint8),
            kind=np.asarray(self.kind, np.uint8),
            producer=np.asarray(self.producer, np.int32),
            held_until=held,
            ready_after=ready,
            owner=owners(len(self.bytes), self.parameters, self.producer, ops[3], uses),
            use_op=uses[:, 0],
            use_storage=uses[:, 1],
            use_mutates=uses[:, 2].astype(np.uint8),
            save_storage=saves[:, 0],
            save_before=saves[:, 1],
            save_until=until,
            save_used_until=np.where(saves[:, 3] < 0, until, saves[:, 3]).astype(np.int32),
            save_asked=np.minimum(saves[:, 6], n_ops - 1),
            save_turn=saves[:, 7],
            save_is_output=saves[:, 5].astype(np.uint8),
            save_call=calls.number[saves[:, 4]],
            enter=np.asarray(self.enter, np.int32),
            leave=np.asarray(self.leave, np.int32),
            model_calls=self.model_calls,
            lazy_values=self.lazy_values,
            block_outputs=tuple(self.outputs_of),
            input_call=calls.number[np.asarray([call for call, _ in self.inputs], np.int32)],
            input_storage=np.asarray([storage for _, storage in self.inputs], np.int32),
            landing=np.asarray(list(self.ready), np.int32),
            returned=np.asarray(sorted(self.outputs), np.int32),
            written_parts=np.asarray(sorted(self.parts), np.int32),
            looked_at=np.asarray(sorted(self.looks), np.int32),
        )
        step.validate()
        return step
