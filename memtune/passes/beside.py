"""The pass of `runtime.beside_store`: gradients leave and blocks are updated beside other blocks' compute, or the next step."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.early_updates import Waiting, room_bytes
from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.program import I32, I64, Phase, Resource, Step
from memtune.residency import Units


class Gone(NamedTuple):
    """When the device lets go of each landing's gradient, one row each: with a landing, or when a moment begins; else -1."""

    row: I32
    moment: I32

    def added_in(self, summed: npt.NDArray[np.bool_], moments: int) -> tuple[Units, ...]:
        """(moments,) the rows that are added to their sums when each moment begins."""
        found: list[list[int]] = [[] for _ in range(moments)]
        for row in np.flatnonzero(summed & (self.moment >= 0)).tolist():
            found[self.moment[row]].append(row)
        return tuple(map(tuple, found))


def one_at_a_time(moment: I32) -> Gone:
    """With the next landing of the moment, or the next moment."""
    row = np.arange(1, len(moment) + 1, dtype=np.int32)
    last = np.append(moment[1:] != moment[:-1], True)[: len(moment)]
    return Gone(np.where(last, -1, row).astype(np.int32), np.where(last, moment + 1, -1).astype(np.int32))


def of_a_block_at_once(moment: I32, n_bytes: I64, end: int) -> Gone:
    """Rule 1 of `runtime.beside_store`.

    Args:
        moment: (landings,) ascending.
        n_bytes: (landings,)
        end: The moment in which backward ends.
    """
    return _of_a_block_at_once(moment.tobytes(), n_bytes.tobytes(), end)  # equal for most candidates of a search


@functools.lru_cache(maxsize=32)
def _of_a_block_at_once(moments: bytes, sizes_bytes: bytes, end: int) -> Gone:
    moment, n_bytes = np.frombuffer(moments, np.int32), np.frombuffer(sizes_bytes, np.int64)
    row, gone = (np.full(len(moment), -1, np.int32) for _ in range(2))
    if not len(moment):
        return Gone(row, gone)
    landed = np.bincount(moment, minlength=end + 1)
    room = int(np.bincount(moment, n_bytes).max())
    waiting, begun, sizes = Waiting[int](room), int(moment[0]), n_bytes.tolist()

    def begin(until: int) -> None:
        for at in range(begun + 1, until + 1):
            for each in waiting.rest(int(landed[at - 1]) if at < end else 0):
                gone[each] = at

    for each, at in enumerate(moment.tolist()):
        begin(at)
        begun = max(begun, at)
        for before in waiting.let_go(sizes[each]):
            row[before] = each
        waiting.put(each, sizes[each])
    begin(end)
    return Gone(row, gone)


class Beside(NamedTuple):
    """When blocks are updated whose gradients leave beside other blocks' compute."""

    late: frozenset[int] = frozenset()
    """Beside the next step's forward; the others beside backward."""
    at_end: bool = False
    """All in the optimizer's step."""


def blocks_in_turn(blocks: int, beside: Beside | None) -> tuple[Units, ...]:
    """(2 · blocks + 1,) the blocks that are updated when each moment begins.

    Args:
        blocks: How many there are.
        beside: Says when; None: each is updated when the next moment begins.
    """
    end, lag = 2 * blocks, 1 if beside is None else 2
    found: list[Units] = [()] * (end + 1)
    for moment in range(blocks + lag, end + 1):
        found[moment] = (end - 1 - (moment - lag),)
    if beside is not None:
        found[end] += (0,)
        found = [tuple(each for each in now if each not in beside.late and not beside.at_end) for now in found]
    return tuple(found)


def waiting_room(step: Step, held: npt.NDArray[np.bool_] | None = None) -> int:
    """Bytes of gradients that wait for updates beside backward, of float32 masters of all that is trained.

    Args:
        step: Of a rank.
        held: (parameters,) those that the rank has; None: all.
    """
    columns = columns_of(step.parameters)
    mine = columns.trainable if held is None else columns.trainable & held
    return room_bytes((4 * columns.numel[mine]).tolist(), columns.block[mine].tolist())


def hold_for_updates(edit: Edit, step: Step, gradients: I32, n_bytes: I64, block: I32, update: I32, turns: list[int]) -> None:
    """Rule 2: gradients wait on the host until a later block is updated, or the optimizer's step has all on the host.

    Args:
        edit: Of `step`.
        step: Before the edit.
        gradients: (landings,) on the host.
        n_bytes: (landings,)
        block: (landings,)
        update: (blocks,) the first op of each block's update, -1 for late ones.
        turns: Blocks in the order in which they are updated.
    """
    waiting, until = Waiting[int](waiting_room(step)), {}
    sizes = np.bincount(block, n_bytes, len(update)).astype(np.int64).tolist()
    for each in turns:
        for before in waiting.let_go(sizes[each]):
            until[before] = each
        waiting.put(each, sizes[each])
    by_block = np.full(len(update), -1, np.int32)
    by_block[list(until)] = update[list(until.values())]
    gone, there = by_block[block], update[block] >= 0
    edit.let_go_before(gradients[gone >= 0], gone[gone >= 0])
    stays = gradients[there & (gone < 0)]
    optimizer = int((step.op_phase == Phase.OPTIMIZER).argmax())
    edit.hold_through(stays, np.full(len(stays), optimizer, np.int32))  # whose ops another pass takes away


def update_outside_of_backward(
    edit: Edit, step: Step, mine: I32, hosts: I32, gradients: I32, state: I32, traffic_bytes: I64, *, at_end: bool
) -> None:
    """Rule 3: what the last step has left is updated when this one begins, beside its forward; or `at_end` all in this one's end.

    Args:
        edit: Of `step`.
        step: Before the edit.
        mine: Parameters of blocks, in the order of use.
        hosts: (mine,) their weights on the host.
        gradients: (mine,) there, the last step's or `at_end` this one's.
        state: Moments of any parameters.
        traffic_bytes: (parameters,) of an update.
        at_end: In the optimizer's step.
    """
    block, count = columns_of(step.parameters).block[mine], len(mine)
    place = int(np.flatnonzero(step.op_phase == Phase.OPTIMIZER)[-1]) if at_end else 0  # an op that another pass takes away
    ops = edit.add_ops(
        "memtune.host_update_.default", before=np.full(count, place, np.int32),
        phase=Phase.OPTIMIZER if at_end else Phase.PROLOGUE, resource=Resource.HOST_THREADS, traffic_bytes=traffic_bytes[mine],
    )  # fmt: skip
    edit.add_uses(ops, hosts, mutates=True)
    op_of = np.full(len(step.parameters), -1, np.int32)
    op_of[mine] = ops
    state = state[op_of[step.owner[state]] >= 0]
    edit.add_uses(op_of[step.owner[state]], state, mutates=True)
    edit.add_uses(ops, gradients)
    if at_end:
        edit.hold_through(gradients, np.full(count, place, np.int32))
        return
    last = np.append(block[1:] != block[:-1], True)[:count]
    of_block = ops[np.flatnonzero(last)][np.cumsum(last) - last]  # uses them to its end
    edit.add_uses(of_block[~last], gradients[~last])
