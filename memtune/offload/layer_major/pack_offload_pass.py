"""Weights and gradients of blocks under `offload.layer_major.layer_major_pass`, as
`offload.layer_major.pack_offloader` treats them (Rules 1 to 3 and 6 there).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from memtune.offload.core import PendingUpdates, waiting_room
from memtune.offload.gradients import adding
from memtune.offload.layer_major.packs import Span
from memtune.offload.parameters import native_update_bytes, whole_state
from memtune.program import (
    FOREVER,
    I32,
    Kind,
    NewOp,
    Phase,
    Replay,
    Resource,
    RowIndex,
    RowMask,
    Step,
    Tier,
    columns_of,
    raw_gradients,
)

_ALLOCATE = {
    phase: NewOp("memtune.allocate", phase, Resource.NOTHING) for phase in (Phase.FORWARD, Phase.BACKWARD)
}
_IN = {
    phase: NewOp("memtune.copy_to_device_.default", phase, Resource.HOST_TO_DEVICE, stream=1)
    for phase in _ALLOCATE
}
_AHEAD = {
    phase: NewOp("memtune.copy_to_device_.default", phase, Resource.HOST_TO_DEVICE, prefetch=1)
    for phase in _ALLOCATE
}
_DOWN = NewOp("memtune.to_host.default", Phase.BACKWARD, Resource.DEVICE_TO_HOST, prefetch=1)
_ADD = NewOp("aten.add_.Tensor", Phase.BACKWARD, Resource.HOST_THREADS)
_ADD_HERE = NewOp("aten.add_.Tensor", Phase.BACKWARD, Resource.COMPUTE)
_UPDATE = NewOp("memtune.host_update_.default", Phase.BOUNDARY, Resource.HOST_THREADS)
_UPDATE_LATE = NewOp("memtune.host_update_.default", Phase.PROLOGUE, Resource.HOST_THREADS)


@functools.lru_cache(maxsize=8)
def parameters_by_block(step: Step) -> tuple[tuple[int, ...], ...]:
    """Rows of each block's parameters."""
    block = columns_of(step.parameters).block
    return tuple(tuple(np.flatnonzero(block == i).tolist()) for i in range(len(step.blocks)))


@functools.lru_cache(maxsize=8)
def _state_of(step: Step) -> dict[int, list[int]]:
    """The optimizer's state of each parameter, but for counters."""
    found: dict[int, list[int]] = {}
    state = whole_state(step)
    for storage, owner in zip(state.tolist(), step.storages.owner[state].tolist(), strict=True):
        found.setdefault(owner, []).append(storage)
    return found


class Weights:
    """The blocks' parameters on the host, and on the device from `begin` to `end`."""

    def __init__(self, new: Replay, step: Step) -> None:
        self._new, self._columns, self._by_block = new, columns_of(step.parameters), parameters_by_block(step)
        self._n_bytes = self._columns.numel * self._columns.itemsize
        mine = np.asarray([row for block in self._by_block for row in block], np.int32)
        self.hosts = np.full(len(self._columns.numel), -1, np.int32)
        self.hosts[mine] = new.add_storages(self._n_bytes[mine], Tier.HOST, Kind.PARAMETER, -1, mine, FOREVER)
        new.empty(self._columns.storage[mine])
        self._there: dict[int, list[int]] = {}

    def begin(self, pack: Span, ahead: Span | None, phase: Phase) -> None:
        """Rule 1."""
        for blocks, copy in ((pack, _IN[phase]), (ahead or (0, 0), _AHEAD[phase])):
            for block in range(*blocks):
                if block not in self._there:
                    self._there[block] = [self._comes(row, copy, phase) for row in self._by_block[block]]

    def _comes(self, row: int, copy: NewOp, phase: Phase) -> int:
        new, n_bytes = self._new, int(self._n_bytes[row])
        block = int(self._columns.block[row])
        number = new.new_op(
            _ALLOCATE[phase], makes=(n_bytes, Tier.DEVICE, Kind.COMMUNICATION, row), call=block
        )
        new.new_op(copy, n_bytes, reads=(int(self.hosts[row]),), writes=(number,), call=block)
        new.here[self._columns.storage[row]] = number
        return number

    def end(self, pack: Span) -> None:
        """Rule 1."""
        for block in range(*pack):
            self._new.hold(self._there.pop(block), self._new.n_ops - 1)


class Gradients:
    """Gradients of all parameters; those of blocks are sent down when their pack's last micro-batch makes
    them.
    """

    def __init__(self, new: Replay, step: Step, ranks: int, late: Iterable[int] = ()) -> None:
        columns, count = columns_of(step.parameters), len(step.parameters)
        self._new, self._step, self._columns = new, step, columns
        self._average = (
            NewOp("memtune.all_reduce_.default", Phase.BACKWARD, Resource.INTRA_LINK, group=ranks)
            if ranks > 1
            else None
        )
        self._raw, gradient = raw_gradients(step), columns.gradient
        made = np.flatnonzero(self._raw >= 0)
        summed = made[step.storages.producer[gradient[made]] < 0]
        self.adds = np.full(count, -1, np.int32)
        """(parameters,) the op that adds to the sum of earlier micro-batches, -1 for none."""
        self.adds[summed] = adding(step)[gradient[summed]]
        self._lands = np.full(count, -1, np.int32)
        self._lands[made] = np.where(
            self.adds[made] >= 0, self.adds[made], step.storages.grad_ready_after[self._raw[made]]
        )
        new.empty(gradient[summed])
        rank = np.full(step.storages.n, step.storages.n, np.int64)
        rank[step.grad_order] = np.arange(len(step.grad_order))
        self._order = made[np.lexsort((rank[gradient[made]], self._lands[made]))]
        self.storages: RowMask = np.zeros(step.storages.n, bool)
        """(m,) gradients and what is added to them."""
        self.storages[self._raw[made]] = self.storages[gradient[made]] = True
        self._sum = np.full(count, -1, np.int32)
        self._down = np.full(count, -1, np.int32)
        self._on_the_way = -1
        self._arriving = -1
        self._native_bytes, self._state_of = native_update_bytes(step), _state_of(step)
        self._waiting: PendingUpdates[I32] = PendingUpdates(waiting_room(step))
        self._late = np.isin(columns.block, list(late))
        self.is_outside = columns.block < 0
        """(parameters,) True where it belongs to no block."""

    def landing_in(self, rows: RowIndex) -> list[int]:
        """Parameters whose gradients land in `rows`, in that order."""
        inside = np.zeros(self._step.ops.n + 1, bool)
        inside[rows] = True
        found: list[int] = self._order[inside[self._lands[self._order]]].tolist()
        return found

    def row_of(self, parameter: int) -> int:
        """The op after which its gradient has landed."""
        return int(self._lands[parameter])

    def raw(self, parameter: int) -> int:
        """The storage that a micro-batch's gradient is made in."""
        return int(self._raw[parameter])

    def begins(self, parameter: int, number: int) -> None:
        """The first micro-batch's gradient becomes the sum."""
        self._sum[parameter] = number
        self._new.remake(number, Kind.GRADIENT)
        gradient = self._columns.gradient[parameter]
        if self._step.storages.producer[gradient] < 0:
            self._new.here[gradient] = number

    def adds_part(self, parameter: int, number: int) -> None:
        """A part of a tied weight's gradient becomes the sum, or is added to it."""
        if self._sum[parameter] < 0:
            self.begins(parameter, number)
            return
        n_bytes = int(self._step.storages.bytes[self._raw[parameter]])
        self._new.new_op(_ADD_HERE, 3 * n_bytes, reads=(number,), writes=(int(self._sum[parameter]),))

    def leaves(self, parameter: int) -> None:
        """Rules 2 and 4."""
        n_bytes, number = int(self._step.storages.bytes[self._raw[parameter]]), int(self._sum[parameter])
        if self._average is not None:
            self._new.new_op(self._average, n_bytes, writes=(number,))
        self.arrive()
        block = int(self._columns.block[parameter])
        host = self._new.new_op(
            _DOWN, n_bytes, reads=(number,), makes=(n_bytes, Tier.HOST, Kind.GRADIENT, parameter), call=block
        )
        self._on_the_way, self._arriving = parameter, host

    def arrive(self) -> None:
        """What is on its way has arrived, and joins the sum of the groups before it."""
        if self._on_the_way < 0:
            return
        row, self._on_the_way = self._on_the_way, -1
        self._new.hold(self._sum[row], self._new.n_ops - 1)
        if self._down[row] < 0:
            self._down[row] = self._arriving
        else:
            n_bytes = int(self._step.storages.bytes[self._raw[row]])
            self._new.new_op(_ADD, 3 * n_bytes, reads=(self._arriving,), writes=(int(self._down[row]),))

    def update_late(self, hosts: I32) -> None:
        """Rule 6: what the last step has left."""
        if not self._late.any():
            return
        for block in parameters_by_block(self._step):
            rows = np.asarray([row for row in block if self._late[row] and self._raw[row] >= 0], np.int32)
            gradients = self._new.add_storages(
                self._step.storages.bytes[self._raw[rows]], Tier.HOST, Kind.GRADIENT, -1, rows, -1
            )
            for row, gradient in zip(rows.tolist(), gradients.tolist(), strict=True):
                used = (
                    gradients.tolist() if row == rows[-1] else [gradient]
                )  # those of a block are let go together
                self._update(row, used, hosts, _UPDATE_LATE)

    def _update(self, row: int, gradients: Sequence[int], hosts: I32, op: NewOp) -> None:
        state = self._new.here[self._state_of.get(row, [])].tolist()
        self._new.new_op(op, int(self._native_bytes[row]), reads=gradients, writes=(int(hosts[row]), *state))

    def update(self, pack: Span, hosts: I32) -> None:
        """Rules 3 and 6."""
        rows = sorted(
            row
            for block in range(*pack)
            for row in parameters_by_block(self._step)[block]
            if self._down[row] >= 0
        )
        self._new.hold([int(self._down[row]) for row in rows if self._late[row]], FOREVER)
        rows = [row for row in rows if not self._late[row]]
        n_bytes = sum(int(self._step.storages.bytes[self._raw[row]]) for row in rows)
        self._let_go(self._waiting.let_go(n_bytes), self._new.n_ops - 1)
        for row in rows:
            self._update(row, (int(self._down[row]),), hosts, _UPDATE)
        self._waiting.put(self._down[rows], n_bytes)

    def _let_go(self, turns: Iterable[I32], op: int) -> None:
        """With op `op` done, the gradients of `turns` have been used up."""
        for each in turns:
            self._new.hold(each, op)

    def all_used(self, op: int) -> None:
        """All updates of blocks are over when op `op` comes."""
        self._let_go(self._waiting.rest(), op)

    def average_outside(self) -> None:
        """Rule 4, of what is in no block."""
        if self._average is None:
            return
        for row in np.flatnonzero((self._sum >= 0) & (self._columns.block < 0)).tolist():
            self._new.new_op(
                self._average, int(self._step.storages.bytes[self._raw[row]]), writes=(int(self._sum[row]),)
            )

    def put_into(self, made: I32) -> None:
        """What the optimizer's ops read in the place of what one micro-batch made."""
        known = self._sum >= 0
        made[self._columns.gradient[known]] = self._sum[known]
        made[self._raw[known]] = self._sum[known]

    def hold_outside(self, rows: RowIndex, positions: I32) -> None:
        """Those of no block stay to where the optimizer's rows let go of them."""
        mine = np.flatnonzero((self._sum >= 0) & (self._columns.block < 0))
        held = self._step.storages.held_until[self._columns.gradient[mine]]
        until = positions[np.maximum(np.searchsorted(rows, held, side="right") - 1, 0)]
        self._new.hold(self._sum[mine], np.where(held == FOREVER, FOREVER, until))

    def columns(self) -> tuple[I32, I32]:
        """(parameters,) each one's gradient, -1 for those that are used by now; and these in the order of
        landing.
        """
        outside = self._columns.block < 0
        gradient = np.where(outside, self._sum, -1).astype(np.int32)
        landing = np.asarray([gradient[row] for row in self._order if gradient[row] >= 0], np.int32)
        return gradient, landing


def first_adds(gradients: Gradients, index: int, group: range) -> I32:
    """Ops that add to sums of earlier micro-batches, which are not there yet in micro-batch `index` of
    `group`.
    """
    first = np.where(gradients.is_outside, index == 0, index == group[0])
    found: I32 = gradients.adds[first & (gradients.adds >= 0)]
    return found
