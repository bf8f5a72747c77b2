"""How passes change a Step: collect copies, insertions and redirections, then build the new Step once.

Ops are addressed by their row in the step at hand; new rows get the next numbers. Positions are sort keys: op `i` sits
at key `i`, what goes before it at `i - 1/2` and after it at `i + 1/4`, each in the order of the calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program import FOREVER, I32, I64, Kind, Phase, Resource, Step, Tier

_NUDGE = 1e-8  # separates insertions at one place; 10^6 of them still fit into a quarter


class Edit:
    """A Step under construction. Every method appends rows or changes columns; `done` sorts and renumbers."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._names = list(step.names)
        self._new_ops: list[dict[str, Any]] = []  # per insertion, a value or an array per column
        self._anchors: list[I32] = []
        self._offsets: list[float] = []
        self.n_ops = step.n_ops
        self._new_storages: list[dict[str, Any]] = []
        self.n_storages = step.n_storages
        # Columns that may be changed in place.
        self.use_op, self.use_storage, self.use_mutates = step.use_op.copy(), step.use_storage.copy(), step.use_mutates.copy()
        self.save_storage, self.save_before = step.save_storage.copy(), step.save_before.copy()
        self.save_until, self.save_used_until = step.save_until.copy(), step.save_used_until.copy()
        self.save_asked, self.save_turn = step.save_asked.copy(), step.save_turn.copy()
        self.save_block, self.save_is_output = step.save_block.copy(), step.save_is_output.copy()
        self.held_until, self.ready_after = step.held_until.copy(), step.ready_after.copy()
        self._drop_uses = np.zeros(len(step.use_op), bool)
        self._drop_saves = np.zeros(len(step.save_storage), bool)
        self._drop_ops = np.zeros(step.n_ops, bool)
        self._more_uses: list[tuple[I32, I32, Any]] = []
        self._releases: list[tuple[I32, I32]] = []
        self._holds: list[tuple[I32, I32]] = []

    def name_id(self, name: str) -> int:
        """Id of an op name, added to the table if it is new."""
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    # -- insertions ----------------------------------------------------------------------------------------------------

    def add_ops(
        self,
        name: str,
        *,
        before: I32 | None = None,
        after: I32 | None = None,
        phase: Phase,
        resource: Resource = Resource.COMPUTE,
        traffic_bytes: I64 | int = 0,
        flops: float = 0.0,
        block: I32 | int = -1,
        group: int = 0,
    ) -> I32:
        """Insert one op per anchor in `before` or `after` (existing rows, ascending); returns the new rows.

        Pass `before` = n_ops of the original step to append at the end.
        """
        anchor = before if before is not None else after
        assert anchor is not None
        count = len(anchor)
        rows = np.arange(self.n_ops, self.n_ops + count, dtype=np.int32)
        self._anchors.append(anchor)
        self._offsets.append(-0.5 if before is not None else 0.25)
        self._new_ops.append({
            "op_name": self.name_id(name), "op_module": 0, "op_block": block, "op_phase": phase, "op_resource": resource,
            "op_flops": flops, "op_traffic_bytes": traffic_bytes, "op_rng": 0, "op_group": group, "op_node": -1, "op_copy_of": -1,
        })  # fmt: skip
        self.n_ops += count
        return rows

    def add_storages(
        self,
        n_bytes: I64,
        *,
        producer: I32,
        tier: Tier = Tier.DEVICE,
        kind: Kind = Kind.TEMPORARY,
        held_until: I32 | None = None,
        owner: I32 | None = None,
    ) -> I32:
        """Add storages made by the ops `producer` (-1: there before the step); returns their rows."""
        count = len(n_bytes)
        rows = np.arange(self.n_storages, self.n_storages + count, dtype=np.int32)
        self._new_storages.append({
            "bytes": n_bytes, "tier": tier, "kind": kind, "producer": producer,
            "owner": -1 if owner is None else owner, "held_until": -1 if held_until is None else held_until,
        })  # fmt: skip
        self.n_storages += count
        return rows

    def add_uses(self, ops: I32, storages: I32, *, mutates: bool = False) -> None:
        """Op `ops[i]` reads (or with `mutates` also writes) storage `storages[i]`."""
        self._more_uses.append((ops, storages, int(mutates)))

    def add_saves(self, storages: I32, *, before: I32, until: I32, block: I32, asked: I32, turn: I32) -> None:
        """Storage `storages[i]` is saved for backward just before op `before[i]` and let go after op `until[i]`.

        Backward asks for it before op `asked[i]` (-1: never), among others asked there in order of `turn[i]`.
        """
        self.save_asked = np.concatenate([self.save_asked, asked]).astype(np.int32)
        self.save_turn = np.concatenate([self.save_turn, turn]).astype(np.int32)
        self.save_storage = np.concatenate([self.save_storage, storages]).astype(np.int32)
        self.save_before = np.concatenate([self.save_before, before]).astype(np.int32)
        self.save_until = np.concatenate([self.save_until, until]).astype(np.int32)
        self.save_used_until = np.concatenate([self.save_used_until, until]).astype(np.int32)
        self.save_block = np.concatenate([self.save_block, block]).astype(np.int32)
        self.save_is_output = np.concatenate([self.save_is_output, np.zeros(len(storages), np.uint8)])
        self._drop_saves = np.concatenate([self._drop_saves, np.zeros(len(storages), bool)])

    def copy_ops(self, ops: I32, before: I32, phase: Phase, end_of: I32) -> tuple[I32, I32]:
        """Run `ops` once more: op `ops[i]` again before op `before[i]`, with new storages for all it makes.

        Args:
            ops: Rows of the original step, ascending.
            before: Anchor of each copy.
            phase: Phase of the copies.
            end_of: Last original op of the group that `ops[i]` belongs to. What Python held longer is let go there, and
                what it held until some op is let go after the copy of the last copied op up to it.

        Returns:
            (n_ops,) copy of each original op and (m,) copy of each original storage, -1 where there is none.
        """
        step, count = self._step, len(ops)
        new_op = np.full(step.n_ops, -1, np.int32)
        new_op[ops] = np.arange(self.n_ops, self.n_ops + count, dtype=np.int32)
        self._anchors.append(before)
        self._offsets.append(-0.5)
        columns = {column: getattr(step, column)[ops] for column in _OP_COLUMNS}
        self._new_ops.append({**columns, "op_copy_of": ops, "op_phase": phase})
        self.n_ops += count

        made = np.flatnonzero((step.producer >= 0) & (new_op[step.producer] >= 0)).astype(np.int32)
        group_end = np.full(step.n_ops, -1, np.int32)
        group_end[ops] = end_of
        held = np.minimum(step.held_until[made], group_end[step.producer[made]])
        let_go = ops[np.maximum(np.searchsorted(ops, held, side="right") - 1, 0)]
        rows = self.add_storages(
            step.bytes[made],
            producer=new_op[step.producer[made]],
            held_until=np.where(held >= 0, new_op[let_go], -1),
            owner=step.owner[made],
        )
        self._new_storages[-1].update(tier=step.tier[made], kind=step.kind[made])
        new_storage = np.full(step.n_storages, -1, np.int32)
        new_storage[made] = rows

        copied = new_op[step.use_op] >= 0
        storages, readers = step.use_storage[copied], step.use_op[copied]
        same_group = (new_storage[storages] >= 0) & (group_end[step.producer[storages]] == group_end[readers])
        self._more_uses.append((new_op[readers], np.where(same_group, new_storage[storages], storages), step.use_mutates[copied]))
        return new_op, new_storage

    # -- changes and removals ------------------------------------------------------------------------------------------

    def let_go_before(self, storages: I32, ops: I32) -> None:
        """Python lets go of `storages[i]` just before op `ops[i]` runs (and not earlier than it already did)."""
        self._releases.append((storages, ops))

    def hold_through(self, storages: I32, ops: I32) -> None:
        """Python holds `storages[i]` at least until op `ops[i]` has run; the op may be a new one."""
        self._holds.append((storages, ops))

    def hold_to_the_end_of_backward(self, op: int) -> None:
        """What Python holds until backward returns (the batch, the loss) is still there when the new op `op` runs."""
        step = self._step
        last = int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
        mine = (step.held_until == last) & (step.producer >= 0) & (step.op_phase[step.producer] == Phase.FORWARD)
        storages = np.flatnonzero(mine).astype(np.int32)
        self.hold_through(storages, np.full(len(storages), op, np.int32))

    def drop_ops(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original ops with all their uses; the storages they made must have no other use."""
        self._drop_ops |= rows
        self._drop_uses |= rows[self._step.use_op]

    def drop_uses(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original uses."""
        self._drop_uses |= rows

    def drop_saves(self, rows: npt.NDArray[np.bool_]) -> None:
        """Autograd no longer saves these original rows."""
        self._drop_saves |= rows

    def done(self) -> Step:
        """The new Step: ops in order of their keys, everything renumbered; storages of removed ops are gone."""
        keys = self._keys()
        alive = np.ones(self.n_ops, bool)
        alive[: len(self._drop_ops)] = ~self._drop_ops
        order = np.argsort(keys, kind="stable")
        order = order[alive[order]]
        position = np.full(self.n_ops + 1, -1, np.int32)  # the last entry serves index -1
        position[order] = np.arange(len(order), dtype=np.int32)
        position_or_before = self._positions_before(keys, order)
        position_or_next = np.minimum(np.searchsorted(keys[order], keys), len(order) - 1)

        sizes = [len(each["bytes"]) for each in self._new_storages]
        columns = {name: _stacked(getattr(self._step, name), self._new_storages, sizes, name) for name in _STORAGE_COLUMNS}
        producer = columns["producer"]
        stays = (producer < 0) | alive[producer]
        renumber = np.cumsum(stays, dtype=np.int32) - 1
        held = _stacked(self.held_until, self._new_storages, sizes, "held_until")
        held = np.where((held < 0) | (held == FOREVER), held, position_or_before[np.clip(held, 0, self.n_ops - 1)])
        if self._releases:
            storages, ops = (np.concatenate(parts) for parts in zip(*self._releases, strict=True))
            np.maximum.at(held, storages, position[ops] - 1)
        if self._holds:  # what is held FOREVER stays so: no position is larger
            storages, ops = (np.concatenate(parts) for parts in zip(*self._holds, strict=True))
            np.maximum.at(held, storages, position_or_before[ops])
        columns["held_until"] = held.astype(np.int32)
        ready = np.concatenate([self.ready_after, np.full(self.n_storages - len(self.ready_after), -1, np.int32)])
        columns["ready_after"] = np.where(ready < 0, -1, position_or_before[np.clip(ready, 0, self.n_ops - 1)]).astype(np.int32)
        columns["producer"] = np.where(producer < 0, -1, position[producer]).astype(np.int32)

        keep = ~self._drop_uses
        use_op = np.concatenate([self.use_op[keep], *(ops for ops, _, _ in self._more_uses)])
        use_storage = np.concatenate([self.use_storage[keep], *(storages for _, storages, _ in self._more_uses)])
        uses = [{"mutates": mutates} for _, _, mutates in self._more_uses]
        use_mutates = _stacked(self.use_mutates[keep], uses, [len(ops) for ops, _, _ in self._more_uses], "mutates")
        use_position = position[use_op]
        by_op = np.argsort(use_position, kind="stable")
        kept = ~self._drop_saves
        op_columns = self._op_columns(order, position_or_before)
        return replace(
            self._step,
            names=tuple(self._names),
            parameters=tuple(
                p._replace(storage=int(renumber[p.storage]), gradient=int(renumber[p.gradient]) if p.gradient >= 0 else -1)
                for p in self._step.parameters
            )
            if not stays.all()
            else self._step.parameters,
            **op_columns,
            **{name: column[stays] for name, column in columns.items()},
            use_op=use_position[by_op],
            use_storage=renumber[use_storage[by_op]],
            use_mutates=use_mutates[by_op],
            save_storage=renumber[self.save_storage[kept]],
            save_before=position_or_before[np.clip(self.save_before[kept], 0, self.n_ops - 1)],
            save_until=position_or_before[np.clip(self.save_until[kept], 0, self.n_ops - 1)],
            save_used_until=position_or_before[np.clip(self.save_used_until[kept], 0, self.n_ops - 1)],
            save_asked=np.where(self.save_asked[kept] < 0, -1, position_or_next[self.save_asked[kept]]).astype(np.int32),
            save_turn=self.save_turn[kept],
            save_block=self.save_block[kept],
            save_is_output=self.save_is_output[kept],
            landing=renumber[self._step.landing],
            enter=position_or_before[np.clip(self._step.enter, 0, self.n_ops - 1)],
            leave=position_or_before[np.clip(self._step.leave, 0, self.n_ops - 1)],
            input_storage=renumber[self._step.input_storage],
        )

    def _op_columns(self, order: npt.NDArray[np.intp], position_or_before: I32) -> dict[str, Any]:
        """The columns of all ops in their new order."""
        counts = [len(anchor) for anchor in self._anchors]
        op_columns: dict[str, Any] = {
            name: _stacked(getattr(self._step, name), self._new_ops, counts, name)[order] for name in _OP_COLUMNS
        }
        copy_of = op_columns["op_copy_of"]
        op_columns["op_copy_of"] = np.where(copy_of < 0, -1, position_or_before[copy_of]).astype(np.int32)
        return op_columns

    def _keys(self) -> npt.NDArray[np.float64]:
        """(ops,) sort key of every op; insertions at one place keep the order of their calls."""
        old = np.arange(self._step.n_ops, dtype=np.float64)
        if not self._anchors:
            return old
        new = np.concatenate(self._anchors) + np.repeat(self._offsets, [len(anchor) for anchor in self._anchors])
        return np.concatenate([old, new + _NUDGE * np.arange(len(new))])

    def _positions_before(self, keys: npt.NDArray[np.float64], order: npt.NDArray[np.intp]) -> I32:
        """(ops,) position of each op, or for a removed op of the last one before it."""
        return (np.searchsorted(keys[order], keys, side="right") - 1).astype(np.int32)


def _stacked(old: npt.NDArray[Any], parts: list[dict[str, Any]], sizes: list[int], column: str) -> npt.NDArray[Any]:
    """`old`, then each part's value of `column`, repeated where it is one number."""
    if not parts:
        return old.copy()
    values = [part[column] for part in parts]
    scalars = [0 if isinstance(value, np.ndarray) else value for value in values]
    out = np.concatenate([old, np.repeat(np.asarray(scalars, old.dtype), sizes)])
    start = len(old)
    for value, size in zip(values, sizes, strict=True):
        if isinstance(value, np.ndarray):
            out[start : start + size] = value
        start += size
    return out


_OP_COLUMNS: tuple[str, ...] = (
    "op_name",
    "op_module",
    "op_block",
    "op_phase",
    "op_resource",
    "op_flops",
    "op_traffic_bytes",
    "op_rng",
    "op_group",
)
_OP_COLUMNS += ("op_node", "op_copy_of")
_STORAGE_COLUMNS = ("bytes", "tier", "kind", "producer", "owner")


def accumulate_gradients(step: Step) -> Step:
    """The step of a later micro-batch: each gradient is added to the one already there and freed.

    Autograd adds where it would otherwise have put the gradient in place; the sum is there from the first micro-batch to the end.
    """
    gradients = step.landing[step.producer[step.landing] >= 0]
    if not len(gradients):
        return step
    edit = Edit(step)
    made_at = step.ready_after[gradients]
    adds = edit.add_ops(
        "aten.add_.Tensor",
        after=made_at,
        phase=Phase.BACKWARD,
        traffic_bytes=3 * step.bytes[gradients],
        block=step.op_block[made_at],
    )
    sums = edit.add_storages(
        step.bytes[gradients],
        producer=np.full(len(gradients), -1, np.int32),
        kind=Kind.GRADIENT,
        held_until=step.held_until[gradients],
        owner=step.owner[gradients],
    )
    later = (step.op_phase[step.use_op] >= Phase.BOUNDARY) & np.isin(step.use_storage, gradients)
    moved = np.full(step.n_storages, -1, np.int32)
    moved[gradients] = sums
    edit.use_storage = np.where(later, moved[edit.use_storage], edit.use_storage).astype(np.int32)
    edit.add_uses(adds, gradients)
    edit.add_uses(adds, sums, mutates=True)
    edit.hold_to_the_end_of_backward(int(adds[-1]))
    edit.held_until[gradients] = -1
    edit.ready_after[gradients] = -1
    new = edit.done()
    kind = new.kind.copy()
    kind[gradients] = Kind.TEMPORARY
    return replace(
        new,
        kind=kind,
        landing=moved[gradients],
        parameters=tuple(p._replace(gradient=int(moved[p.gradient])) if p.gradient >= 0 else p for p in new.parameters),
    )
