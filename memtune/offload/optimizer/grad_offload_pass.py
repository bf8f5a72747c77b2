"""Pass of `offload.optimizer.grad_offload`: D2H copies in buckets during backward, host updates overlapped
with it.

The order of the inserted ops is computed first (`_inserted_ops`), then rows and storages are added to the
Step for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.offload.core import PendingUpdates, Trigger, resident_count, sentinel_index, waiting_room
from memtune.offload.gradients import (
    ReadyGradients,
    Rows,
    average_ready,
    end_of_backward,
    own_storage,
    parameter_bytes,
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
    WRITES,
    Edit,
    Kind,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
    hold_until_asked,
)


@dataclass(frozen=True)
class OffloadTiming:
    """When gradients are offloaded and the host updates."""

    bucket_bytes: int
    trigger: Trigger = "end_of_step"
    late: bool = False
    """Each update runs beside the next step."""
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
"""An op that is inserted, as `InsertedOps` has it; no object of its own, since a search makes a million of
them.
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
    def of(cls, turns: list[InsertedOp]) -> InsertedOps:
        """Return the tuples as columns."""
        return cls(*np.ascontiguousarray(np.asarray(turns, np.int32).T))


def resident_rows(step: Step, ratio: float) -> npt.NDArray[np.bool_]:
    """(parameters,) True where the optimizer state is resident, when `ratio` of the bytes is offloaded."""
    trained = np.flatnonzero(columns_of(step.parameters).trainable)
    found = np.zeros(len(step.parameters), bool)
    found[trained[: resident_count(parameter_bytes(step)[trained].tolist(), ratio)]] = True
    return found


def sentinel_row(step: Step, stays: npt.NDArray[np.bool_] | None = None) -> int:
    """Return the parameter with the sentinel gradient among the offloaded ones."""
    trainable = columns_of(step.parameters).trainable
    trained = np.flatnonzero(trainable if stays is None else trainable & ~stays)
    return int(trained[sentinel_index(parameter_bytes(step)[trained].tolist())])


def no_sentinel(step: Step, ratio: float = 1.0) -> bool:
    """Return True if the smallest offloaded parameter gets no gradient, so that changes of gradients go
    unnoticed.
    """
    stays = resident_rows(step, ratio) if ratio < 1.0 else None
    return bool(columns_of(step.parameters).gradient[sentinel_row(step, stays)] < 0)


def overlap_optimizer(
    step: Step,
    native: Native,
    early: OffloadTiming,
    ranks: int = 1,
    stays: npt.NDArray[np.bool_] | None = None,
    ops: int = 0,
) -> Step:
    """Return `step` with its optimizer on the host, gradients offloaded when ready, and updates as `early`
    defines.

    Args:
        step: One whose smallest parameter has a gradient.
        native: The update.
        early: When gradients are offloaded and the host updates.
        ranks: Number of ranks. Unless they are replicas, each of several has its rows of the gradients,
            reduced in groups.
        stays: (parameters,) those that the optimizer's first `ops` ops update on the device; None: none.
        ops: The number that `offload.optimizer.resident_state_pass.updated_first` returned.
    """
    updated = _updated(step)
    mine = np.flatnonzero(updated if stays is None else updated & ~stays)
    if not len(mine) or not (step.ops.phase == Phase.OPTIMIZER).any():
        return step
    watched = int(np.searchsorted(mine, sentinel_row(step, stays)))
    edit, ranks = Edit(step), ranks if early.replicas == 1 else 1
    landings = ready_or_reduced(edit, step, mine, watched, early.bucket_bytes, ranks, late=early.late)
    average_ready(edit, step, mine[landings.index], early.replicas)
    if ranks > 1 and stays is not None and ops:
        _alone_on_device(edit, step, np.flatnonzero(updated & stays), ops)
    first = int(without_own_update(edit, step, ops)[0])
    turns = _inserted_ops(step, mine, landings, watched, early, first)
    rows = insert_ops(
        edit, step, mine, landings, turns, watched, first, {UPDATE: update_bytes(step, native, mine)}
    )
    gradients, old = host_gradients(edit, step, mine, landings, watched, turns, rows, early.late)
    _update(edit, step, native, mine, turns, rows, gradients, old)
    free_buckets(edit, step, landings, turns, rows)
    on_device, held = of_first_ops(step, ops)
    on_host(edit, step, (step.ops.phase == Phase.OPTIMIZER) & ~on_device, held)
    sums_to_host(edit, step, landings)
    return edit.done()


def _updated(step: Step) -> npt.NDArray[np.bool_]:
    columns = columns_of(step.parameters)
    found: npt.NDArray[np.bool_] = columns.trainable & (columns.gradient >= 0)
    return found


def _alone_on_device(edit: Edit, step: Step, mine: Rows, ops: int) -> None:
    """Give the reduced gradients of `mine`, which the optimizer's first `ops` ops read, storages of their
    own.
    """
    gradient, reduced = columns_of(step.parameters).gradient[mine], reduced_among(step, mine)
    sizes = parameter_bytes(step)[mine].tolist()
    summed = gradient != reduced.raw
    edit.storages.bytes[gradient[summed]], edit.storages.held_until[gradient[summed]] = 0, -1
    dropped = np.zeros(step.ops.n, bool)
    dropped[reduced.adds] = True
    edit.drop_ops(dropped)
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
        edit.add_uses(np.full(len(theirs), op, np.int32), theirs)
    edit.hold_through(alone, np.full(len(alone), first[-1], np.int32))


def _inserted_ops(
    step: Step, mine: Rows, landings: ReadyGradients, watched: int, early: OffloadTiming, first: int
) -> InsertedOps:
    """Return all inserted ops in their order."""
    end = end_of_backward(step, landings)
    waits = _Waits(step, mine, watched, early.trigger)
    buckets = [np.flatnonzero(landings.bucket == each).tolist() for each in np.unique(landings.bucket)]
    updated: set[int] = set()

    def arrival(members: list[int], anchor: int) -> list[InsertedOp]:
        ready = sorted(waits.ready(landings.index[members].tolist()))
        updated.update(ready)
        adds: list[InsertedOp] = [(ADD, row, anchor) for row in members if landings.sums[row] >= 0]
        return adds + [(UPDATE, index, anchor) for index in ready]

    turns: list[InsertedOp] = [(UPDATE, index, _BEGIN) for index in range(len(mine)) if early.late]
    before: list[int] = []
    for members in buckets:
        anchor = int(landings.after[members[-1]]) if landings.full[members[-1]] else end
        turns += arrival(before, anchor)
        turns += [(COPY, row, anchor) for row in members]
        before = members
    turns += arrival(before, end)
    turns += [(COPY, SENTINEL, int((step.ops.phase == Phase.OPTIMIZER).argmax()))]
    if not early.late:
        turns += [(UPDATE, index, first) for index in range(len(mine)) if index not in updated]
    return InsertedOps.of(turns + [(UP, index, first) for index in range(len(mine))])


class _Waits:
    """Parameters whose gradients have not arrived, to find those to update."""

    def __init__(self, step: Step, mine: Rows, watched: int, trigger: Trigger) -> None:
        columns = columns_of(step.parameters)
        self._trigger, self._block = trigger, columns.block[mine].tolist()
        self._members: dict[int, set[int]] = {}
        if trigger != "per_layer":
            return
        for index, block in enumerate(self._block):
            if index != watched and block >= 0:
                self._members.setdefault(block, set()).add(index)
        for block in columns.block[columns.trainable & (columns.gradient < 0)].tolist():
            self._members.pop(block, None)  # never complete
        self._missing = {block: set(members) for block, members in self._members.items()}

    def ready(self, arrived: list[int]) -> list[int]:
        if self._trigger != "per_layer":
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
    mine: Rows,
    landings: ReadyGradients,
    turns: InsertedOps,
    watched: int,
    first: int,
    traffic_bytes: dict[int, I64],
) -> I32:
    """Insert the ops and return their rows.

    Args:
        edit: Of `step`.
        step: Before the edit.
        mine: (mine,) parameters that are updated.
        landings: Their gradients in grad-ready order.
        turns: The ops in their order.
        watched: The sentinel's index in `mine`.
        first: The optimizer's first op.
        traffic_bytes: By kind of op, (mine,) bytes where they are not the gradient's.
    """
    what, row, anchor = turns
    names = np.asarray([edit.name_id(name) for name, _ in _OPS], np.int32)
    sizes = parameter_bytes(step)[mine]
    of_landing = np.append(landings.index, watched).astype(np.int32)  # the last: the witness
    index = np.where((what == ADD) | (what == COPY), of_landing[row], row)
    traffic = np.where(what == ADD, 3, 1) * sizes[index]
    for kind, n_bytes in traffic_bytes.items():
        traffic = np.where(what == kind, n_bytes[index], traffic)
    rows = np.empty(len(what), np.int32)
    once = bool(
        (step.ops.phase[landings.after] == Phase.BOUNDARY).any()
    )  # whole sums, reduced in the last micro-batch
    at_start, at_end = anchor == _BEGIN, anchor >= int((step.ops.phase == Phase.OPTIMIZER).argmax())
    for part, where in ((at_start, "before"), (~at_start & ~at_end, "after"), (at_end, "before")):
        inside = where == "after"
        phase = (
            np.where((what > COPY) | once, Phase.BOUNDARY, Phase.BACKWARD)
            if inside
            else np.full(len(what), Phase.OPTIMIZER)
        )
        phase = np.where(at_start, Phase.BOUNDARY, np.where(at_end & (what == COPY), Phase.BOUNDARY, phase))
        rows[part] = edit.add_ops(
            names[what[part]],
            **{where: np.maximum(anchor[part], 0)},
            phase=phase[part].astype(np.uint8),
            resource=np.asarray([resource for _, resource in _OPS], np.uint8)[what[part]],
            traffic_bytes=traffic[part],
            call=step.ops.call[anchor[part]] if inside else -1,
            stream=(what[part] == UP).astype(np.uint8),  # a copy back is complete in stream order
            prefetch=(what[part] == COPY).astype(np.uint8),  # the side stream waits for the compute stream
        )
        if inside:
            hold_until_asked(edit, step, anchor[part], rows[part])
    return rows


def host_gradients(
    edit: Edit,
    step: Step,
    mine: Rows,
    landings: ReadyGradients,
    watched: int,
    turns: InsertedOps,
    rows: I32,
    late: bool,
) -> tuple[I32, I32]:
    """(mine,) the host gradients that this step produces for an update, and those that its updates read.

    They differ where updates are delayed by a step.
    """
    what, row, _ = turns
    sums = np.append(landings.sums, -1)  # the last: the witness
    copies, source = rows[what == COPY], row[what == COPY]
    index = np.append(landings.index, watched)[source]
    stays = late & (sums[source] < 0)
    hosts = edit.add_storages(
        parameter_bytes(step)[mine][index],
        producer=copies,
        tier=Tier.HOST,
        kind=Kind.GRADIENT,
        owner=mine[index].astype(np.int32),
        held_until=np.where(stays, FOREVER, -1).astype(np.int32),
    )
    edit.add_uses(copies, np.append(landings.raw, landings.watched)[source].astype(np.int32))
    gradients = np.empty(len(mine), np.int32)
    gradients[index] = np.where(sums[source] >= 0, sums[source], hosts)
    host_of = np.empty(len(sums), np.int32)
    host_of[source] = hosts
    adds = what == ADD
    edit.add_uses(rows[adds], host_of[row[adds]])
    edit.add_uses(rows[adds], sums[row[adds]], mode=WRITES)
    dropped = np.zeros(step.ops.n, bool)
    dropped[landings.adds] = True
    edit.drop_ops(dropped)
    edit.storages.held_until[sums[(sums >= 0) & (sums < step.storages.n)]] = FOREVER if late else -1
    if not late:
        return gradients, gradients
    nowhere = np.full(len(mine), -1, np.int32)
    old = edit.add_storages(
        parameter_bytes(step)[mine],
        producer=nowhere,
        tier=Tier.HOST,
        kind=Kind.GRADIENT,
        owner=mine.astype(np.int32),
    )
    return gradients, old


def _update(
    edit: Edit,
    step: Step,
    native: Native,
    mine: Rows,
    turns: InsertedOps,
    rows: I32,
    gradients: I32,
    old: I32,
) -> None:
    """Add masters, updates from the gradients `old`, and H2D copies of weights."""
    columns = columns_of(step.parameters)
    count = len(mine)
    weights = edit.add_storages(
        4 * columns.numel[mine],
        producer=np.full(count, -1, np.int32),
        tier=Tier.HOST,
        kind=Kind.PARAMETER,
        held_until=np.full(count, FOREVER, np.int32),
        owner=mine.astype(np.int32),
    )
    what, row, anchor = turns
    updates, up = np.empty(count, np.int32), np.empty(count, np.int32)
    updates[row[what == UPDATE]], up[row[what == UP]] = rows[what == UPDATE], rows[what == UP]
    update_by(edit, step, native, mine, updates)
    edit.add_uses(updates, weights, mode=WRITES)
    edit.add_uses(updates, old, mode=WRITES)
    narrow = columns.itemsize[mine] != 4
    edit.add_uses(up, np.where(narrow, old, weights))
    edit.add_uses(up, columns.storage[mine], mode=WRITES)
    # A gradient used in backward waits for its update as `PendingUpdates` has it, one used in the step until
    # its weight is up.
    early = (what == UPDATE) & (anchor != _BEGIN) & (anchor != anchor[-1])
    early[early] = ~narrow[row[early]]
    if early.any():
        gone = _freed_before(np.flatnonzero(early), what, row, waiting_room(step), 4 * columns.numel[mine])
        edit.let_go_before(old[row[early]], rows[gone])
    stays = np.setdiff1d(np.arange(count), row[early])
    edit.hold_through(old[stays], up[stays])


def _freed_before(early: Rows, what: I32, row: I32, room: int, n_bytes: I64) -> Rows:
    """(early,) the ops before which the gradients read by the updates `early` are freed.

    That is a later update, or the first op of the step.
    """
    first_of_run = np.flatnonzero(np.append(True, what[1:] != what[:-1]))
    run = np.searchsorted(first_of_run, early, side="right") - 1
    found, waiting = np.full(len(early), -1, np.intp), PendingUpdates[Rows](room)
    for each in np.unique(run):
        mine = np.flatnonzero(run == each)
        size = int(n_bytes[row[early[mine]]].sum())
        for before in waiting.let_go(size):
            found[before] = first_of_run[each]
        waiting.put(mine, size)
    found[found < 0] = np.flatnonzero(what == COPY)[-1] + 1  # the witness has come down
    return found


def sums_to_host(edit: Edit, step: Step, landings: ReadyGradients) -> None:
    """What earlier micro-batches have left is on the host; `edit.storages.tier` has been copied."""
    sums = landings.sums[landings.sums >= 0]
    edit.storages.tier[sums[sums < step.storages.n]] = Tier.HOST


def free_buckets(edit: Edit, step: Step, landings: ReadyGradients, turns: InsertedOps, rows: I32) -> None:
    """Free each bucket on the device before the first op that follows its copies."""
    copies = np.flatnonzero((turns.what == COPY) & (turns.row != SENTINEL))
    of_bucket = np.full(len(rows), -1, np.int32)
    of_bucket[copies] = landings.bucket[turns.row[copies]]
    gone = np.empty(len(landings.raw), np.int32)
    gone[turns.row[copies]] = rows[_ends_of_runs(of_bucket)[copies] + 1]
    edit.storages.held_until[landings.raw] = -1
    edit.storages.kind[landings.raw] = Kind.TEMPORARY
    edit.let_go_before(landings.raw, gone)
    if landings.watched < step.storages.n:
        edit.storages.held_until[landings.watched] = -1
    end = end_of_backward(step, landings)
    hung = rows[turns.anchor == end]
    if len(hung):  # what Python holds until backward returns is still there
        last = int(np.flatnonzero(step.ops.phase < Phase.BOUNDARY)[-1])
        held = (
            (step.storages.held_until >= last)
            & (step.storages.held_until <= end)
            & (step.storages.producer >= 0)
        )
        held &= step.ops.phase[step.storages.producer] == Phase.FORWARD
        storages = np.flatnonzero(held).astype(np.int32)
        edit.hold_through(storages, np.full(len(storages), hung[-1], np.int32))
    edit.hold_to_the_end_of_step(int(rows[-1]))


def _ends_of_runs(values: I32) -> Rows:
    """(n,) index of the last of the equal neighbours that each of `values` belongs to."""
    ends = np.append(np.flatnonzero(np.diff(values)), len(values) - 1)
    found: Rows = ends[np.searchsorted(ends, np.arange(len(values)))]
    return found
