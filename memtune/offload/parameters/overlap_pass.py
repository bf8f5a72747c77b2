"""Pass of `offload.parameters.overlapped_offloader`: D2H and updates overlap with other blocks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.offload.core import PendingUpdates, waiting_room
from memtune.program import I32, I64, WRITES, Edit, Phase, Resource, Step, Units, columns_of


class FreedAt(NamedTuple):
    """Times at which gradients are freed: when another one is ready, or at a moment; else -1."""

    row: I32
    moment: I32

    def added_in(self, summed: npt.NDArray[np.bool_], moments: int) -> tuple[Units, ...]:
        """Return (moments,) the rows that are added to their sums when each moment begins."""
        found: list[list[int]] = [[] for _ in range(moments)]
        for row in np.flatnonzero(summed & (self.moment >= 0)).tolist():
            found[self.moment[row]].append(row)
        return tuple(map(tuple, found))


def freed_by_next_ready(moment: I32) -> FreedAt:
    """Free each gradient when the next one of its moment is ready, or at the next moment."""
    row = np.arange(1, len(moment) + 1, dtype=np.int32)
    last = np.append(moment[1:] != moment[:-1], True)[: len(moment)]
    return FreedAt(np.where(last, -1, row).astype(np.int32), np.where(last, moment + 1, -1).astype(np.int32))


def of_a_block_at_once(moment: I32, n_bytes: I64, end: int) -> FreedAt:
    """Free gradients so that a block's bytes may be in D2H copies at once.

    Those of a block have all arrived when the moment after its own ends, or backward does.

    Args:
        moment: (gradients,) ascending.
        n_bytes: (gradients,)
        end: The moment in which backward ends.
    """
    # Bytes, because arrays are no cache keys; most candidates of a search have equal ones.
    return _of_a_block_at_once(moment.tobytes(), n_bytes.tobytes(), end)


@functools.lru_cache(maxsize=32)
def _of_a_block_at_once(moments: bytes, sizes_bytes: bytes, end: int) -> FreedAt:
    moment, n_bytes = np.frombuffer(moments, np.int32), np.frombuffer(sizes_bytes, np.int64)
    row, gone = (np.full(len(moment), -1, np.int32) for _ in range(2))
    if not len(moment):
        return FreedAt(row, gone)
    n_ready = np.bincount(moment, minlength=end + 1)
    room = int(np.bincount(moment, n_bytes).max())
    waiting, begun, sizes = PendingUpdates[int](room), int(moment[0]), n_bytes.tolist()

    def begin(until: int) -> None:
        for at in range(begun + 1, until + 1):
            for each in waiting.drain(int(n_ready[at - 1]) if at < end else 0):
                gone[each] = at

    for each, at in enumerate(moment.tolist()):
        begin(at)
        begun = max(begun, at)
        for before in waiting.make_room(sizes[each]):
            row[before] = each
        waiting.put(each, sizes[each])
    begin(end)
    return FreedAt(row, gone)


class Overlap(NamedTuple):
    """Time of the updates of blocks whose D2H copies overlap with other blocks' compute."""

    deferred: frozenset[int] = frozenset()
    """Blocks whose updates overlap with the next step's forward; the others' overlap with backward."""
    at_end: bool = False
    """All updates are in the optimizer's step."""


def updated_blocks(blocks: int, overlap: Overlap | None) -> tuple[Units, ...]:
    """Return (2 · blocks + 1,) the blocks that are updated when each moment begins.

    Args:
        blocks: Number of blocks.
        overlap: Overlap of the updates; None: each block is updated when the next moment begins.
    """
    end, lag = 2 * blocks, 1 if overlap is None else 2
    found: list[Units] = [()] * (end + 1)
    for moment in range(blocks + lag, end + 1):
        found[moment] = (end - 1 - (moment - lag),)
    if overlap is not None:
        found[end] += (0,)
        found = [
            tuple(each for each in now if each not in overlap.deferred and not overlap.at_end)
            for now in found
        ]
    return tuple(found)


def hold_for_updates(
    edit: Edit, step: Step, gradients: I32, n_bytes: I64, block: I32, update: I32, order: list[int]
) -> None:
    """Hold host gradients until a later block's update, or until the optimizer's step has them all.

    This is the bound of `PendingUpdates`, which the mechanism uses as well.

    Args:
        edit: Of `step`.
        step: Before the edit.
        gradients: (gradients,) host storages.
        n_bytes: (gradients,)
        block: (gradients,)
        update: (blocks,) the first op of each block's update, -1 for deferred ones.
        order: Blocks in the order of their updates.
    """
    waiting, until = PendingUpdates[int](waiting_room(step)), {}
    sizes = np.bincount(block, n_bytes, len(update)).astype(np.int64).tolist()
    for each in order:
        for before in waiting.make_room(sizes[each]):
            until[before] = each
        waiting.put(each, sizes[each])
    by_block = np.full(len(update), -1, np.int32)
    by_block[list(until)] = update[list(until.values())]
    gone, there = by_block[block], update[block] >= 0
    edit.release_before(gradients[gone >= 0], gone[gone >= 0])
    resident = gradients[there & (gone < 0)]
    optimizer = int((step.ops.phase == Phase.OPTIMIZER).argmax())
    # The optimizer's own first op, which `optimizer_on_host` drops later; until then it marks the place.
    edit.hold_through(resident, np.full(len(resident), optimizer, np.int32))


def update_outside_of_backward(
    edit: Edit,
    step: Step,
    mine: I32,
    hosts: I32,
    gradients: I32,
    state: I32,
    traffic_bytes: I64,
    *,
    at_end: bool,
) -> None:
    """Insert deferred updates at the start of the step, or with `at_end` all updates at its end.

    Args:
        edit: Of `step`.
        step: Before the edit.
        mine: Parameters of blocks, in the order of use.
        hosts: (mine,) their weights on the host.
        gradients: (mine,) host gradients of the last step, or `at_end` of this one.
        state: Moments of any parameters.
        traffic_bytes: (parameters,) of an update.
        at_end: In the optimizer's step.
    """
    block, count = columns_of(step.parameters).block[mine], len(mine)
    # The optimizer's own last op marks the place, although `optimizer_on_host` drops it later.
    place = int(np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[-1]) if at_end else 0
    ops = edit.add_ops(
        "memtune.host_update_.default",
        before=np.full(count, place, np.int32),
        phase=Phase.OPTIMIZER if at_end else Phase.PROLOGUE,
        resource=Resource.HOST_THREADS,
        traffic_bytes=traffic_bytes[mine],
    )
    edit.add_uses(ops, hosts, mode=WRITES)
    op_of = np.full(len(step.parameters), -1, np.int32)
    op_of[mine] = ops
    state = state[op_of[step.storages.owner[state]] >= 0]
    edit.add_uses(op_of[step.storages.owner[state]], state, mode=WRITES)
    edit.add_uses(ops, gradients)
    if at_end:
        edit.hold_through(gradients, np.full(count, place, np.int32))
        return
    last = np.append(block[1:] != block[:-1], True)[:count]
    # A block's gradients are freed together, after its last update.
    of_block = ops[np.flatnonzero(last)][np.cumsum(last) - last]
    edit.add_uses(of_block[~last], gradients[~last])
