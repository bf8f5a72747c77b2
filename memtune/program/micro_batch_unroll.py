"""Unroll a rank's step of a pipeline: rows of the step of all stages, once per stage and micro-batch.

Each stage and micro-batch gets its own copies of the storages that the stage makes. Rows of prologue,
boundary and optimizer are appended once, for the rank's own parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program.new_rows import EMPTY_ROWS, NEW_OP, sorted_uses, step_of_rows
from memtune.program.parameter_columns import columns_of
from memtune.program.step import DONATES, FOREVER, I32, READS, Kind, Phase, Resource, Step, Tier

Key = tuple[Hashable, int]
"""A stage (or "upload") and a micro-batch."""
_BODY = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
_EMPTY = EMPTY_ROWS
_STORAGE_COLUMNS = ("bytes", "tier", "kind", "owner", "float_bytes")


@dataclass(eq=False)
class _Copy:
    """Storages and rows of one stage and micro-batch."""

    made: I32
    """Storages of the old step that have copies, in the order of the copies' numbers."""
    start: int
    """Number of the first copy."""
    number: I32  # (m,) number of each old storage for this stage and micro-batch, -1: none
    received: set[int] = field(default_factory=set)  # numbers that other stages or micro-batches share
    parts: dict[bool, tuple[I32, I32]] = field(default_factory=dict)
    """Backward or not → new rows, and the old rows that they are copies of, both ascending."""

    def row_of(self, ops: I32) -> I32:
        """Return the new row of each of the old `ops`, -1 if it was not appended."""
        found = np.full(len(ops), -1, np.int32)
        for rows, made_from in self.parts.values():
            at = np.minimum(np.searchsorted(made_from, ops), max(len(rows) - 1, 0))
            here = made_from[at] == ops if len(rows) else np.zeros(len(ops), bool)
            found[here] = rows[at[here]]
        return found

    def last_row(self, until: I32) -> I32:
        """Return the new row of the last appended op up to each old op in `until`, -1 if there is none."""
        found = np.full(len(until), -1, np.int32)
        for backward in (False, True):  # backward rows are later, so they replace forward rows
            rows, made_from = self.parts.get(backward, (_EMPTY, _EMPTY))
            at = np.searchsorted(made_from, until, side="right") - 1
            found[at >= 0] = rows[at[at >= 0]]
        return found


class UnrolledRows:
    """A rank's step under construction.

    Args:
        step: The old step, of all stages.
        held: (parameters,) True for parameters of this rank; rows and storages of others are omitted.
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
        # First of all, so that they keep the lowest numbers: `set_initial` relies on part 0.
        self._single[self._before] = self._append(self._before)

    @cached_property
    def _mine(self) -> npt.NDArray[np.bool_]:
        """(m,) True for storages of no parameter, or of a parameter of this rank."""
        of = self._owner
        return (of < 0) | self._held[of]

    @cached_property
    def _owner(self) -> I32:
        """(m,) parameter of each storage, -1 for none."""
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
        """Declare the storages that `stage` makes; each micro-batch has its own copies."""
        self._made[stage] = made

    def share_with_later(self, stage: Hashable, made: I32) -> None:
        """Declare storages of `stage` that its first micro-batch makes and the later ones share."""
        self._once[stage] = made

    def alias(self, stage: Hashable, storage: int, replacement: int) -> None:
        """Declare that `stage` does not make `storage` and uses `replacement` instead."""
        self._alias.setdefault(stage, []).append((storage, replacement))

    def declare_sums(self, part: I32, total: I32) -> None:
        """Declare that the first micro-batch makes `part[i]` in place of its sum `total[i]`."""
        self._part, self._total = part, total

    def _copy(self, key: Key) -> _Copy:
        """Return the storages of a stage in a micro-batch, under their numbers in the unrolled step."""
        known = self._copies.get(key)
        if known is None:
            # A copy at this time: `replace_from_now` changes what later stages and micro-batches share.
            made, number = self._made[key[0]], self._single.copy()
            first = self._part if key[1] == 0 else _EMPTY
            made = np.setdiff1d(made, first).astype(np.int32)
            # The batch of a micro-batch is uploaded once, whichever stages of this rank read it.
            shared = self._copies.get(("upload", key[1]))
            if shared is not None:
                number[shared.made] = shared.number[shared.made]
            if key[1] > 0 and key[0] in self._once:
                once = self._once[key[0]]
                made = np.setdiff1d(made, once).astype(np.int32)
                number[once] = self._copies[key[0], 0].number[once]
            number[made] = self._append(made)
            # The first gradient is its own sum: it has the sum's number, and no addition.
            number[first] = number[self._total[: len(first)]]
            # Last, since a replacement may be one of the numbers above.
            for storage, replacement in self._alias.get(key[0], ()):
                number[storage] = number[replacement]
            known = self._copies[key] = _Copy(made, self._n_storages - len(made), number)
        return known

    def number_of(self, key: Key, storage: int) -> int:
        """Return the number of `storage` for a stage and micro-batch."""
        return int(self._copy(key).number[storage])

    def single_number(self, storage: int) -> int:
        """Return the number of a storage that all stages and micro-batches share."""
        return int(self._single[storage])

    def add_received(self, key: Key, storage: int) -> int:
        """Add a copy of `storage` that the next op receives for `key`; return its number."""
        copy = self._copy(key)
        number = int(self._append(np.array([storage]))[0])
        # The op that receives it is appended next.
        self._storages[-1]["kind"], self._storages[-1]["producer"] = np.array([Kind.TEMPORARY]), self.n_ops
        self._storages[-1]["owner"] = np.array([-1])
        copy.number[storage] = number
        copy.received.add(number)
        return number

    def add_storage(
        self,
        n_bytes: int,
        tier: Tier,
        kind: Kind,
        owner: int = -1,
        *,
        forever: bool = False,
        left: bool = False,
    ) -> int:
        """Add a storage with these columns of `Storages`, made by the next op; return its number."""
        # With `forever` it exists before the step and outlives it; with `left` the previous step
        # left it, and it is freed after its last use.
        self._storages.append(_one_storage(n_bytes, tier, kind, owner))
        self._storages[-1] |= {"held_until": FOREVER} if forever else {} if left else {"producer": self.n_ops}
        self._n_storages += 1
        return self._n_storages - 1

    def set_initial(self, storages: I32, column: str, value: int) -> None:
        """Set the bytes or the tier of `storages` that exist before the step."""
        self._storages[0][column][self._single[storages]] = value

    def replace_from_now(self, storage: int, number: int) -> None:
        """Replace `storage` by `number` for stages and micro-batches that begin from now on."""
        self._single[storage] = number

    def set_number(self, key: Key, storage: int, number: int) -> None:
        """Replace `storage` by `number`, which others hold as well, for one stage and micro-batch."""
        copy = self._copy(key)
        copy.number[storage] = number
        copy.received.add(number)

    def hold_number(self, number: int, until: int) -> None:
        """Hold the storage `number` at least until row `until`."""
        self._holds.append((number, until))

    def add_batch(self, n_bytes: int, until: int) -> None:
        """Add `n_bytes` of the batch that exist before the step and are held until row `until`."""
        self._storages.append(_one_storage(n_bytes, Tier.DEVICE, Kind.BATCH, -1))
        self._storages[-1]["held_until"] = until
        self._n_storages += 1

    def hold(self, key: Key, storage: int, until: int) -> None:
        """Hold `storage` of a stage and micro-batch at least until row `until`."""
        self._holds.append((self.number_of(key, storage), until))

    def hold_like(self, key: Key, storages: I32, other: Key) -> None:
        """Hold `storages` of `key` until `other`, of the same stage, would free its own copies."""
        until = self._copies[other].last_row(self._step.storages.held_until[storages])
        self._holds += [
            (self.number_of(key, storage), row)
            for storage, row in zip(storages.tolist(), until.tolist(), strict=True)
        ]

    def hold_all(self, key: Key, until: int) -> None:
        """Hold all storages of a stage and micro-batch at least until row `until`."""
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
        """Append one new op, whose `uses` are (number, mode) pairs; return its row."""
        if name not in self._names:
            self._names.append(name)
        given = {"name": self._names.index(name), "phase": phase, "resource": resource, "group": group}
        given |= {"traffic_bytes": traffic_bytes, "stream": stream, "prefetch": prefetch}
        self._ops.append({column: [value] for column, value in (NEW_OP | given).items()})
        if uses:
            storages, modes = zip(*uses, strict=True)
            self._uses.append(
                (
                    np.full(len(uses), self.n_ops, np.int32),
                    np.array(storages, np.int32),
                    np.array(modes, np.uint8),
                )
            )
        self.n_ops += 1
        return self.n_ops - 1

    def append_ops(self, ops: I32, key: Key, *, backward: bool = False) -> None:
        """Append old `ops`, ascending, for a stage and micro-batch, after those appended for it before."""
        step, copy = self._step, self._copy(key)
        rows, before = copy.parts.get(backward, (_EMPTY, _EMPTY))
        now = np.arange(self.n_ops, self.n_ops + len(ops), dtype=np.int32)
        copy.parts[backward] = np.concatenate([rows, now]), np.concatenate([before, ops])
        uses = self._uses_of(ops)
        storages, modes = copy.number[step.uses.storage[uses]], step.uses.mode[uses].copy()
        # The receiver holds a reference, so autograd cannot donate a received storage.
        modes[(modes == DONATES) & np.isin(storages, list(copy.received))] = READS
        here = storages >= 0
        self._append_columns(ops, uses[here], storages[here], modes[here])

    def rows_of(self, key: Key, ops: I32) -> I32:
        """Return the row of each of the old `ops`, which were appended for a stage and micro-batch."""
        return self._copies[key].row_of(ops)

    def append_remaining(self, of: npt.NDArray[np.bool_] | None = None) -> None:
        """Append the ops that run once per step and use parameters of this rank, or those of `of`.

        Args:
            of: (parameters,) the parameters that they use; None: all of this rank.
        """
        step, owner = self._step, self._owner[self._step.uses.storage]
        here = (owner < 0) | (self._held if of is None else of)[owner]
        others, mine = np.zeros(step.ops.n, bool), np.zeros(step.ops.n, bool)
        others[step.uses.op[~here]] = True
        mine[step.uses.op[(owner >= 0) & here]] = True
        # An op on parameters of other ranks only is not run here; one without parameters is.
        ops = np.flatnonzero(~np.isin(step.ops.phase, _BODY) & (~others | mine)).astype(np.int32)
        self._rest = self.n_ops, ops
        made = np.flatnonzero((step.storages.producer >= 0) & self._mine)
        made = made[np.isin(step.storages.producer[made], ops)]
        self._single[made] = self._append(made)
        self._storages[-1]["producer"] = self.n_ops + np.searchsorted(ops, step.storages.producer[made])
        self._storages[-1]["held_until"] = self._in_rest(step.storages.held_until[made])
        uses = self._uses_of(ops)
        storages = self._single[step.uses.storage[uses]]
        known = here[uses] & (storages >= 0)
        self._append_columns(
            ops, uses[known], storages[known], step.uses.mode[uses[known]], share=self._share(ops, here)
        )

    def _uses_of(self, ops: I32) -> npt.NDArray[np.intp]:
        taken = np.zeros(self._step.ops.n, bool)
        taken[ops] = True
        return np.flatnonzero(taken[self._step.uses.op])

    def _append_columns(
        self, ops: I32, uses: npt.NDArray[Any], storages: I32, modes: Any, share: Any = 1.0
    ) -> None:
        columns = {name: column[ops] for name, column in self._step.ops.columns().items()}
        # A foreach op updates all parameters of the model, and here only those of this rank.
        columns["traffic_bytes"] = (columns["traffic_bytes"] * share).astype(np.int64)
        columns["flops"] = columns["flops"] * share
        self._ops.append(columns)
        self._uses.append(
            ((self.n_ops + np.searchsorted(ops, self._step.uses.op[uses])).astype(np.int32), storages, modes)
        )
        self.n_ops += len(ops)

    def _share(self, ops: I32, here: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        """Return (ops,) this rank's fraction of the bytes that each op uses (a foreach op's cost)."""
        step = self._step
        weights = step.storages.bytes[step.uses.storage].astype(np.float64)
        total, part = (np.bincount(step.uses.op, each, step.ops.n)[ops] for each in (weights, weights * here))
        return np.divide(part, total, out=np.ones(len(ops)), where=total > 0)

    # -- the step --------------------------------------------------------------------------------------------

    def _in_rest(self, until: I32) -> I32:
        """Return the row of the last op up to each of `until` among the ops that run once."""
        start, ops = self._rest
        # The op itself may have been omitted; the last one before it remains.
        row = start + np.maximum(np.searchsorted(ops, until, side="right") - 1, 0)
        return np.where(until == FOREVER, FOREVER, np.where(until < 0, -1, row)).astype(np.int32)

    def _lifetimes(self) -> tuple[I32, I32]:
        """Return (storages,) the producer of each storage, and the row until which Python holds it."""
        step = self._step
        producer, held = np.full(self._n_storages, -1, np.int32), np.full(self._n_storages, -1, np.int32)
        # Part 0: storages that exist before the step.
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
            # The sum is made where the first micro-batch makes its gradient.
            producer[self._single[self._total[: len(rows)][rows >= 0]]] = rows[rows >= 0]
        if self._holds:
            numbers, until = (np.array(column, np.int32) for column in zip(*self._holds, strict=True))
            np.maximum.at(held, numbers, until)
        return producer, held

    def _saves(self) -> Iterator[dict[str, Any]]:
        """Yield the saves of each stage and micro-batch."""
        step = self._step
        used = np.where(step.saves.used_until >= 0, step.saves.used_until, step.saves.held_until)
        for copy in self._copies.values():
            _, ops = copy.parts.get(True, (_EMPTY, _EMPTY))
            # Those that the rows of this rank's backward unpack.
            rows = np.flatnonzero(np.isin(used, ops) & (copy.number[step.saves.storage] >= 0))
            forward_rows, forward = copy.parts[False]
            # The op before which it was packed may be of another stage: then the next one here.
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
        """Return the rank's step."""
        step = self._step
        producer, held = self._lifetimes()
        ops = _joined(self._ops, step.ops.columns())
        storages = _joined(self._storages, {name: getattr(step.storages, name) for name in _STORAGE_COLUMNS})
        saves = _joined(list(self._saves()), step.saves.columns())
        use_op, use_storage, modes = (np.concatenate(column) for column in zip(*self._uses, strict=True))
        # Micro-batches interleave, so a block has no single start and end.
        nothing = np.zeros(len(step.blocks) + 1, np.int32)
        parameters, index = self._parameters()
        storages |= {"owner": index[storages["owner"]], "producer": producer, "held_until": held}
        return step_of_rows(
            step,
            ops,
            storages,
            sorted_uses(use_op, use_storage, modes),
            names=tuple(self._names),
            parameters=parameters,
            saves=replace(step.saves, **saves),
            forward_starts=nothing,
            forward_ends=nothing,
        )

    def _parameters(self) -> tuple[Any, I32]:
        """Return this rank's parameters, and (parameters + 1,) each one's new index; -1 maps to -1."""
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


def _one_storage(n_bytes: int, tier: Tier, kind: Kind, owner: int) -> dict[str, Any]:
    """Return the columns of a storage that is not a saved tensor."""
    return {"bytes": [n_bytes], "tier": [tier], "kind": [kind], "owner": [owner], "float_bytes": [0]}


def _joined(parts: Sequence[dict[str, Any]], like: dict[str, Any]) -> dict[str, Any]:
    """Return the columns `like` of all parts concatenated, in their dtypes."""
    return {
        name: np.concatenate([each[name] for each in parts]).astype(column.dtype)
        for name, column in like.items()
    }
