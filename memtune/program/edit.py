"""Edits that passes make to a Step: collect insertions, copies and changes, then build the new Step once.

Ops are addressed by their row in the original step; new rows get the next numbers. Insertions at one anchor
keep the order of the calls; rows inserted after an op come before rows inserted before the next op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.program.new_rows import NEW_OP
from memtune.program.parameter_columns import columns_of
from memtune.program.step import (
    F64,
    FOREVER,
    I32,
    I64,
    READS,
    U8,
    WRITES,
    Kind,
    Ops,
    Phase,
    Resource,
    Saves,
    Step,
    Storages,
    Table,
    Tier,
    Uses,
)

_WRITTEN_IN_PLACE = ("bytes", "kind", "producer", "held_until", "grad_ready_after")


def held_in_backward(step: Step, last: int, end: int) -> npt.NDArray[np.bool_]:
    """Return (m,) tensors that Python holds until backward has returned: after `last`, at most to `end`."""
    # Those are tensors of forward (the batch, the loss), and gradients of leaves that are no parameters.
    held = (step.storages.held_until >= last) & (step.storages.held_until <= end)
    is_forward = step.ops.phase[step.storages.producer] == Phase.FORWARD
    is_read = np.zeros(step.storages.n, bool)  # by the last op; nothing else may hold it until then
    is_read[step.uses.storage[step.uses.op == last]] = True
    # A parameter's gradient is held by its mechanism, which frees it before backward returns.
    is_leaf = (step.storages.kind == Kind.TEMPORARY) & ~is_read & (step.storages.owner < 0)
    found: npt.NDArray[np.bool_] = held & (step.storages.producer >= 0) & (is_forward | is_leaf)
    return found


class PlacedOps(NamedTuple):
    """Ops of one kind among the ops of one insertion: their places in it, and their columns of `Ops`."""

    places: npt.NDArray[np.integer[Any]]
    name: str
    resource: Resource = Resource.COMPUTE
    traffic_bytes: I64 | int = 0
    group: I64 | I32 | int = 0
    stream: int = 0
    prefetch: int = 0
    phase: Phase | None = None
    """Unless it is that of the insertion."""
    anchor: I32 | None = None
    """Unless all anchors are given."""


class Edit:
    """A Step under construction. Methods append rows or change columns; `done` sorts and renumbers."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._names = list(step.names)
        self._new_ops: list[dict[str, Any]] = []  # per insertion, a value or an array per column
        self._anchors: list[I32] = []
        self._after: list[bool] = []  # per insertion: after its anchors, else before them
        self.n_ops = step.ops.n
        self._new_storages: list[dict[str, Any]] = []
        self.n_storages = step.storages.n
        # Tables of the original step: `set_ops` and the like replace columns. The columns copied here may be
        # written in place, without changing the original step.
        self.ops, self.uses, self.saves = step.ops, step.uses, step.saves
        own = {name: getattr(step.storages, name).copy() for name in _WRITTEN_IN_PLACE}
        self.storages = replace(step.storages, **own)
        self.parameters, self.grad_order = step.parameters, step.grad_order
        self._drop_uses = np.zeros(step.uses.n, bool)
        self._drop_saves = np.zeros(step.saves.n, bool)
        self._drop_ops = np.zeros(step.ops.n, bool)
        self._drop_storages = np.zeros(step.storages.n, bool)
        self._more_uses: list[tuple[I32, I32, Any]] = []
        self._releases: list[tuple[I32, I32]] = []
        self._holds: list[tuple[I32, I32]] = []

    def name_id(self, name: str) -> int:
        """Return the id of an op name; add it to the table if it is new."""
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    # -- insertions ------------------------------------------------------------------------------------------

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
        reads: I32 | None = None,
        writes: I32 | None = None,
    ) -> I32:
        """Insert one op per anchor in `before` or `after` (original rows); return the new rows.

        `before` = n_ops of the original step appends at the end. `name` is an op name, or an array of
        `name_id`s to insert several ops at once. `reads[i]` and `writes[i]` are a storage that op `i` uses.
        All other arguments are columns of `Ops`.
        """
        anchor = before if before is not None else after
        assert anchor is not None
        count = len(anchor)
        rows = np.arange(self.n_ops, self.n_ops + count, dtype=np.int32)
        self._anchors.append(anchor)
        self._after.append(before is None)
        names = self.name_id(name) if isinstance(name, str) else name
        given: dict[str, Any] = {
            "name": names,
            "module": module,
            "call": call,
            "phase": phase,
            "resource": resource,
        }
        given |= {"flops": flops, "traffic_bytes": traffic_bytes, "group": group}
        self._new_ops.append(NEW_OP | given | {"stream": stream, "prefetch": prefetch})
        self.n_ops += count
        self.add_uses(rows, reads, writes=writes)
        return rows

    def add_placed_ops(
        self, parts: Sequence[PlacedOps], *, phase: Phase, before: I32 | None = None, after: I32 | None = None
    ) -> I32:
        """Insert ops of several kinds, each kind at its places; return all rows in order."""
        parts = [each for each in parts if len(each.places)]
        count = sum(len(each.places) for each in parts)

        def column(values: Iterable[Any], dtype: type = np.uint8) -> npt.NDArray[Any]:
            made: npt.NDArray[Any] = np.zeros(count, dtype)
            for each, value in zip(parts, values, strict=True):
                made[each.places] = value
            return made

        if before is None and after is None:
            before = column((each.anchor for each in parts), np.int32)
        return self.add_ops(
            column((self.name_id(each.name) for each in parts), np.int32),
            before=before,
            after=after,
            phase=column(phase if each.phase is None else each.phase for each in parts),
            resource=column(each.resource for each in parts),
            traffic_bytes=column((each.traffic_bytes for each in parts), np.int64),
            group=column((each.group for each in parts), np.int32),
            stream=column(each.stream for each in parts),
            prefetch=column(each.prefetch for each in parts),
        )

    def add_kinds(
        self, kinds: Sequence[tuple[str, Resource]], kind: npt.NDArray[np.integer[Any]], **columns: Any
    ) -> I32:
        """Insert ops by number of their kind, which gives name and resource; `columns` as for `add_ops`."""
        names = np.asarray([self.name_id(name) for name, _ in kinds], np.int32)
        resources = np.asarray([resource for _, resource in kinds], np.uint8)
        return self.add_ops(names[kind], resource=resources[kind], **columns)

    def add_storages(
        self,
        n_bytes: I64,
        *,
        producer: I32 | int = -1,
        tier: Tier | U8 = Tier.DEVICE,
        kind: Kind | U8 = Kind.TEMPORARY,
        held_until: I32 | int = -1,
        owner: I32 | int = -1,
        float_bytes: U8 | int = 0,
    ) -> I32:
        """Add storages made by the ops `producer` (-1: they exist before the step); return their rows."""
        count = len(n_bytes)
        rows = np.arange(self.n_storages, self.n_storages + count, dtype=np.int32)
        self._new_storages.append(
            {
                "bytes": n_bytes,
                "tier": tier,
                "kind": kind,
                "producer": producer,
                "owner": owner,
                "held_until": held_until,
                "grad_ready_after": -1,
                "float_bytes": float_bytes,
            }
        )
        self.n_storages += count
        return rows

    def add_persistent(
        self, n_bytes: I64, kind: Kind, tier: Tier = Tier.DEVICE, owner: I32 | int = -1
    ) -> I32:
        """Add storages that exist before the step and after it; return their rows."""
        return self.add_storages(n_bytes, tier=tier, kind=kind, held_until=int(FOREVER), owner=owner)

    def add_uses(
        self, ops: I32 | int, storages: I32 | None = None, *, mode: int = READS, writes: I32 | None = None
    ) -> None:
        """Add a use of storage `storages[i]` by op `ops[i]`, or the one op: READS, WRITES or DONATES.

        `writes` are storages that the ops write as well.
        """
        if storages is not None:
            self._more_uses.append((_rows(ops, storages), storages, int(mode)))
        if writes is not None:
            self._more_uses.append((_rows(ops, writes), writes, WRITES))

    def add_saves(
        self,
        storages: I32,
        *,
        packed_before: I32,
        held_until: I32,
        call: I32,
        unpacked_before: I32,
        unpack_order: I32,
        is_output: U8 | int = 0,
        used_until: I32 | None = None,
    ) -> None:
        """Add saves: autograd packs `storages[i]` just before op `packed_before[i]` and frees it after op
        `held_until[i]`.

        The other arguments are columns of `Saves`; `used_until` defaults to `held_until`.
        """
        rows: dict[str, Any] = {
            "storage": storages,
            "packed_before": packed_before,
            "held_until": held_until,
            "used_until": held_until if used_until is None else used_until,
            "unpacked_before": unpacked_before,
            "unpack_order": unpack_order,
            "is_output": is_output,
            "call": call,
        }
        # New saves go into the table at once, so the mask of dropped ones grows with it.
        self._drop_saves = np.concatenate([self._drop_saves, np.zeros(len(storages), bool)])
        self.set_saves(**_stacked(self.saves, [rows], [len(storages)]))

    def copy_ops(
        self, ops: I32, before: I32, phase: Phase, end_of: I32, empty: npt.NDArray[np.bool_] | None = None
    ) -> tuple[I32, I32]:
        """Insert a copy of op `ops[i]` before op `before[i]`, with new storages for its outputs.

        Args:
            ops: Rows of the original step, ascending. The copies of a row given k times make its storages one
                by one.
            before: Anchor of each copy.
            phase: Phase of the copies.
            end_of: Last original op of the group that `ops[i]` belongs to. Python frees copied storages at
                the latest there; one that it held until some op is freed after the last copy of an op up to
                it.
            empty: (ops,) True for copies that only allocate their outputs; None: none.

        Returns:
            (n_ops,) copy of each original op and (m,) copy of each original storage, -1 if there is none.
        """
        step, count = self._step, len(ops)
        new_op = np.full(step.ops.n, -1, np.int32)
        new_op[ops] = np.arange(self.n_ops, self.n_ops + count, dtype=np.int32)
        self._anchors.append(before)
        self._after.append(False)
        columns = {name: column[ops] for name, column in step.ops.columns().items()}
        columns |= {"copy_of": ops, "phase": phase}
        if empty is not None and empty.any():
            columns |= self._allocation_only(columns, empty)
        self._new_ops.append(columns)
        self.n_ops += count

        group_end = np.full(step.ops.n, -1, np.int32)
        group_end[ops] = end_of
        new_storage = self._storages_of_copies(ops, new_op, group_end)

        copied = new_op[step.uses.op] >= 0
        storages, readers = step.uses.storage[copied], step.uses.op[copied]
        # A copy reads copies of its own group only; storages of other groups are read in the original.
        same_group = (new_storage[storages] >= 0) & (
            group_end[step.storages.producer[storages]] == group_end[readers]
        )
        self._more_uses.append(
            (new_op[readers], np.where(same_group, new_storage[storages], storages), step.uses.mode[copied])
        )
        return new_op, new_storage

    def _storages_of_copies(self, ops: I32, new_op: I32, group_end: I32) -> I32:
        """Add the outputs of the copies `new_op` of `ops`; return (m,) the copy of each storage, or -1."""
        step = self._step
        made = np.flatnonzero((step.storages.producer >= 0) & (new_op[step.storages.producer] >= 0)).astype(
            np.int32
        )
        # Python's references end with the copied group, e.g. when the second forward of a block returns.
        held = np.minimum(step.storages.held_until[made], group_end[step.storages.producer[made]])
        last_copied = ops[np.maximum(np.searchsorted(ops, held, side="right") - 1, 0)]
        makers = step.storages.producer[made]
        nth = np.zeros(step.storages.n, np.int32)  # number of the storage among its producer's outputs
        order = made[np.argsort(makers, kind="stable")]
        nth[order] = np.arange(len(order)) - np.searchsorted(
            step.storages.producer[order], step.storages.producer[order]
        )
        # `new_op` is the last of an op's copies; its n-th output is made by the n-th copy.
        spare = np.bincount(ops, minlength=step.ops.n)[makers] - 1 - nth[made]
        rows = self.add_storages(
            step.storages.bytes[made],
            producer=new_op[makers] - np.maximum(spare, 0).astype(np.int32),
            held_until=np.where(held >= 0, new_op[last_copied], -1),
            owner=step.storages.owner[made],
            float_bytes=step.storages.float_bytes[made],
        )
        self._new_storages[-1].update(tier=step.storages.tier[made], kind=step.storages.kind[made])
        new_storage = np.full(step.storages.n, -1, np.int32)
        new_storage[made] = rows
        return new_storage

    def _allocation_only(self, columns: dict[str, Any], empty: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Return the columns in which copies that only allocate differ from their originals."""
        nothing = {name: NEW_OP[name] for name in ("flops", "traffic_bytes", "rng")}
        nothing |= {name: NEW_OP[name] for name in ("elementwise_bytes", "precision")}
        nothing["name"] = self.name_id("aten.empty_strided.default")
        nothing["resource"] = Resource.NOTHING
        now = {name: np.broadcast_to(np.asarray(columns[name]), empty.shape) for name in nothing}
        return {
            name: np.where(empty, value, now[name]).astype(now[name].dtype) for name, value in nothing.items()
        }

    # -- changes and removals --------------------------------------------------------------------------------

    def set_ops(self, **columns: Any) -> None:
        """Replace `columns` of the original ops."""
        self.ops = replace(self.ops, **columns)

    def set_storages(self, **columns: Any) -> None:
        """Replace `columns` of the original storages."""
        self.storages = replace(self.storages, **columns)

    def set_uses(self, **columns: Any) -> None:
        """Replace `columns` of the original uses."""
        self.uses = replace(self.uses, **columns)

    def set_saves(self, **columns: Any) -> None:
        """Replace `columns` of the saved tensors."""
        self.saves = replace(self.saves, **columns)

    def release_before(self, storages: I32, ops: I32 | int) -> None:
        """Let Python free `storages[i]` just before op `ops[i]`, or the one op; never earlier than it did."""
        self._releases.append((storages, _rows(ops, storages)))

    def hold_through(self, storages: I32, ops: I32 | int) -> None:
        """Hold `storages[i]` by Python at least until op `ops[i]`, or the one op, has run; it may be new."""
        self._holds.append((storages, _rows(ops, storages)))

    def hold_to_the_end_of_backward(self, op: int) -> None:
        """Hold tensors that live until backward returns through the new op `op`."""
        # They are made by forward (the batch, the loss), or are gradients of leaves that are no parameters.
        last = self._step.backward_end
        mine = held_in_backward(self._step, last, last)
        storages = np.flatnonzero(mine).astype(np.int32)
        self.hold_through(storages, op)

    def hold_to_the_end_of_step(self, op: int, *, gradients: bool = False) -> None:
        """Hold forward tensors that live until the step ends (loss, perhaps gradients) through the new op."""
        step = self._step
        mine = (
            (step.storages.held_until == step.ops.n - 1)
            & (step.storages.producer >= 0)
            & (step.ops.phase[step.storages.producer] == Phase.FORWARD)
        )
        storages = np.flatnonzero(mine & (gradients | (step.storages.kind != Kind.GRADIENT))).astype(np.int32)
        self.hold_through(storages, op)

    def drop_ops(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]]) -> None:
        """Remove original ops (mask or numbers) with all their uses; what they made has no other use."""
        self._drop_ops[rows] = True
        self._drop_uses |= self._drop_ops[self._step.uses.op]

    def drop_uses(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original uses."""
        self._drop_uses |= rows

    def drop_storages(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original storages that their ops no longer make; no op or save may use them."""
        self._drop_storages |= rows

    def drop_saves(self, rows: npt.NDArray[np.bool_]) -> None:
        """Remove original saves."""
        self._drop_saves |= rows

    def done(self) -> Step:
        """Return the new Step: ops in order, rows renumbered, storages of removed ops removed."""
        # Lifetimes are positions of ops, so the order comes first and everything else is translated by it.
        order = self._order()
        storages, renumber = self._done_storages(order)
        if renumber is None:
            parameters = self.parameters
        else:
            known = columns_of(self.parameters)
            parameters = replace(known, storage=renumber[known.storage], gradient=renumber[known.gradient])
        step, calls = self._step, self._step.calls
        if renumber is not None:
            calls = replace(calls, inputs=replace(calls.inputs, storage=renumber[calls.inputs.storage]))
        return replace(
            step,
            names=tuple(self._names),
            parameters=parameters,
            ops=self._done_ops(order),
            storages=storages,
            uses=self._done_uses(order, renumber),
            saves=self._done_saves(order, renumber),
            calls=calls,
            grad_order=_renumbered(self.grad_order, renumber),
            returned=_renumbered(step.returned, renumber),
            partly_written=_renumbered(step.partly_written, renumber),
            read_by_host=_renumbered(step.read_by_host, renumber),
            forward_starts=order.next(step.forward_starts),
            forward_ends=order.moved(step.forward_ends),
        )

    def _order(self) -> _Order:
        anchors = np.concatenate([np.empty(0, np.int32), *self._anchors], dtype=np.int32, casting="same_kind")
        after = np.repeat(np.asarray(self._after, bool), [len(anchor) for anchor in self._anchors])
        rows, position, before, following = _native.order_rows(self._drop_ops, anchors, after)
        return _Order(rows, position, before, following)

    def _done_ops(self, order: _Order) -> Ops:
        sizes = [len(anchor) for anchor in self._anchors]
        columns: dict[str, Any] = {}
        for name, old in self.ops.columns().items():
            columns[name] = _native.take_rows(order.rows, old, _joined(name, old.dtype, self._new_ops, sizes))
        columns["copy_of"] = order.moved(columns["copy_of"], none=-1)
        return replace(self.ops, **columns)

    def _done_storages(self, order: _Order) -> tuple[Storages, I32 | None]:
        """Return all storages and the new number of each; None if all keep their numbers."""
        sizes = [len(each["bytes"]) for each in self._new_storages]
        columns = _stacked(self.storages, self._new_storages, sizes)
        producer = columns["producer"]
        held = order.moved(columns["held_until"], none=-1)
        # It is no position; `moved` has mapped it to the last op.
        held[columns["held_until"] == FOREVER] = FOREVER
        if self._releases:
            storages, ops = (np.concatenate(parts) for parts in zip(*self._releases, strict=True))
            # Maximum: an earlier free than Python's own is not possible, so a release only sets the lower
            # bound.
            np.maximum.at(held, storages, order.position[ops] - 1)
        if self._holds:  # FOREVER is larger than any position, so maximum keeps it
            storages, ops = (np.concatenate(parts) for parts in zip(*self._holds, strict=True))
            np.maximum.at(held, storages, order.before[ops])
        columns["held_until"] = held
        columns["grad_ready_after"] = order.moved(columns["grad_ready_after"], none=-1)
        columns["producer"] = order.position[producer]  # producer -1 reads the last entry, which is -1
        if self._drop_ops.any() or self._drop_storages.any():
            remains = (producer < 0) | (columns["producer"] >= 0)
            remains[: len(self._drop_storages)] &= ~self._drop_storages
            if not remains.all():
                # The appended entry maps -1 to -1.
                renumber = np.append(np.cumsum(remains, dtype=np.int32) - 1, np.int32(-1))
                return Storages(**{name: column[remains] for name, column in columns.items()}), renumber
        return Storages(**columns), None

    def _done_uses(self, order: _Order, renumber: I32 | None) -> Uses:
        keep = slice(None) if not self._drop_uses.any() else ~self._drop_uses
        ops = np.concatenate([self.uses.op[keep], *(ops for ops, _, _ in self._more_uses)])
        storages = np.concatenate(
            [self.uses.storage[keep], *(storages for _, storages, _ in self._more_uses)]
        )
        modes = np.empty(len(ops), np.uint8)
        start = len(ops) - sum(len(ops) for ops, _, _ in self._more_uses)
        modes[:start] = self.uses.mode[keep]
        for ops_of_one, _, mode in self._more_uses:
            modes[start : start + len(ops_of_one)] = mode
            start += len(ops_of_one)
        storages = _renumbered(storages, renumber)
        return Uses(*_native.sort_uses(order.position[ops], storages, modes, len(order.rows)))

    def _done_saves(self, order: _Order, renumber: I32 | None) -> Saves:
        columns = self.saves.columns()
        if self._drop_saves.any():
            columns = {name: column[~self._drop_saves] for name, column in columns.items()}
        columns["storage"] = _renumbered(columns["storage"], renumber)
        columns["packed_before"] = order.next(columns["packed_before"])
        for name in ("held_until", "used_until"):
            columns[name] = order.moved(columns[name])
        unpacked = columns["unpacked_before"]
        columns["unpacked_before"] = np.where(unpacked < 0, np.int32(-1), order.following[unpacked])
        return replace(self.saves, **columns)


def _rows(ops: I32 | int, storages: I32) -> I32:
    """Return the op of each of `storages`."""
    return np.full(len(storages), ops, np.int32) if np.ndim(ops) == 0 else np.asarray(ops)


def _stacked(table: Table, parts: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Return the columns of `table` with the new rows appended."""
    columns = table.columns()
    if not parts:
        return columns
    return {
        name: np.concatenate([old, _joined(name, old.dtype, parts, sizes)]) for name, old in columns.items()
    }


def _joined(
    column: str, dtype: npt.DTypeLike, parts: list[dict[str, Any]], sizes: list[int]
) -> npt.NDArray[Any]:
    """Return each part's value of `column`, broadcast to the part's size if it is a scalar."""
    out = np.empty(sum(sizes), dtype)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        out[start : start + size] = part[column]
        start += size
    return out


@dataclass(frozen=True, eq=False)
class _Order:
    """New positions of all ops, from `_native.order_rows`."""

    rows: I32
    position: I32
    before: I32
    following: I32

    def moved(self, ops: I32, *, none: int | None = None) -> I32:
        """Return the new positions of `ops`; for a removed op, that of the last remaining op before it.

        Negative entries become `none` if it is given.
        """
        moved: I32 = self.before[np.minimum(np.maximum(ops, 0), len(self.before) - 1)]
        if none is not None:
            moved[ops < 0] = none
        return moved

    def next(self, ops: I32) -> I32:
        """Return the new positions of `ops`; for a removed op, that of the first remaining op after it."""
        found: I32 = self.following[np.minimum(np.maximum(ops, 0), len(self.following) - 1)]
        return np.minimum(found, np.int32(len(self.rows) - 1))


def _renumbered(storages: I32, renumber: I32 | None) -> I32:
    return storages if renumber is None else renumber[storages]


def accumulate_gradients(step: Step, *, kept: bool = False) -> Step:
    """Return the step of a later micro-batch, which adds each gradient to its sum and frees it.

    Autograd adds after the op after which it would have stored the first gradient. Sums live from the first
    micro-batch to the end of the step; `kept`: they outlive it, because they are zeroed in place.
    """
    gradients = step.grad_order[step.storages.producer[step.grad_order] >= 0]
    if not len(gradients):
        return step
    edit = Edit(step)
    made_at = step.storages.grad_ready_after[gradients]
    # One op per gradient, as autograd's AccumulateGrad adds it in place (`aten.add_`).
    adds = edit.add_ops(
        "aten.add_.Tensor",
        after=made_at,
        phase=Phase.BACKWARD,
        traffic_bytes=3 * step.storages.bytes[gradients],
        call=step.ops.call[made_at],
        reads=gradients,
    )
    sums = edit.add_storages(
        step.storages.bytes[gradients],
        kind=Kind.GRADIENT,
        held_until=np.full_like(gradients, FOREVER) if kept else step.storages.held_until[gradients],
        owner=step.storages.owner[gradients],
    )
    later = (step.ops.phase[step.uses.op] >= Phase.BOUNDARY) & np.isin(step.uses.storage, gradients)
    moved = np.full(step.storages.n, -1, np.int32)
    moved[gradients] = sums
    edit.set_uses(storage=np.where(later, moved[edit.uses.storage], edit.uses.storage).astype(np.int32))
    edit.add_uses(adds, writes=sums)
    edit.hold_to_the_end_of_backward(int(adds[-1]))
    # A gradient that is added to a sum is a temporary and dies in the addition.
    edit.storages.held_until[gradients] = -1
    edit.storages.grad_ready_after[gradients] = -1
    edit.storages.kind[gradients] = Kind.TEMPORARY
    edit.grad_order = moved[gradients]
    known = columns_of(step.parameters)
    edit.parameters = replace(known, gradient=np.where(known.gradient >= 0, moved[known.gradient], -1))
    return edit.done()


TO_HOST = "memtune.to_host.default"
"""Op name of the copies of saved activations to the host."""


def pending_copy_sources(step: Step, firsts: I32) -> tuple[I32, I32]:
    """Find those of the ops `firsts` that are copies to the host, and the source that the copy before holds.

    Returns:
        Pairs as two columns: index into `firsts`, storage.
    """
    # A copy's source is freed just before the next copy starts, so an op inserted before that copy
    # still counts it.
    pairs: list[tuple[int, int]] = []
    copies = (
        np.flatnonzero(step.ops.name == step.names.index(TO_HOST))
        if TO_HOST in step.names
        else np.empty(0, np.intp)
    )
    for number, op in enumerate(firsts.tolist()):
        place = int(np.searchsorted(copies, op))
        if 0 < place < len(copies) and copies[place] == op:
            sources = step.uses.storage[step.uses.op == copies[place - 1]]
            pairs += [
                (number, storage) for storage in sources[step.storages.held_until[sources] == op - 1].tolist()
            ]
    found = np.asarray(pairs, np.int32).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def hold_prefetched_copies(edit: Edit, step: Step, after: I32, rows: I32) -> None:
    """Hold host copies of prefetched activations through the new ops `rows`, each inserted after `after`.

    Args:
        edit: An edit of `step` that contains `rows`.
        step: The step before the edit.
        after: (n,) op after which each new op was inserted.
        rows: (n,) the new ops.
    """
    # A prefetched activation keeps its host copy until backward asks for it. Where that is right after
    # an op of `after`, the new op behind it still finds the copy.
    if TO_HOST not in step.names:
        return
    held = (step.storages.held_until >= 0) & (step.storages.held_until < step.ops.n)
    made = np.flatnonzero(held & (step.storages.tier == Tier.HOST) & (step.storages.producer >= 0))
    made = made[step.ops.name[step.storages.producer[made]] == step.names.index(TO_HOST)].astype(np.int32)
    last = np.full(step.ops.n, -1, np.int32)
    np.maximum.at(last, after, rows)
    found = made[last[step.storages.held_until[made]] >= 0]
    edit.hold_through(found, last[step.storages.held_until[found]])
