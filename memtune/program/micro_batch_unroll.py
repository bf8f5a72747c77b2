"""A rank's step written down anew from the rows of another, parts of it several times with storages of their
own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program.parameter_columns import columns_of
from memtune.program.step import (
    DONATES,
    FOREVER,
    I32,
    READS,
    Kind,
    Phase,
    Resource,
    Step,
    Storages,
    Tier,
    Uses,
)

Key = tuple[Hashable, int]
"""A stage (or what is uploaded) and a micro-batch."""
_BODY = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
_EMPTY = np.empty(0, np.int32)
_STORAGE_COLUMNS = ("bytes", "tier", "kind", "owner")


@dataclass(eq=False)
class _Copy:
    """A stage's storages of one micro-batch."""

    made: I32
    """Storages of the step, in the order of their numbers here."""
    start: int
    """Number of the first."""
    number: I32  # (m,) by storage of the step: its number for this stage and micro-batch, -1: not here
    received: set[int] = field(default_factory=set)
    parts: dict[bool, tuple[I32, I32]] = field(default_factory=dict)
    """Backward or not → its rows, and the rows of the step that they were made from, both ascending."""

    def row_of(self, ops: I32) -> I32:
        """The row of each of `ops`, which have run in one of the parts."""
        found = np.full(len(ops), -1, np.int32)
        for rows, made_from in self.parts.values():
            at = np.minimum(np.searchsorted(made_from, ops), max(len(rows) - 1, 0))
            here = made_from[at] == ops if len(rows) else np.zeros(len(ops), bool)
            found[here] = rows[at[here]]
        return found

    def last_row(self, until: I32) -> I32:
        """The row of the last op that has run up to each of `until`."""
        found = np.full(len(until), -1, np.int32)
        for backward in (False, True):
            rows, made_from = self.parts.get(backward, (_EMPTY, _EMPTY))
            at = np.searchsorted(made_from, until, side="right") - 1
            found[at >= 0] = rows[at[at >= 0]]
        return found


class UnrolledRows:
    """The rows so far.

    Args:
        step: Where rows are taken from.
        held: (parameters,) what this rank holds; what belongs to others is left out.
    """

    def __init__(self, step: Step, held: npt.NDArray[np.bool_]) -> None:
        self._step, self._held = step, held
        self._names, self.n_ops = list(step.names), 0
        self._ops: list[dict[str, Any]] = []
        self._uses: list[tuple[I32, I32, Any]] = []
        self._storages: list[dict[str, Any]] = []
        self._n_storages = 0
        self._made: dict[Hashable, I32] = {}
        self._alias: dict[Hashable, list[tuple[int, int]]] = {}
        self._once: dict[Hashable, I32] = {}
        self._copies: dict[Key, _Copy] = {}
        self._holds: list[tuple[int, int]] = []
        self._rest = 0, _EMPTY
        self._part = self._total = _EMPTY
        self._before = np.flatnonzero(self._mine & (step.storages.producer < 0))
        self._single = np.full(step.storages.n, -1, np.int32)
        self._single[self._before] = self._append(self._before)

    @cached_property
    def _mine(self) -> npt.NDArray[np.bool_]:
        """(m,) storages that belong to no parameter, or to one that is here."""
        of = self._owner
        return (of < 0) | self._held[of]

    @cached_property
    def _owner(self) -> I32:
        """(m,) the parameter that each storage belongs to, -1 none."""
        owner: I32 = np.where(
            self._step.parameter_of >= 0, self._step.parameter_of, self._step.storages.owner
        )
        return owner

    @cached_property
    def _body_end(self) -> int:
        return int(np.flatnonzero(np.isin(self._step.ops.phase, _BODY))[-1])

    # -- storages --------------------------------------------------------------------------------------------

    def _append(self, rows: npt.NDArray[Any]) -> I32:
        self._storages.append({name: getattr(self._step.storages, name)[rows] for name in _STORAGE_COLUMNS})
        self._n_storages += len(rows)
        return np.arange(self._n_storages - len(rows), self._n_storages, dtype=np.int32)

    def declare(self, stage: Hashable, made: I32) -> None:
        """The storages that a stage makes, each micro-batch its own."""
        self._made[stage] = made

    def keep(self, stage: Hashable, made: I32) -> None:
        """Of what a stage makes, these are made for the first micro-batch and serve the others."""
        self._once[stage] = made

    def alias(self, stage: Hashable, storage: int, stands_for: int) -> None:
        """In `stage`, `storage` is not made: `stands_for` takes its place."""
        self._alias.setdefault(stage, []).append((storage, stands_for))

    def sums(self, part: I32, total: I32) -> None:
        """In each stage's first micro-batch gradient `part[i]` is not added to `total[i]` but is what others
        are added to.
        """
        self._part, self._total = part, total

    def _copy(self, key: Key) -> _Copy:
        known = self._copies.get(key)
        if known is None:
            made, number = self._made[key[0]], self._single.copy()
            first = self._part if key[1] == 0 else _EMPTY
            made = np.setdiff1d(made, first).astype(np.int32)
            shared = self._copies.get(("upload", key[1]))
            if shared is not None:
                number[shared.made] = shared.number[shared.made]
            if key[1] > 0 and key[0] in self._once:
                once = self._once[key[0]]
                made = np.setdiff1d(made, once).astype(np.int32)
                number[once] = self._copies[key[0], 0].number[once]
            number[made] = self._append(made)
            number[first] = number[self._total[: len(first)]]
            for storage, stands_for in self._alias.get(key[0], ()):
                number[storage] = number[stands_for]
            known = self._copies[key] = _Copy(made, self._n_storages - len(made), number)
        return known

    def of(self, key: Key, storage: int) -> int:
        """The number of `storage` for a stage and micro-batch."""
        return int(self._copy(key).number[storage])

    def once(self, storage: int) -> int:
        """The number of what is there once."""
        return int(self._single[storage])

    def received(self, key: Key, storage: int) -> int:
        """`storage` is received for a stage and micro-batch by the next op; its number."""
        copy = self._copy(key)
        number = int(self._append(np.array([storage]))[0])
        self._storages[-1]["kind"], self._storages[-1]["producer"] = np.array([Kind.TEMPORARY]), self.n_ops
        self._storages[-1]["owner"] = np.array([-1])
        copy.number[storage] = number
        copy.received.add(number)
        return number

    def new(
        self,
        n_bytes: int,
        tier: Tier,
        kind: Kind,
        owner: int = -1,
        *,
        forever: bool = False,
        left: bool = False,
    ) -> int:
        """A storage that the next op makes, or that is there from before the step, for ever or `left` to be
        used; its number.
        """
        self._storages.append({"bytes": [n_bytes], "tier": [tier], "kind": [kind], "owner": [owner]})
        self._storages[-1] |= {"held_until": FOREVER} if forever else {} if left else {"producer": self.n_ops}
        self._n_storages += 1
        return self._n_storages - 1

    def changed(self, storages: I32, column: str, value: int) -> None:
        """Set the bytes or the tier of `storages` of the step that are there from before it."""
        self._storages[0][column][self._single[storages]] = value

    def stands_for(self, storage: int, number: int) -> None:
        """Stages and micro-batches that begin from here on find `number` where the step has `storage`."""
        self._single[storage] = number

    def put(self, key: Key, storage: int, number: int) -> None:
        """A stage and micro-batch finds `number`, which others hold as well, where the step has `storage`."""
        copy = self._copy(key)
        copy.number[storage] = number
        copy.received.add(number)

    def hold_number(self, number: int, until: int) -> None:
        """The storage of that number is held until that row at least."""
        self._holds.append((number, until))

    def there(self, n_bytes: int, until: int) -> None:
        """As many bytes of the batch are there from the beginning until that row."""
        self._storages.append(
            {"bytes": [n_bytes], "tier": [Tier.DEVICE], "kind": [Kind.BATCH], "owner": [-1]}
        )
        self._storages[-1]["held_until"] = until
        self._n_storages += 1

    def hold(self, key: Key, storage: int, until: int) -> None:
        """`storage` of a stage and micro-batch is held until that row at least."""
        self._holds.append((self.of(key, storage), until))

    def hold_as(self, key: Key, storages: I32, other: Key) -> None:
        """`storages` of a stage and micro-batch are held until where `other`, of that stage, would let go of
        its own.
        """
        until = self._copies[other].last_row(self._step.storages.held_until[storages])
        self._holds += [
            (self.of(key, storage), row)
            for storage, row in zip(storages.tolist(), until.tolist(), strict=True)
        ]

    def hold_all(self, key: Key, until: int) -> None:
        """All that a stage has made for a micro-batch is held until that row at least."""
        copy = self._copies[key]
        self._holds += [(number, until) for number in range(copy.start, copy.start + len(copy.made))]

    # -- ops -------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        phase: Phase,
        *,
        uses: Sequence[tuple[int, int]],
        resource: Resource = Resource.COMPUTE,
        traffic_bytes: int = 0,
        group: int = 0,
        stream: int = 0,
        prefetch: int = 0,
    ) -> int:
        """Append one op, which uses storages by their numbers here; returns its row."""
        if name not in self._names:
            self._names.append(name)
        self._ops.append(
            {
                "name": [self._names.index(name)],
                "module": [0],
                "call": [-1],
                "phase": [phase],
                "resource": [resource],
                "flops": [0.0],
                "traffic_bytes": [traffic_bytes],
                "rng": [0],
                "group": [group],
                "sequence_nr": [-1],
                "copy_of": [-1],
                "stream": [stream],
                "prefetch": [prefetch],
                "match": [0],
                "elementwise_bytes": [0],
            }
        )
        if uses:
            storages, hows = zip(*uses, strict=True)
            self._uses.append(
                (
                    np.full(len(uses), self.n_ops, np.int32),
                    np.array(storages, np.int32),
                    np.array(hows, np.uint8),
                )
            )
        self.n_ops += 1
        return self.n_ops - 1

    def take(self, ops: I32, key: Key, *, backward: bool = False) -> None:
        """Append `ops`, ascending rows of the step, for a stage and micro-batch; what was taken before comes
        before them.
        """
        step, copy = self._step, self._copy(key)
        rows, before = copy.parts.get(backward, (_EMPTY, _EMPTY))
        now = np.arange(self.n_ops, self.n_ops + len(ops), dtype=np.int32)
        copy.parts[backward] = np.concatenate([rows, now]), np.concatenate([before, ops])
        uses = self._uses_of(ops)
        storages, hows = copy.number[step.uses.storage[uses]], step.uses.mode[uses].copy()
        hows[(hows == DONATES) & np.isin(storages, list(copy.received))] = (
            READS  # whoever received it holds it
        )
        here = storages >= 0
        self._taken(ops, uses[here], storages[here], hows[here])

    def rows_of(self, key: Key, ops: I32) -> I32:
        """The row of each of `ops`, which were taken for a stage and micro-batch."""
        return self._copies[key].row_of(ops)

    def take_rest(self, of: npt.NDArray[np.bool_] | None = None) -> None:
        """Append the ops that run once, of what this rank holds; one that works on several parameters does on
        fewer.

        Args:
            of: (parameters,) those that they work on; None: all that are here.
        """
        step, owner = self._step, self._owner[self._step.uses.storage]
        here = (owner < 0) | (self._held if of is None else of)[owner]
        others, mine = np.zeros(step.ops.n, bool), np.zeros(step.ops.n, bool)
        others[step.uses.op[~here]] = True
        mine[step.uses.op[(owner >= 0) & here]] = True
        ops = np.flatnonzero(~np.isin(step.ops.phase, _BODY) & (~others | mine)).astype(np.int32)
        self._rest = self.n_ops, ops
        made = np.flatnonzero((step.storages.producer >= 0) & self._mine)
        made = made[np.isin(step.storages.producer[made], ops)]
        self._single[made] = self._append(made)
        self._storages[-1]["producer"] = self.n_ops + np.searchsorted(ops, step.storages.producer[made])
        self._storages[-1]["held_until"] = self._in_rest(step.storages.held_until[made])
        uses = self._uses_of(ops)
        storages = self._single[step.uses.storage[uses]]
        there = here[uses] & (storages >= 0)
        self._taken(
            ops, uses[there], storages[there], step.uses.mode[uses[there]], share=self._share(ops, here)
        )

    def _uses_of(self, ops: I32) -> npt.NDArray[np.intp]:
        taken = np.zeros(self._step.ops.n, bool)
        taken[ops] = True
        return np.flatnonzero(taken[self._step.uses.op])

    def _taken(self, ops: I32, uses: npt.NDArray[Any], storages: I32, hows: Any, share: Any = 1.0) -> None:
        columns = {name: column[ops] for name, column in self._step.ops.columns().items()}
        columns["traffic_bytes"] = (columns["traffic_bytes"] * share).astype(np.int64)
        columns["flops"] = columns["flops"] * share
        self._ops.append(columns)
        self._uses.append(
            ((self.n_ops + np.searchsorted(ops, self._step.uses.op[uses])).astype(np.int32), storages, hows)
        )
        self.n_ops += len(ops)

    def _share(self, ops: I32, here: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """(ops,) how much of the bytes that each uses is of this rank."""
        step = self._step
        weights = step.storages.bytes[step.uses.storage].astype(np.float64)
        whole, part = (np.bincount(step.uses.op, each, step.ops.n)[ops] for each in (weights, weights * here))
        return np.divide(part, whole, out=np.ones(len(ops)), where=whole > 0)

    # -- the step --------------------------------------------------------------------------------------------

    def _in_rest(self, until: I32) -> I32:
        """The row of the last op up to each of `until` among those that run once."""
        start, ops = self._rest
        row = start + np.maximum(np.searchsorted(ops, until, side="right") - 1, 0)
        return np.where(until == FOREVER, FOREVER, np.where(until < 0, -1, row)).astype(np.int32)

    def _lifetimes(self) -> tuple[I32, I32]:
        """(storages,) producer, and until when Python holds each."""
        step = self._step
        producer, held = np.full(self._n_storages, -1, np.int32), np.full(self._n_storages, -1, np.int32)
        held[: len(self._before)] = self._in_rest(step.storages.held_until[self._before])
        start = 0
        for block in self._storages:
            stop = start + len(block["bytes"])
            producer[start:stop] = block.get("producer", -1)
            held[start:stop] = np.maximum(held[start:stop], block.get("held_until", -1))
            start = stop
        for copy in self._copies.values():
            mine = slice(copy.start, copy.start + len(copy.made))
            producer[mine] = copy.row_of(step.storages.producer[copy.made])
            until = step.storages.held_until[copy.made]
            held[mine] = np.where(
                until > self._body_end, self._in_rest(until), np.where(until < 0, -1, copy.last_row(until))
            )
        for key, copy in self._copies.items():
            rows = copy.row_of(step.storages.producer[self._part]) if key[1] == 0 else _EMPTY
            producer[self._single[self._total[: len(rows)][rows >= 0]]] = rows[rows >= 0]
        if self._holds:
            numbers, until = (np.array(column, np.int32) for column in zip(*self._holds, strict=True))
            np.maximum.at(held, numbers, until)
        return producer, held

    def _saves(self) -> Iterator[dict[str, Any]]:
        """What autograd saves, for each stage and micro-batch that it does so in."""
        step = self._step
        used = np.where(step.saves.used_until >= 0, step.saves.used_until, step.saves.held_until)
        for copy in self._copies.values():
            _, ops = copy.parts.get(True, (_EMPTY, _EMPTY))
            rows = np.flatnonzero(np.isin(used, ops) & (copy.number[step.saves.storage] >= 0))
            forward_rows, forward = copy.parts[False]
            before = np.minimum(
                np.searchsorted(forward, step.saves.packed_before[rows]), max(len(forward) - 1, 0)
            )
            yield {
                "storage": copy.number[step.saves.storage[rows]],
                "packed_before": forward_rows[before],
                "held_until": copy.last_row(step.saves.held_until[rows]),
                "used_until": copy.row_of(used[rows]),
                "unpacked_before": np.full(len(rows), -1),
                "unpack_order": step.saves.unpack_order[rows],
                "is_output": step.saves.is_output[rows],
                "call": step.saves.call[rows],
            }

    def done(self) -> Step:
        """The rank's step."""
        step = self._step
        producer, held = self._lifetimes()
        ops = _joined(self._ops, step.ops.columns())
        storages = _joined(self._storages, {name: getattr(step.storages, name) for name in _STORAGE_COLUMNS})
        saves = _joined(list(self._saves()), step.saves.columns())
        use_op, use_storage, hows = (np.concatenate(column) for column in zip(*self._uses, strict=True))
        by_op = np.argsort(use_op, kind="stable")
        nothing = np.zeros(len(step.blocks) + 1, np.int32)
        parameters, index = self._parameters()
        storages["owner"] = index[storages["owner"]]
        return replace(
            step,
            names=tuple(self._names),
            parameters=parameters,
            ops=replace(step.ops, **ops),
            storages=Storages(
                producer=producer,
                held_until=held,
                grad_ready_after=np.full(self._n_storages, -1, np.int32),
                **storages,
            ),
            uses=Uses(
                op=use_op[by_op].astype(np.int32),
                storage=use_storage[by_op].astype(np.int32),
                mode=hows[by_op].astype(np.uint8),
            ),
            saves=replace(step.saves, **saves),
            calls=replace(step.calls, inputs=step.calls.inputs.rows(slice(0))),
            forward_starts=nothing,
            forward_ends=nothing,
            grad_order=_EMPTY,
            returned=_EMPTY,
            partly_written=_EMPTY,
            read_by_host=_EMPTY,
        )

    def _parameters(self) -> tuple[Any, I32]:
        """The parameters that are here, and the number here of each of the step's; -1 stays -1."""
        known, keep = columns_of(self._step.parameters), np.flatnonzero(self._held)
        index = np.full(len(known) + 1, -1, np.int32)
        index[keep] = np.arange(len(keep), dtype=np.int32)
        gradient = np.where(known.gradient >= 0, self._single[known.gradient], -1).astype(np.int32)
        mine = replace(
            known,
            names=tuple(known.names[i] for i in keep),
            storage=self._single[known.storage][keep],
            gradient=gradient[keep],
            shapes=tuple(known.shapes[i] for i in keep),
            itemsize=known.itemsize[keep],
            trainable=known.trainable[keep],
            block=known.block[keep],
            numel=known.numel[keep],
        )
        return mine, index


def _joined(parts: Sequence[dict[str, Any]], like: dict[str, Any]) -> dict[str, Any]:
    """The columns `like` of all parts, in their types."""
    return {
        name: np.concatenate([each[name] for each in parts]).astype(column.dtype)
        for name, column in like.items()
    }
