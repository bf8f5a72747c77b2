"""The pass of `offload.near_storage.update_workers`: state with updater processes, gradients to them, weights
from them, round by round.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.offload.near_storage.storage_domains import (
    DOWN,
    LATER,
    READ,
    SLOTS,
    UP,
    UPDATE,
    WRITE,
    Layout,
    Segment,
    SubGroup,
    divide,
    sent,
    turns,
)
from memtune.offload.optimizer import without_own_update
from memtune.program import FOREVER, I32, WRITES, Edit, Kind, Phase, Resource, Step, Tier, columns_of

_LARGEST, _PLACES = 6, 7
_OPS = {
    READ: ("updater_read_", Resource.SSD_READ),
    DOWN: ("copy_to_host_", Resource.DEVICE_TO_HOST),
    UPDATE: ("updater_update_", Resource.HOST_THREADS),
    WRITE: ("updater_write_", Resource.SSD_WRITE),
    LATER: ("updater_write_", Resource.SSD_WRITE),
    UP: ("copy_to_device_", Resource.HOST_TO_DEVICE),
    _LARGEST: ("largest_", Resource.COMPUTE),
    _PLACES: ("copy_to_host_", Resource.DEVICE_TO_HOST),
}
_SENDS = (DOWN, _LARGEST, _PLACES)
Trained = npt.NDArray[np.intp]


@dataclass(frozen=True)
class How:
    """The knobs of `offload.near_storage.update_workers.Updaters`."""

    domains: int
    sub_group_numel: int
    buffers: int
    share: float | None = None
    slots: int = 1
    """Places on SSD for each sub-group, which take turns."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """What each new op is."""

    what: I32
    domain: I32
    number: I32
    """Of the sub-group in its domain."""
    index: I32
    """Of the sub-group among those of its domain that are updated."""
    parameter: I32
    """-1 for an op of a whole sub-group."""
    n_bytes: npt.NDArray[np.int64]
    rows: I32


def optimizer_with_updaters(step: Step, how: How) -> Step:
    """`step` with its optimizer's state and update in processes beside it."""
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
        how.domains,
        how.sub_group_numel,
    )
    edit = Edit(step)
    anchor = int(without_own_update(edit, step)[0])
    edit.storages.bytes[step.storages.kind == Kind.OPTIMIZER] = 0  # the updaters'
    made = _insert(edit, anchor, _turns(layout, how, tuple(given.tolist()), tuple(itemsize.tolist())))
    _uses_of_groups(edit, made, layout, how)
    _uses_of_parameters(edit, step, made, trained)
    if how.share is not None:
        _uses_of_sent(edit, step, made, trained)
    _let_go(edit, step, made, trained)
    edit.hold_to_the_end_of_step(int(made.rows[-1]))
    return edit.done()


def _moments(step: Step, trained: Trained) -> list[int]:
    """Tensors as large as each parameter that the optimizer keeps."""
    columns = columns_of(step.parameters)
    sizes = columns.numel[trained] * columns.itemsize[trained]
    state = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER)
        & (step.storages.producer < 0)
        & np.isin(step.storages.owner, trained)
    )
    at = np.searchsorted(trained, step.storages.owner[state])
    counts = np.bincount(at[step.storages.bytes[state] == sizes[at]], minlength=len(trained))
    found: list[int] = np.where(columns.gradient[trained] < 0, counts.max(), counts).tolist()
    return found


# -- which ops -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _turns(
    layout: Layout, how: How, given: tuple[bool, ...], itemsize: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Columns of `_Rows` but the last, row by row; many candidates share them."""
    active = [
        [i for i, group in enumerate(groups) if any(given[segment.parameter] for segment in group.segments)]
        for groups in layout.domains
    ]
    found: list[tuple[int, ...]] = []
    for what, domain, index in turns([len(each) for each in active], how.buffers):
        number = active[domain][index]
        group = layout.domains[domain][number]
        if what in (DOWN, UP):
            for segment in (each for each in group.segments if given[each.parameter]):
                for kind, n_bytes in _copies(what, segment, itemsize[segment.parameter], how.share):
                    found.append((kind, domain, number, index, segment.parameter, n_bytes))
        else:
            found.append((what, domain, number, index, -1, _bytes(what, group)))
    return np.asarray(found, np.int64)


def _copies(what: int, segment: Segment, itemsize: int, share: float | None) -> list[tuple[int, int]]:
    """Ops that bring a segment down or up, with their bytes."""
    if what == UP or share is None:
        return [(what, segment.numel * itemsize)]
    count, _ = sent(segment, itemsize, share)
    return [(_LARGEST, segment.numel * itemsize), (DOWN, count * itemsize), (_PLACES, count * 4)]


def _bytes(what: int, group: SubGroup) -> int:
    if what == UPDATE:  # state there and back; gradients in, weights out
        return 8 * (group.numel + group.moments) + 2 * group.slot_bytes
    return 4 * ((what != LATER) * group.numel + (what != WRITE) * group.moments)


def _insert(edit: Edit, anchor: int, turned: npt.NDArray[np.int64]) -> _Rows:
    """The ops, before the op `anchor`."""
    *columns, n_bytes = turned.T
    what, domain, number, index, parameter = (column.astype(np.int32) for column in columns)
    names = np.asarray(
        [edit.name_id(f"memtune.{_OPS[kind][0]}.default") for kind in range(len(_OPS))], np.int32
    )
    rows = edit.add_ops(
        names[what],
        before=np.full(len(what), anchor, np.int32),
        phase=Phase.OPTIMIZER,
        resource=np.asarray([_OPS[kind][1] for kind in range(len(_OPS))], np.uint8)[what],
        traffic_bytes=np.where(
            what == _LARGEST, 4 * n_bytes, n_bytes
        ),  # kept and new gradients in, kept ones out, and looked at
        stream=(what == UP).astype(np.uint8),  # a copy back is complete in stream order
        prefetch=np.isin(what, (DOWN, _PLACES)).astype(np.uint8),
    )
    return _Rows(what, domain, number, index, parameter, n_bytes, rows)


# -- what they use -------------------------------------------------------------------------------------------


def _there(edit: Edit, sizes: list[int], tier: Tier, kind: Kind) -> I32:
    nowhere, forever = np.full(len(sizes), -1, np.int32), np.full(len(sizes), FOREVER, np.int32)
    return edit.add_storages(
        np.asarray(sizes, np.int64), producer=nowhere, tier=tier, kind=kind, held_until=forever
    )


def _uses_of_groups(edit: Edit, made: _Rows, layout: Layout, how: How) -> None:
    """Slots, buffers and what is on SSD."""
    groups = [group for mine in layout.domains for group in mine]
    n_slots = np.asarray([layout.slots(domain) for domain in range(how.domains)])
    n_buffers = np.asarray([layout.buffers(domain, how.buffers) for domain in range(how.domains)])
    slots = _there(edit, [layout.slot_bytes] * int(n_slots.sum()), Tier.HOST, Kind.BUFFER)
    buffers = _there(edit, [4 * layout.buffer_numel] * int(n_buffers.sum()), Tier.HOST, Kind.BUFFER)
    weights = _there(edit, [4 * each.numel for each in groups], Tier.SSD, Kind.PARAMETER)
    moments = _there(edit, [4 * each.moments for each in groups], Tier.SSD, Kind.OPTIMIZER)
    for _ in range(1, how.slots):
        _there(edit, [4 * (each.numel + each.moments) for each in groups], Tier.SSD, Kind.OPTIMIZER)
    slot = slots[(np.cumsum(n_slots) - n_slots)[made.domain] + made.index % SLOTS]
    buffer = buffers[(np.cumsum(n_buffers) - n_buffers)[made.domain] + made.index % how.buffers]
    firsts = np.cumsum([0, *(len(mine) for mine in layout.domains)])
    at = firsts[made.domain] + made.number
    for kinds, storages, mutates in (
        ((READ,), weights[at], False),
        ((READ,), moments[at], False),
        ((READ, UPDATE), buffer, True),
        ((DOWN, _PLACES, UPDATE), slot, True),
        ((WRITE, LATER), buffer, False),
        ((WRITE,), weights[at], True),
        ((LATER,), moments[at], True),
        ((UP,), slot, False),
    ):
        mine = np.isin(made.what, kinds)
        edit.add_uses(made.rows[mine], storages[mine], mode=mutates)


def _uses_of_parameters(edit: Edit, step: Step, made: _Rows, trained: Trained) -> None:
    columns = columns_of(step.parameters)
    up = made.what == UP
    edit.add_uses(made.rows[up], columns.storage[trained][made.parameter[up]].astype(np.int32), mode=WRITES)
    first = made.what == (_LARGEST if (made.what == _LARGEST).any() else DOWN)
    edit.add_uses(made.rows[first], columns.gradient[trained][made.parameter[first]].astype(np.int32))


def _uses_of_sent(edit: Edit, step: Step, made: _Rows, trained: Trained) -> None:
    """What has not been sent stays; what is sent is made for it, values and places, and let go when it is
    down.
    """
    columns = columns_of(step.parameters)
    kept = _there(
        edit, (columns.numel[trained] * columns.itemsize[trained]).tolist(), Tier.DEVICE, Kind.OPTIMIZER
    )
    largest, values, places = (np.flatnonzero(made.what == kind) for kind in (_LARGEST, DOWN, _PLACES))
    edit.add_uses(made.rows[largest], kept[made.parameter[largest]], mode=WRITES)
    for copies in (values, places):
        temporary = edit.add_storages(made.n_bytes[copies], producer=made.rows[largest])
        edit.add_uses(made.rows[copies], temporary)
        edit.hold_through(temporary, made.rows[places])


def _let_go(edit: Edit, step: Step, made: _Rows, trained: Trained) -> None:
    """Rule 2: a gradient goes before the first op that brings nothing down in its last part's round."""
    down = np.isin(made.what, _SENDS)
    others = np.flatnonzero(~down)
    last = np.full(len(trained), -1)
    np.maximum.at(last, made.parameter[down], np.flatnonzero(down))
    mine = np.flatnonzero(last >= 0)
    gradients = columns_of(step.parameters).gradient[trained][mine]
    following = made.rows[others[np.searchsorted(others, last[mine])]]
    freed = step.storages.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.storages.held_until[gradients[freed]] = -1
    edit.let_go_before(gradients[freed], following[freed])
