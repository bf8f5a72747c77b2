"""The pass of `offload.near_storage.update_workers`: optimizer state at updaters, round by round."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.offload.gradients import ReadyGradients, average_ready, end_of_backward, ready_or_reduced
from memtune.offload.near_storage.storage_domains import (
    OFFLOAD,
    READ,
    RELOAD,
    SLOTS,
    UPDATE,
    WRITE_MOMENTS,
    WRITE_WEIGHTS,
    Layout,
    Segment,
    SubGroup,
    divide,
    step_actions,
    topk_layout,
)
from memtune.offload.optimizer import (
    ADD,
    COPY,
    READ as FIRST_OF_STEP,
    InsertedOp,
    InsertedOps,
    free_buckets,
    host_gradients,
    insert_ops,
    sentinel_row,
    sums_to_host,
    without_own_update,
)
from memtune.program import (
    FOREVER,
    I32,
    I64,
    Edit,
    Kind,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
    moments_of_parameters,
)

_TOPK, _PLACES, _TO_SLOT = 6, 7, 8
_OPS = {
    READ: ("memtune.updater_read_.default", Resource.SSD_READ),
    OFFLOAD: ("memtune.copy_to_host_.default", Resource.DEVICE_TO_HOST),
    UPDATE: ("memtune.updater_update_.default", Resource.HOST_THREADS),
    WRITE_WEIGHTS: ("memtune.updater_write_.default", Resource.SSD_WRITE),
    WRITE_MOMENTS: ("memtune.updater_write_.default", Resource.SSD_WRITE),
    RELOAD: ("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE),
    _TOPK: ("memtune.largest_.default", Resource.COMPUTE),
    _PLACES: ("memtune.copy_to_host_.default", Resource.DEVICE_TO_HOST),
    _TO_SLOT: ("aten.copy_.default", Resource.HOST_THREADS),
}
_SENDS = (OFFLOAD, _TOPK, _PLACES, _TO_SLOT)
Trained = npt.NDArray[np.intp]


@dataclass(frozen=True)
class UpdatersSpec:
    """The knobs of `offload.near_storage.update_workers.Updaters`."""

    domains: int
    sub_group_numel: int
    buffers: int
    share: float | None = None
    bucket_bytes: int | None = None
    """Size of a bucket of gradients that are offloaded in backward; None: they are offloaded in the step."""
    slots: int = 1
    """SSD slots of each sub-group, used alternately."""


@dataclass(frozen=True, eq=False)
class _InsertedOps:
    """The inserted ops, column by column."""

    action: I32
    domain: I32
    number: I32
    """Number of the sub-group in its domain."""
    index: I32
    """Index of the sub-group among the updated ones of its domain."""
    parameter: I32
    """Index of the parameter; -1 for an op on a whole sub-group."""
    n_bytes: I64
    rows: I32


@dataclass(frozen=True, eq=False)
class _Backward:
    """Gradients that are offloaded in backward (Rule 5)."""

    ready: ReadyGradients
    inserted: InsertedOps
    rows: I32


def optimizer_on_updaters(step: Step, spec: UpdatersSpec, ranks: int = 1, replicas: int = 1) -> Step:
    """Return `step` with optimizer state and updates in updater processes.

    Args:
        step: The step.
        spec: The knobs.
        ranks: Number of ranks that reduce gradients in groups, if these are offloaded in backward.
        replicas: Replicas, which then average each gradient when it is ready; `ranks` is 1 then.
    """
    columns = columns_of(step.parameters)
    trained = np.flatnonzero(columns.trainable)
    given = columns.gradient[trained] >= 0
    optimizer = (step.ops.phase == Phase.OPTIMIZER) & (step.ops.resource == Resource.COMPUTE)
    if not given.any() or not optimizer.any():
        return step
    numel, itemsize = columns.numel[trained], columns.itemsize[trained]
    layout = divide(
        tuple(numel.tolist()),
        tuple(itemsize.tolist()),
        tuple(_moments(step, trained)),
        spec.domains,
        spec.sub_group_numel,
    )
    edit = Edit(step)
    gradients, watched, backward = columns.gradient[trained].astype(np.int32), -1, None
    if spec.bucket_bytes is not None:
        watched = int(np.searchsorted(trained, sentinel_row(step)))
        backward, gradients[given] = _offload_in_backward(
            edit, step, trained[given], spec.bucket_bytes, ranks, replicas
        )
    anchor = int(without_own_update(edit, step)[0])
    edit.storages.bytes[step.storages.kind == Kind.OPTIMIZER] = 0  # the updaters have it
    asked = layout, spec, tuple(given.tolist()), tuple(itemsize.tolist()), watched
    made = _insert(edit, anchor, _op_columns(*asked))
    _uses_of_groups(edit, made, layout, spec)
    _uses_of_parameters(edit, step, made, trained, gradients)
    if spec.share is not None:
        _uses_of_sent(edit, step, made, trained)
    if backward is not None:
        # A bucket is freed before the op that follows it, which for the last one is the step's first.
        inserted = InsertedOps(
            *(np.append(*each) for each in zip(backward.inserted, (FIRST_OF_STEP, 0, anchor), strict=True))
        )
        free_buckets(edit, step, backward.ready, inserted, np.append(backward.rows, made.rows[:1]))
        edit.set_storages(tier=step.storages.tier.copy())
        sums_to_host(edit, step, backward.ready)
    _free_gradients(edit, step, made, gradients)
    edit.hold_to_the_end_of_step(int(made.rows[-1]))
    return edit.done()


def _offload_in_backward(
    edit: Edit, step: Step, offloaded: Trained, bucket_bytes: int, ranks: int, replicas: int
) -> tuple[_Backward, I32]:
    """Insert the D2H copies of backward; return them with (offloaded,) gradients that the step reads."""
    watched = int(np.searchsorted(offloaded, sentinel_row(step)))
    ready = ready_or_reduced(edit, step, offloaded, watched, bucket_bytes, ranks, delayed=False)
    average_ready(edit, step, offloaded[ready.index], replicas)
    end, inserted, before = end_of_backward(step, ready), list[InsertedOp](), list[int]()
    for each in np.unique(ready.bucket):
        members = np.flatnonzero(ready.bucket == each).tolist()
        anchor = int(ready.after[members[-1]]) if ready.full[members[-1]] else end
        # A bucket is added to the sums when the next one is sent.
        inserted += [(ADD, row, anchor) for row in before if ready.sums[row] >= 0]
        inserted += [(COPY, row, anchor) for row in members]
        before = members
    inserted += [(ADD, row, end) for row in before if ready.sums[row] >= 0]
    ordered = InsertedOps.from_rows(inserted)
    rows = insert_ops(edit, step, offloaded, ready, ordered, watched, {})
    gradients, _ = host_gradients(edit, step, offloaded, ready, watched, ordered, rows, False)
    gradients[watched] = ready.watched
    return _Backward(ready, ordered, rows), gradients


def _moments(step: Step, trained: Trained) -> list[int]:
    """Return the number of moments that the optimizer keeps for each parameter."""
    _, at = moments_of_parameters(step, trained)
    counts, gradient = np.bincount(at, minlength=len(trained)), columns_of(step.parameters).gradient[trained]
    # A parameter without a gradient has no state yet; once it gets one, it has as much as the others.
    found: list[int] = np.where(gradient < 0, counts.max(), counts).tolist()
    return found


# -- ops -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _op_columns(
    layout: Layout, spec: UpdatersSpec, given: tuple[bool, ...], itemsize: tuple[int, ...], watched: int
) -> I64:
    """Return the columns of `_InsertedOps` but the last; cached because many candidates share them."""
    # With gradients on the host, that of parameter `watched` alone is on the device.
    active = [
        [i for i, group in enumerate(groups) if any(given[segment.parameter] for segment in group.segments)]
        for groups in layout.domains
    ]
    found: list[tuple[int, ...]] = []
    for action, domain, index in step_actions([len(each) for each in active], spec.buffers):
        number = active[domain][index]
        group = layout.domains[domain][number]
        if action in (OFFLOAD, RELOAD):
            for segment in (each for each in group.segments if given[each.parameter]):
                is_on_host = spec.bucket_bytes is not None and segment.parameter != watched
                what = _TO_SLOT if action == OFFLOAD and is_on_host else action
                for kind, n_bytes in _copies(what, segment, itemsize[segment.parameter], spec.share):
                    found.append((kind, domain, number, index, segment.parameter, n_bytes))
        else:
            found.append((action, domain, number, index, -1, _bytes(action, group)))
    return np.asarray(found, np.int64)


def _copies(action: int, segment: Segment, itemsize: int, share: float | None) -> list[tuple[int, int]]:
    """Return the ops that copy a segment to or from its updater, with their bytes."""
    if action != OFFLOAD or share is None:
        return [(action, segment.numel * itemsize)]
    count, _ = topk_layout(segment, itemsize, share)
    return [(_TOPK, segment.numel * itemsize), (OFFLOAD, count * itemsize), (_PLACES, count * 4)]


def _bytes(action: int, group: SubGroup) -> int:
    if action == UPDATE:  # reads and writes of state; gradients in, weights out
        return 8 * (group.numel + group.moments) + 2 * group.slot_bytes
    return 4 * ((action != WRITE_MOMENTS) * group.numel + (action != WRITE_WEIGHTS) * group.moments)


def _insert(edit: Edit, anchor: int, turned: I64) -> _InsertedOps:
    """Insert the ops before the op `anchor`."""
    *columns, n_bytes = turned.T
    action, domain, number, index, parameter = (column.astype(np.int32) for column in columns)
    rows = edit.add_kinds(
        [_OPS[kind] for kind in range(len(_OPS))],
        action,
        before=np.full(len(action), anchor, np.int32),
        phase=Phase.OPTIMIZER,
        # Top-k reads residual and gradient, writes the residual and reads it; a host copy reads and writes.
        traffic_bytes=np.where(action == _TOPK, 4, np.where(action == _TO_SLOT, 2, 1)) * n_bytes,
        stream=(action == RELOAD).astype(np.uint8),  # the copy stream orders it before later use
        prefetch=np.isin(action, (OFFLOAD, _PLACES)).astype(np.uint8),
    )
    return _InsertedOps(action, domain, number, index, parameter, n_bytes, rows)


# -- storages that they use ----------------------------------------------------------------------------------


def _uses_of_groups(edit: Edit, made: _InsertedOps, layout: Layout, spec: UpdatersSpec) -> None:
    """Add slots, buffers and SSD extents, and their uses."""
    groups = [group for offloaded in layout.domains for group in offloaded]
    n_slots = np.asarray([layout.slots(domain) for domain in range(spec.domains)])
    n_buffers = np.asarray([layout.buffers(domain, spec.buffers) for domain in range(spec.domains)])
    numel, of_moments = np.asarray([(each.numel, each.moments) for each in groups], np.int64).T
    slots = edit.add_persistent(np.full(n_slots.sum(), layout.slot_bytes), Kind.BUFFER, Tier.HOST)
    buffers = edit.add_persistent(np.full(n_buffers.sum(), 4 * layout.buffer_numel), Kind.BUFFER, Tier.HOST)
    weights = edit.add_persistent(4 * numel, Kind.PARAMETER, Tier.SSD)
    moments = edit.add_persistent(4 * of_moments, Kind.OPTIMIZER, Tier.SSD)
    for _ in range(1, spec.slots):
        edit.add_persistent(4 * (numel + of_moments), Kind.OPTIMIZER, Tier.SSD)
    # The updated sub-groups of a domain take its slots, and its buffers, in turn.
    slot = slots[(np.cumsum(n_slots) - n_slots)[made.domain] + made.index % SLOTS]
    buffer = buffers[(np.cumsum(n_buffers) - n_buffers)[made.domain] + made.index % spec.buffers]
    firsts = np.cumsum([0, *(len(offloaded) for offloaded in layout.domains)])
    at = firsts[made.domain] + made.number
    for kinds, storages, mutates in (
        ((READ,), weights[at], False),
        ((READ,), moments[at], False),
        ((READ, UPDATE), buffer, True),
        ((OFFLOAD, _PLACES, _TO_SLOT, UPDATE), slot, True),
        ((WRITE_WEIGHTS, WRITE_MOMENTS), buffer, False),
        ((WRITE_WEIGHTS,), weights[at], True),
        ((WRITE_MOMENTS,), moments[at], True),
        ((RELOAD,), slot, False),
    ):
        offloaded = np.isin(made.action, kinds)
        edit.add_uses(made.rows[offloaded], storages[offloaded], mode=mutates)


def _uses_of_parameters(edit: Edit, step: Step, made: _InsertedOps, trained: Trained, gradients: I32) -> None:
    columns = columns_of(step.parameters)
    up = made.action == RELOAD
    edit.add_uses(made.rows[up], writes=columns.storage[trained][made.parameter[up]].astype(np.int32))
    first = np.isin(made.action, (_TOPK,) if (made.action == _TOPK).any() else (OFFLOAD, _TO_SLOT))
    edit.add_uses(made.rows[first], gradients[made.parameter[first]])


def _uses_of_sent(edit: Edit, step: Step, made: _InsertedOps, trained: Trained) -> None:
    """Add the residuals, and the temporaries of top-k: values and indices, freed after their copies."""
    columns = columns_of(step.parameters)
    kept = edit.add_persistent(columns.n_bytes[trained], Kind.OPTIMIZER)
    largest, values, places = (np.flatnonzero(made.action == kind) for kind in (_TOPK, OFFLOAD, _PLACES))
    edit.add_uses(made.rows[largest], writes=kept[made.parameter[largest]])
    for copies in (values, places):
        temporary = edit.add_storages(made.n_bytes[copies], producer=made.rows[largest])
        edit.add_uses(made.rows[copies], temporary)
        edit.hold_through(temporary, made.rows[places])


def _free_gradients(edit: Edit, step: Step, made: _InsertedOps, gradients: I32) -> None:
    """Free each gradient before the first op that offloads nothing in the round of its last part (Rule 2)."""
    down = np.isin(made.action, _SENDS)
    others = np.flatnonzero(~down)
    last = np.full(len(gradients), -1)
    np.maximum.at(last, made.parameter[down], np.flatnonzero(down))
    offloaded = np.flatnonzero(last >= 0)
    sources = gradients[offloaded]
    following = made.rows[others[np.searchsorted(others, last[offloaded])]]
    recorded = sources < step.storages.n
    freed = ~recorded
    freed[recorded] = step.storages.held_until[sources[recorded]] != FOREVER  # DDP's buckets are not freed
    edit.storages.held_until[sources[freed & recorded]] = -1
    edit.release_before(sources[freed], following[freed])
