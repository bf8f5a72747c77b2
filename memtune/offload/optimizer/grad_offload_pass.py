"""Pass of `offload.optimizer.grad_offload`: bucketed D2H copies and overlapped host updates.

The order of the inserted ops is computed first (`_inserted_ops`), then rows and storages are added to the
Step for it. Ops are the mechanism's one by one, so that the drift test compares them with a recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memtune.offload.core import PendingUpdates, Trigger, resident_count, sentinel_index, waiting_room
from memtune.offload.gradients import (
    ReadyGradients,
    Rows,
    average_ready,
    end_of_backward,
    own_storage,
    ready_or_reduced,
    reduced_among,
)
from memtune.offload.optimizer.host_optimizer_pass import (
    Native,
    of_first_ops,
    on_host,
    update_by,
    update_bytes,
    without_own_update,
)
from memtune.program import (
    FOREVER,
    I32,
    I64,
    Edit,
    Kind,
    Mask,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
    hold_prefetched_copies,
)


@dataclass(frozen=True)
class OffloadTiming:
    """Time at which gradients are offloaded and the host updates."""

    bucket_bytes: int
    trigger: Trigger = "end_of_step"
    delayed: bool = False
    """Each update overlaps with the next step."""
    replicas: int = 1
    """Ranks that have all weights, and average each gradient when it is ready."""


_BEGIN, SENTINEL = -1, -1
ADD, COPY, UPDATE, UP, READ, WRITE = range(6)
_OPS = (
    ("aten.add_.Tensor", Resource.HOST_THREADS),
    ("memtune.to_host.default", Resource.DEVICE_TO_HOST),
    ("memtune.host_update_.default", Resource.HOST_THREADS),
    ("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE),
    ("memtune.from_ssd.default", Resource.SSD_READ),
    ("memtune.write_ssd_.default", Resource.SSD_WRITE),
)


InsertedOp = tuple[int, int, int]
"""An inserted op with the fields of `InsertedOps`; a plain tuple, because a search creates a million of them.
"""


class InsertedOps(NamedTuple):
    """Inserted ops in their order; (inserted,) each.

    In backward an op follows its anchor; otherwise it precedes it: the first op of the step, or of the
    optimizer.
    """

    what: I32
    row: I32
    """Row of the ready gradients for `ADD` and `COPY`, else of the updated parameters."""
    anchor: I32

    @classmethod
    def from_rows(cls, inserted: list[InsertedOp]) -> InsertedOps:
        """Return the tuples as columns."""
        return cls(*np.ascontiguousarray(np.asarray(inserted, np.int32).T))


def resident_rows(step: Step, ratio: float) -> Mask:
    """Return (parameters,) True where optimizer state is resident if `ratio` of the bytes is offloaded."""
    # In the order of use, as `resident_count` expects.
    trained = np.flatnonzero(columns_of(step.parameters).trainable)
    found = np.zeros(len(step.parameters), bool)
    found[trained[: resident_count(columns_of(step.parameters).n_bytes[trained].tolist(), ratio)]] = True
    return found


def sentinel_row(step: Step, resident: Mask | None = None) -> int:
    """Return the parameter with the sentinel gradient among the offloaded ones."""
    trainable = columns_of(step.parameters).trainable
    trained = np.flatnonzero(trainable if resident is None else trainable & ~resident)
    return int(trained[sentinel_index(columns_of(step.parameters).n_bytes[trained].tolist())])


def no_sentinel(step: Step, ratio: float = 1.0) -> bool:
    """Return True if the sentinel's parameter gets no gradient, so changes of gradients go unnoticed."""
    resident = resident_rows(step, ratio) if ratio < 1.0 else None
    return bool(columns_of(step.parameters).gradient[sentinel_row(step, resident)] < 0)


def overlap_optimizer(
    step: Step,
    native: Native,
    timing: OffloadTiming,
    ranks: int = 1,
    resident: Mask | None = None,
    ops: int = 0,
) -> Step:
    """Return `step` with its optimizer on the host, gradients offloaded and updated by `timing`.

    Args:
        step: One whose smallest parameter has a gradient.
        native: The update.
        timing: When gradients are offloaded and the host updates.
        ranks: Number of ranks. Unless they are replicas, each of several has its rows of the gradients,
            reduced in groups.
        resident: (parameters,) those that the optimizer's first `ops` ops update on the device; None: none.
        ops: The number that `offload.optimizer.resident_state_pass.updated_first` returned.
    """
    updated = _updated(step)
    offloaded = np.flatnonzero(updated if resident is None else updated & ~resident)
    if not len(offloaded) or not (step.ops.phase == Phase.OPTIMIZER).any():
        return step
    watched = int(np.searchsorted(offloaded, sentinel_row(step, resident)))
    # Replicas average whole gradients, so for the order they are like one rank.
    edit, ranks = Edit(step), ranks if timing.replicas == 1 else 1
    grads = ready_or_reduced(
        edit, step, offloaded, watched, timing.bucket_bytes, ranks, delayed=timing.delayed
    )
    average_ready(edit, step, offloaded[grads.index], timing.replicas)
    if ranks > 1 and resident is not None and ops:
        _alone_on_device(edit, step, np.flatnonzero(updated & resident), ops)
    first = int(without_own_update(edit, step, ops)[0])
    # First the order alone, as plain tuples: every later array follows it.
    inserted = _inserted_ops(step, offloaded, grads, watched, timing, first)
    rows = insert_ops(
        edit, step, offloaded, grads, inserted, watched, {UPDATE: update_bytes(step, native, offloaded)}
    )
    _, old = host_gradients(edit, step, offloaded, grads, watched, inserted, rows, timing.delayed)
    _update(edit, step, native, offloaded, inserted, rows, old)
    free_buckets(edit, step, grads, inserted, rows)
    on_device, held = of_first_ops(step, ops)
    on_host(edit, step, (step.ops.phase == Phase.OPTIMIZER) & ~on_device, held)
    sums_to_host(edit, step, grads)
    return edit.done()


def _updated(step: Step) -> Mask:
    columns = columns_of(step.parameters)
    found: Mask = columns.trainable & (columns.gradient >= 0)
    return found


def _alone_on_device(edit: Edit, step: Step, offloaded: Rows, ops: int) -> None:
    """Give the reduced gradients of resident parameters `offloaded` storages of their own."""
    gradient, reduced = columns_of(step.parameters).gradient[offloaded], reduced_among(step, offloaded)
    sizes = columns_of(step.parameters).n_bytes[offloaded].tolist()
    # With accumulation the recorded sum is on the device; the host has the sums of offloaded parameters.
    summed = gradient != reduced.raw
    edit.storages.bytes[gradient[summed]], edit.storages.held_until[gradient[summed]] = 0, -1
    edit.drop_ops(reduced.adds)
    alone = np.asarray(
        [
            own_storage(edit, step, reduced, index, size, bool(summed[index]))
            for index, size in enumerate(sizes)
        ],
        np.int32,
    )
    first = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[:ops]
    uses = np.isin(step.uses.op, first) & np.isin(step.uses.storage, gradient)
    edit.drop_uses(uses)
    for op, storage in zip(step.uses.op[uses].tolist(), step.uses.storage[uses].tolist(), strict=True):
        theirs = alone[gradient == storage]
        edit.add_uses(op, theirs)
    edit.hold_through(alone, first[-1])


def _inserted_ops(
    step: Step, offloaded: Rows, grads: ReadyGradients, watched: int, timing: OffloadTiming, first: int
) -> InsertedOps:
    """Return all inserted ops in their order, as `GradientOffload` runs them."""
    end = end_of_backward(step, grads)
    waits = _Waits(step, offloaded, watched, timing.trigger)
    buckets = [np.flatnonzero(grads.bucket == each).tolist() for each in np.unique(grads.bucket)]
    updated: set[int] = set()

    def finish(members: list[int], anchor: int) -> list[InsertedOp]:
        """Return the host ops that follow the D2H copies of a bucket: additions, then triggered updates."""
        # Sorted, because the native update goes through the groups in the model's order.
        ready = sorted(waits.ready(grads.index[members].tolist()))
        updated.update(ready)
        adds: list[InsertedOp] = [(ADD, row, anchor) for row in members if grads.sums[row] >= 0]
        return adds + [(UPDATE, index, anchor) for index in ready]

    # Delayed: the last step's updates overlap with this step from its first op on.
    inserted: list[InsertedOp] = [
        (UPDATE, index, _BEGIN) for index in range(len(offloaded)) if timing.delayed
    ]
    before: list[int] = []
    for members in buckets:
        # A bucket that never fills is sent when backward ends.
        anchor = int(grads.after[members[-1]]) if grads.full[members[-1]] else end
        # A bucket is finished when the next one is sent, not when it has arrived: no op depends on link
        # speed.
        inserted += finish(before, anchor)
        inserted += [(COPY, row, anchor) for row in members]
        before = members
    inserted += finish(before, end)
    # The sentinel is copied when the optimizer's step begins: until then it reveals changes.
    inserted += [(COPY, SENTINEL, int((step.ops.phase == Phase.OPTIMIZER).argmax()))]
    if not timing.delayed:
        inserted += [(UPDATE, index, first) for index in range(len(offloaded)) if index not in updated]
    return InsertedOps.from_rows(inserted + [(UP, index, first) for index in range(len(offloaded))])


class _Waits:
    """Gradients that are not on the host yet, to find the parameters that the trigger updates."""

    def __init__(self, step: Step, offloaded: Rows, watched: int, trigger: Trigger) -> None:
        columns = columns_of(step.parameters)
        self._trigger, self._block = trigger, columns.block[offloaded].tolist()
        self._members: dict[int, set[int]] = {}
        if trigger != "per_layer":
            return
        for index, block in enumerate(self._block):
            if index != watched and block >= 0:
                self._members.setdefault(block, set()).add(index)
        for block in columns.block[columns.trainable & (columns.gradient < 0)].tolist():
            # A trained parameter without gradient: the block never completes in backward.
            self._members.pop(block, None)
        self._missing = {block: set(members) for block, members in self._members.items()}

    def ready(self, arrived: list[int]) -> list[int]:
        """Return the parameters to update after the gradients `arrived`."""
        if self._trigger != "per_layer":
            # End of step: no update inside backward.
            return arrived if self._trigger == "per_gradient" else []
        found: list[int] = []
        for index in arrived:
            missing = self._missing.get(self._block[index])
            if missing is not None:
                missing.discard(index)
                found += [] if missing else self._members[self._block[index]]
        return found


def insert_ops(
    edit: Edit,
    step: Step,
    offloaded: Rows,
    grads: ReadyGradients,
    inserted: InsertedOps,
    watched: int,
    traffic_bytes: dict[int, I64],
) -> I32:
    """Insert the ops and return their rows.

    Args:
        edit: Of `step`.
        step: Before the edit.
        offloaded: Rows of the parameters that are updated.
        grads: Their gradients in grad-ready order.
        inserted: The ops in their order.
        watched: The sentinel's index in `offloaded`.
        traffic_bytes: By kind of op, (offloaded,) bytes where they are not the gradient's.
    """
    what, row, anchor = inserted
    sizes = columns_of(step.parameters).n_bytes[offloaded]
    grad_index = np.append(grads.index, watched).astype(np.int32)  # the last: the sentinel
    # Copies and additions are rows of gradients, updates rows of parameters.
    index = np.where((what == ADD) | (what == COPY), grad_index[row], row)
    traffic = np.where(what == ADD, 3, 1) * sizes[index]
    for kind, n_bytes in traffic_bytes.items():
        traffic = np.where(what == kind, n_bytes[index], traffic)
    rows = np.empty(len(what), np.int32)
    # Full sums, which ranks reduce once, after the last micro-batch's backward.
    once = bool((step.ops.phase[grads.after] == Phase.BOUNDARY).any())
    # Three calls, because an anchor is followed inside backward and preceded elsewhere.
    at_start, at_end = anchor == _BEGIN, anchor >= int((step.ops.phase == Phase.OPTIMIZER).argmax())
    for part, where in ((at_start, "before"), (~at_start & ~at_end, "after"), (at_end, "before")):
        inside = where == "after"
        phase = (
            np.where((what > COPY) | once, Phase.BOUNDARY, Phase.BACKWARD)
            if inside
            else np.full(len(what), Phase.OPTIMIZER)
        )
        phase = np.where(at_start, Phase.BOUNDARY, np.where(at_end & (what == COPY), Phase.BOUNDARY, phase))
        rows[part] = edit.add_kinds(
            _OPS,
            what[part],
            **{where: np.maximum(anchor[part], 0)},
            phase=phase[part].astype(np.uint8),
            traffic_bytes=traffic[part],
            call=step.ops.call[anchor[part]] if inside else -1,
            stream=(what[part] == UP).astype(np.uint8),  # H2D on the compute stream: complete in its order
            prefetch=(what[part] == COPY).astype(np.uint8),  # D2H on the copy stream, which waits for compute
        )
        if inside:
            hold_prefetched_copies(edit, step, anchor[part], rows[part])
    return rows


def host_gradients(
    edit: Edit,
    step: Step,
    offloaded: Rows,
    grads: ReadyGradients,
    watched: int,
    inserted: InsertedOps,
    rows: I32,
    delayed: bool,
) -> tuple[I32, I32]:
    """Return (offloaded,) host gradients that this step makes for an update, and those that updates read."""
    # They differ where updates are delayed by a step.
    what, row, _ = inserted
    sums = np.append(grads.sums, -1)  # the last: the sentinel
    copies, source = rows[what == COPY], row[what == COPY]
    index = np.append(grads.index, watched)[source]
    outlives_step = delayed & (sums[source] < 0)
    hosts = edit.add_storages(
        columns_of(step.parameters).n_bytes[offloaded][index],
        producer=copies,
        tier=Tier.HOST,
        kind=Kind.GRADIENT,
        owner=offloaded[index].astype(np.int32),
        held_until=np.where(outlives_step, FOREVER, -1).astype(np.int32),
    )
    edit.add_uses(copies, np.append(grads.raw, grads.watched)[source].astype(np.int32))
    gradients = np.empty(len(offloaded), np.int32)
    # With accumulation the update reads the sum, to which this micro-batch's copy was added.
    gradients[index] = np.where(sums[source] >= 0, sums[source], hosts)
    host_of = np.empty(len(sums), np.int32)
    host_of[source] = hosts
    adds = what == ADD
    edit.add_uses(rows[adds], host_of[row[adds]], writes=sums[row[adds]])
    edit.drop_ops(grads.adds)
    edit.storages.held_until[sums[(sums >= 0) & (sums < step.storages.n)]] = FOREVER if delayed else -1
    if not delayed:
        return gradients, gradients
    # The last step's gradients exist before the step begins, so no op produces them.
    sizes, owner = columns_of(step.parameters).n_bytes[offloaded], offloaded.astype(np.int32)
    return gradients, edit.add_storages(sizes, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)


def _update(
    edit: Edit, step: Step, native: Native, offloaded: Rows, inserted: InsertedOps, rows: I32, old: I32
) -> None:
    """Add masters, updates from the gradients `old`, and H2D copies of weights."""
    columns = columns_of(step.parameters)
    count = len(offloaded)
    weights = edit.add_persistent(
        4 * columns.numel[offloaded], Kind.PARAMETER, Tier.HOST, offloaded.astype(np.int32)
    )
    what, row, anchor = inserted
    updates, up = np.empty(count, np.int32), np.empty(count, np.int32)
    updates[row[what == UPDATE]], up[row[what == UP]] = rows[what == UPDATE], rows[what == UP]
    update_by(edit, step, native, offloaded, updates)
    edit.add_uses(updates, writes=weights)
    edit.add_uses(updates, writes=old)
    narrow = columns.itemsize[offloaded] != 4
    edit.add_uses(up, np.where(narrow, old, weights), writes=columns.storage[offloaded])
    # The host frees a gradient that backward's updates use by the rules of `PendingUpdates`, any other one
    # when the new weight is on the device. A bfloat16 gradient's memory has the new weight, so it counts as
    # the latter.
    early = (what == UPDATE) & (anchor != _BEGIN) & (anchor != anchor[-1])
    early[early] = ~narrow[row[early]]
    if early.any():
        gone = _freed_before(
            np.flatnonzero(early), what, row, waiting_room(step), 4 * columns.numel[offloaded]
        )
        edit.release_before(old[row[early]], rows[gone])
    in_step = np.setdiff1d(np.arange(count), row[early])
    edit.hold_through(old[in_step], up[in_step])


def _freed_before(early: Rows, what: I32, row: I32, room: int, n_bytes: I64) -> Rows:
    """Return (early,) the ops before which the gradients read by the updates `early` are freed."""
    # That is a later update, or the first op of the step.
    # Updates that one trigger starts together are one round of `PendingUpdates`.
    first_of_run = np.flatnonzero(np.append(True, what[1:] != what[:-1]))
    run = np.searchsorted(first_of_run, early, side="right") - 1
    found, waiting = np.full(len(early), -1, np.intp), PendingUpdates[Rows](room)
    for each in np.unique(run):
        offloaded = np.flatnonzero(run == each)
        size = int(n_bytes[row[early[offloaded]]].sum())
        for before in waiting.make_room(size):
            found[before] = first_of_run[each]
        waiting.add(offloaded, size)
    # `optimizer.step()` waits for the rest, after the sentinel's copy.
    found[found < 0] = np.flatnonzero(what == COPY)[-1] + 1
    return found


def sums_to_host(edit: Edit, step: Step, grads: ReadyGradients) -> None:
    """Move the sums of earlier micro-batches to the host; `edit.storages.tier` must be a copy already."""
    sums = grads.sums[grads.sums >= 0]
    edit.storages.tier[sums[sums < step.storages.n]] = Tier.HOST


def free_buckets(edit: Edit, step: Step, grads: ReadyGradients, inserted: InsertedOps, rows: I32) -> None:
    """Free each bucket on the device before the first op that follows its copies."""
    copies = np.flatnonzero((inserted.what == COPY) & (inserted.row != SENTINEL))
    of_bucket = np.full(len(rows), -1, np.int32)
    of_bucket[copies] = grads.bucket[inserted.row[copies]]
    gone = np.empty(len(grads.raw), np.int32)
    # `_finish_copies` frees a bucket before it does anything else.
    gone[inserted.row[copies]] = rows[_ends_of_runs(of_bucket)[copies] + 1]
    edit.storages.held_until[grads.raw] = -1
    edit.storages.kind[grads.raw] = Kind.TEMPORARY
    edit.release_before(grads.raw, gone)
    if grads.watched < step.storages.n:
        edit.storages.held_until[grads.watched] = -1
    end = end_of_backward(step, grads)
    hung = rows[inserted.anchor == end]
    if len(hung):
        # The hooks run inside backward: forward's results that Python holds until it returns are still live.
        last = step.backward_end
        held = (
            (step.storages.held_until >= last)
            & (step.storages.held_until <= end)
            & (step.storages.producer >= 0)
        )
        held &= step.ops.phase[step.storages.producer] == Phase.FORWARD
        storages = np.flatnonzero(held).astype(np.int32)
        edit.hold_through(storages, hung[-1])
    edit.hold_to_the_end_of_step(int(rows[-1]))


def _ends_of_runs(values: I32) -> Rows:
    """Return (n,) index of the last of the equal neighbours that each of `values` belongs to."""
    ends = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)
    found: Rows = ends[np.searchsorted(ends, np.arange(len(values)))]
    return found
