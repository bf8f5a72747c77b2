"""How passes change a Step: collect copies, insertions and redirections, then build the new Step once.

Ops are addressed by their row in the step at hand; new rows get the next numbers. Insertions at one place keep the order of
the calls, and what goes after an op comes before what goes before the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.parameters import columns_of
from memtune.program import F64, FOREVER, I32, I64, READS, U8, Kind, Phase, Resource, Step, Tier


class Edit:
    """A Step under construction. Every method appends rows or changes columns; `done` sorts and renumbers."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._names = list(step.names)
        self._new_ops: list[dict[str, Any]] = []  # per insertion, a value or an array per column
        self._anchors: list[I32] = []
        self._after: list[bool] = []  # the anchor, else before it
        self.n_ops = step.n_ops
        self._new_storages: list[dict[str, Any]] = []
        self.n_storages = step.n_storages
        # Columns of the step at hand that may be changed or replaced.
        self.bytes, self.tier, self.kind, self.op_resource = step.bytes.copy(), step.tier, step.kind.copy(), step.op_resource
        self.op_traffic_bytes = step.op_traffic_bytes
        self.use_storage = step.use_storage
        self.save_storage, self.save_before = step.save_storage, step.save_before
        self.save_until, self.save_used_until = step.save_until, step.save_used_until
        self.save_asked, self.save_turn = step.save_asked, step.save_turn
        self.save_call, self.save_is_output = step.save_call, step.save_is_output
        self.held_until, self.ready_after = step.held_until.copy(), step.ready_after.copy()
        self.parameters, self.landing = step.parameters, step.landing
        self.producer = step.producer.copy()
        self._drop_uses = np.zeros(len(step.use_op), bool)
        self._drop_saves = np.zeros(len(step.save_storage), bool)
        self._drop_ops = np.zeros(step.n_ops, bool)
        self._drop_storages = np.zeros(step.n_storages, bool)
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
        name: str | I32,
        *,
        before: I32 | None = None,
        after: I32 | None = None,
        phase: Phase | U8,
        resource: Resource | U8 = Resource.COMPUTE,
        flops: F64 | float = 0.0,
        traffic_bytes: I64 | int = 0,
        module: I32 | int = 0,
        call: I32 | int = -1,
        group: I32 | int = 0,
        stream: U8 | int = 0,
        prefetch: U8 | int = 0,
    ) -> I32:
        """Insert one op per anchor in `before` or `after` (existing rows); returns the new rows.

        Pass `before` = n_ops of the original step to append at the end, an array of `name_id`s to insert several ops at once.
        For `stream` and `prefetch` see `Step`.
        """
        anchor = before if before is not None else after
        assert anchor is not None
        count = len(anchor)
        rows = np.arange(self.n_ops, self.n_ops + count, dtype=np.int32)
        self._anchors.append(anchor)
        self._after.append(before is None)
        names = self.name_id(name) if isinstance(name, str) else name
        self._new_ops.append({
            "op_name": names, "op_module": module, "op_call": call, "op_phase": phase, "op_resource": resource,
            "op_flops": flops, "op_traffic_bytes": traffic_bytes, "op_rng": 0, "op_group": group, "op_node": -1, "op_copy_of": -1,
            "op_stream": stream, "op_prefetch": prefetch, "op_match": 0, "op_by_element": 0,
        })  # fmt: skip
        self.n_ops += count
        return rows

    def add_storages(
        self,
        n_bytes: I64,
        *,
        producer: I32,
        tier: Tier | U8 = Tier.DEVICE,
        kind: Kind | U8 = Kind.TEMPORARY,
        held_until: I32 | None = None,
        owner: I32 | None = None,
    ) -> I32:
        """Add storages made by the ops `producer` (-1: there before the step); returns their rows."""
        count = len(n_bytes)
        rows = np.arange(self.n_storages, self.n_storages + count, dtype=np.int32)
        self._new_storages.append({
            "bytes": n_bytes, "tier": tier, "kind": kind, "producer": producer,
            "owner": -1 if owner is None else owner, "held_until": -1 if held_until is None else held_until, "ready_after": -1,
        })  # fmt: skip
        self.n_storages += count
        return rows

    def add_uses(self, ops: I32, storages: I32, *, mutates: int = READS) -> None:
        """Op `ops[i]` uses storage `storages[i]`: READS, WRITES (True) or HANDS_OVER."""
        self._more_uses.append((ops, storages, int(mutates)))

    def add_saves(
        self,
        storages: I32,
        *,
        before: I32,
        until: I32,
        call: I32,
        asked: I32,
        turn: I32,
        is_output: U8 | int = 0,
        used_until: I32 | None = None,
    ) -> None:
        """Storage `storages[i]` is saved for backward just before op `before[i]` and let go after op `until[i]`.

        Backward asks for it before op `asked[i]` (-1: never), among others asked there in order of `turn[i]`. `is_output[i]`: the
        op just before saved its own output. Its last user in backward is op `used_until[i]`; left out: the one that lets it go.
        """
        self.save_asked = np.concatenate([self.save_asked, asked]).astype(np.int32)
        self.save_turn = np.concatenate([self.save_turn, turn]).astype(np.int32)
        self.save_storage = np.concatenate([self.save_storage, storages]).astype(np.int32)
        self.save_before = np.concatenate([self.save_before, before]).astype(np.int32)
        self.save_until = np.concatenate([self.save_until, until]).astype(np.int32)
        self.save_used_until = np.concatenate([self.save_used_until, until if used_until is None else used_until]).astype(
            np.int32
        )
        self.save_call = np.concatenate([self.save_call, call]).astype(np.int32)
        output = np.broadcast_to(np.asarray(is_output, np.uint8), len(storages))
        self.save_is_output = np.concatenate([self.save_is_output, output])
        self._drop_saves = np.concatenate([self._drop_saves, np.zeros(len(storages), bool)])

    def copy_ops(
        self, ops: I32, before: I32, phase: Phase, end_of: I32, empty: npt.NDArray[np.bool_] | None = None
    ) -> tuple[I32, I32]:
        """Run `ops` once more: op `ops[i]` again before op `before[i]`, with new storages for all it makes.

        Args:
            ops: Rows of the original step, ascending; one given several times makes its storages one by one.
            before: Anchor of each copy.
            phase: Phase of the copies.
            end_of: Last original op of the group that `ops[i]` belongs to. What Python held longer is let go there, and
                what it held until some op is let go after the copy of the last copied op up to it.
            empty: Which of `ops` only allocate what they make; None: none.

        Returns:
            (n_ops,) copy of each original op and (m,) copy of each original storage, -1 where there is none.
        """
        step, count = self._step, len(ops)
        new_op = np.full(step.n_ops, -1, np.int32)
        new_op[ops] = np.arange(self.n_ops, self.n_ops + count, dtype=np.int32)
        self._anchors.append(before)
        self._after.append(False)
        columns = {column: getattr(step, column)[ops] for column in _OP_COLUMNS}
        columns |= {"op_copy_of": ops, "op_phase": phase}
        if empty is not None and empty.any():
            columns |= self._only_allocating(columns, empty)
        self._new_ops.append(columns)
        self.n_ops += count

        made = np.flatnonzero((step.producer >= 0) & (new_op[step.producer] >= 0)).astype(np.int32)
        group_end = np.full(step.n_ops, -1, np.int32)
        group_end[ops] = end_of
        held = np.minimum(step.held_until[made], group_end[step.producer[made]])
        let_go = ops[np.maximum(np.searchsorted(ops, held, side="right") - 1, 0)]
        makers = step.producer[made]
        nth = np.zeros(step.n_storages, np.int32)  # of those that its op makes
        order = made[np.argsort(makers, kind="stable")]
        nth[order] = np.arange(len(order)) - np.searchsorted(step.producer[order], step.producer[order])
        spare = np.bincount(ops, minlength=step.n_ops)[makers] - 1 - nth[made]
        rows = self.add_storages(
            step.bytes[made],
            producer=new_op[makers] - np.maximum(spare, 0).astype(np.int32),
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

    def _only_allocating(self, columns: dict[str, Any], empty: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """The columns in which ops that do no more than allocate differ from those they are copies of."""
        nothing: dict[str, Any] = {
            "op_name": self.name_id("aten.empty_strided.default"), "op_resource": Resource.NOTHING,
            "op_flops": 0.0, "op_traffic_bytes": 0, "op_rng": 0, "op_by_element": 0,
        }  # fmt: skip
        now = {name: np.broadcast_to(np.asarray(columns[name]), empty.shape) for name in nothing}
        return {name: np.where(empty, value, now[name]).astype(now[name].dtype) for name, value in nothing.items()}

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

    def hold_to_the_end_of_step(self, op: int, *, gradients: bool = False) -> None:
        """What forward made and Python holds to the end of the step (the loss) is still there when the new op `op` runs.

        Args:
            op: The last one.
            gradients: Of those, too, that a tiled loss makes in forward.
        """
        step = self._step
        mine = (step.held_until == step.n_ops - 1) & (step.producer >= 0) & (step.op_phase[step.producer] == Phase.FORWARD)
        storages = np.flatnonzero(mine & (gradients | (step.kind != Kind.GRADIENT))).astype(np.int32)
        self.hold_through(storages, np.full(len(storages), op, np.int32))

    def drop_ops(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original ops with all their uses; the storages they made must have no other use."""
        self._drop_ops |= rows
        self._drop_uses |= rows[self._step.use_op]

    def drop_uses(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original uses."""
        self._drop_uses |= rows

    def drop_storages(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original storages that their ops no longer make; nothing may use or save them."""
        self._drop_storages |= rows

    def drop_saves(self, rows: npt.NDArray[np.bool_]) -> None:
        """Autograd no longer saves these original rows."""
        self._drop_saves |= rows

    def done(self) -> Step:
        """The new Step: ops in their new order, everything renumbered; storages of removed ops are gone."""
        order = self._order()
        storages, renumber = self._storage_columns(order)
        if renumber is None:
            parameters = self.parameters
        else:
            known = columns_of(self.parameters)
            parameters = replace(known, storage=renumber[known.storage], gradient=renumber[known.gradient])
        return replace(
            self._step,
            names=tuple(self._names),
            parameters=parameters,
            **self._op_columns(order),
            **storages,
            **self._use_columns(order, renumber),
            **self._save_columns(order, renumber),
            landing=_renumbered(self.landing, renumber),
            returned=_renumbered(self._step.returned, renumber),
            written_parts=_renumbered(self._step.written_parts, renumber),
            looked_at=_renumbered(self._step.looked_at, renumber),
            enter=order.next(self._step.enter),
            leave=order.moved(self._step.leave),
            input_storage=_renumbered(self._step.input_storage, renumber),
        )

    def _order(self) -> _Order:
        anchors = np.concatenate([np.empty(0, np.int32), *self._anchors], dtype=np.int32, casting="same_kind")
        after = np.repeat(np.asarray(self._after, bool), [len(anchor) for anchor in self._anchors])
        rows, position, before, following = _native.order_rows(self._drop_ops, anchors, after)
        return _Order(rows, position, before, following)

    def _op_columns(self, order: _Order) -> dict[str, Any]:
        sizes = [len(anchor) for anchor in self._anchors]
        columns: dict[str, Any] = {}
        for name in _OP_COLUMNS:
            old = self._now(name)
            columns[name] = _native.take_rows(order.rows, old, _joined(name, old.dtype, self._new_ops, sizes))
        columns["op_copy_of"] = order.moved(columns["op_copy_of"], none=-1)
        return columns

    def _storage_columns(self, order: _Order) -> tuple[dict[str, Any], I32 | None]:
        """The columns of all storages, and the new number of each, None where they keep their numbers."""
        sizes = [len(each["bytes"]) for each in self._new_storages]
        columns = {name: self._stacked(name, self._new_storages, sizes) for name in _STORAGE_COLUMNS}
        producer = columns["producer"]
        held = order.moved(columns["held_until"], none=-1)
        held[columns["held_until"] == FOREVER] = FOREVER
        if self._releases:
            storages, ops = (np.concatenate(parts) for parts in zip(*self._releases, strict=True))
            np.maximum.at(held, storages, order.position[ops] - 1)
        if self._holds:  # what is held FOREVER stays so: no position is larger
            storages, ops = (np.concatenate(parts) for parts in zip(*self._holds, strict=True))
            np.maximum.at(held, storages, order.before[ops])
        columns["held_until"] = held
        columns["ready_after"] = order.moved(columns["ready_after"], none=-1)
        columns["producer"] = order.position[producer]  # its last entry serves -1
        if not (self._drop_ops.any() or self._drop_storages.any()):
            return columns, None
        stays = (producer < 0) | (columns["producer"] >= 0)
        stays[: len(self._drop_storages)] &= ~self._drop_storages
        if stays.all():
            return columns, None
        renumber = np.append(np.cumsum(stays, dtype=np.int32) - 1, np.int32(-1))  # the last entry serves -1
        return {name: column[stays] for name, column in columns.items()}, renumber

    def _use_columns(self, order: _Order, renumber: I32 | None) -> dict[str, Any]:
        keep = slice(None) if not self._drop_uses.any() else ~self._drop_uses
        use_op = np.concatenate([self._step.use_op[keep], *(ops for ops, _, _ in self._more_uses)])
        use_storage = np.concatenate([self.use_storage[keep], *(storages for _, storages, _ in self._more_uses)])
        use_mutates = np.empty(len(use_op), np.uint8)
        start = len(use_op) - sum(len(ops) for ops, _, _ in self._more_uses)
        use_mutates[:start] = self._step.use_mutates[keep]
        for ops, _, mutates in self._more_uses:
            use_mutates[start : start + len(ops)] = mutates
            start += len(ops)
        storages = _renumbered(use_storage, renumber)
        op, storage, mutates = _native.sort_uses(order.position[use_op], storages, use_mutates, len(order.rows))
        return {"use_op": op, "use_storage": storage, "use_mutates": mutates}

    def _save_columns(self, order: _Order, renumber: I32 | None) -> dict[str, Any]:
        columns: dict[str, Any] = {name: getattr(self, name) for name in _SAVE_COLUMNS}
        if self._drop_saves.any():
            columns = {name: column[~self._drop_saves] for name, column in columns.items()}
        columns["save_storage"] = _renumbered(columns["save_storage"], renumber)
        columns["save_before"] = order.next(columns["save_before"])
        for name in ("save_until", "save_used_until"):
            columns[name] = order.moved(columns[name])
        asked = columns["save_asked"]
        columns["save_asked"] = np.where(asked < 0, np.int32(-1), order.following[asked])
        return columns

    def _now(self, column: str) -> npt.NDArray[Any]:
        """A column of the step at hand, with what was changed in it."""
        changed = vars(self).get(column)
        now: npt.NDArray[Any] = getattr(self._step, column) if changed is None else changed
        return now

    def _stacked(self, column: str, parts: list[dict[str, Any]], sizes: list[int]) -> npt.NDArray[Any]:
        """A column of the step at hand, then the new rows of it."""
        old = self._now(column)
        return np.concatenate([old, _joined(column, old.dtype, parts, sizes)]) if parts else old


def _joined(column: str, dtype: npt.DTypeLike, parts: list[dict[str, Any]], sizes: list[int]) -> npt.NDArray[Any]:
    """Each part's value of `column`, repeated where it is one number."""
    out = np.empty(sum(sizes), dtype)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        out[start : start + size] = part[column]
        start += size
    return out


@dataclass(frozen=True, eq=False)
class _Order:
    """Where ops go: `_native.order_rows`."""

    rows: I32
    position: I32
    before: I32
    following: I32

    def moved(self, ops: I32, *, none: int | None = None) -> I32:
        """The new positions of `ops`, or for removed ones of the last op before them; negative ones become `none` if given."""
        moved: I32 = self.before[np.minimum(np.maximum(ops, 0), len(self.before) - 1)]
        if none is not None:
            moved[ops < 0] = none
        return moved

    def next(self, ops: I32) -> I32:
        """The new positions of `ops`, or for removed ones of the first op after them."""
        found: I32 = self.following[np.minimum(np.maximum(ops, 0), len(self.following) - 1)]
        return np.minimum(found, np.int32(len(self.rows) - 1))


def _renumbered(storages: I32, renumber: I32 | None) -> I32:
    return storages if renumber is None else renumber[storages]


_OP_COLUMNS: tuple[str, ...] = (
    "op_name",
    "op_module",
    "op_call",
    "op_phase",
    "op_resource",
    "op_flops",
    "op_traffic_bytes",
    "op_rng",
    "op_group",
)
_OP_COLUMNS += ("op_node", "op_copy_of", "op_stream", "op_prefetch", "op_match", "op_by_element")
_STORAGE_COLUMNS = ("bytes", "tier", "kind", "producer", "owner", "held_until", "ready_after")
_SAVE_COLUMNS: tuple[str, ...] = ("save_storage", "save_before", "save_until", "save_used_until", "save_asked", "save_turn")
_SAVE_COLUMNS += ("save_is_output", "save_call")


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
        call=step.op_call[made_at],
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
    edit.kind[gradients] = Kind.TEMPORARY
    edit.landing = moved[gradients]
    known = columns_of(step.parameters)
    edit.parameters = replace(known, gradient=np.where(known.gradient >= 0, moved[known.gradient], -1))
    return edit.done()
