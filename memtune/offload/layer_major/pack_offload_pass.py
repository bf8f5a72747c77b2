"""Weights and gradients of blocks under `offload.layer_major.layer_major_pass`; predicts
`offload.layer_major.pack_offloader`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from memtune.offload.core import PendingUpdates, waiting_room
from memtune.offload.layer_major.packs import Span
from memtune.offload.parameters import native_update_bytes
from memtune.program import (
    FOREVER,
    I32,
    Kind,
    NewOp,
    Phase,
    Resource,
    RowIndex,
    RowMask,
    RowReplay,
    Step,
    Tier,
    adding_ops,
    columns_of,
    optimizer_moments,
    raw_gradients,
)

_ALLOCATE = {
    phase: NewOp("memtune.allocate", phase, Resource.NOTHING) for phase in (Phase.FORWARD, Phase.BACKWARD)
}
_COPY_IN = {
    phase: NewOp("memtune.copy_to_device_.default", phase, Resource.HOST_TO_DEVICE, stream=1)
    for phase in _ALLOCATE
}
_PREFETCH = {
    phase: NewOp("memtune.copy_to_device_.default", phase, Resource.HOST_TO_DEVICE, prefetch=1)
    for phase in _ALLOCATE
}
_OFFLOAD = NewOp("memtune.to_host.default", Phase.BACKWARD, Resource.DEVICE_TO_HOST, prefetch=1)
_BUCKET = NewOp("aten.new_empty.default", Phase.BACKWARD, Resource.NOTHING)
_COPY = NewOp("aten.copy_.default", Phase.BACKWARD, Resource.COMPUTE)
_ADD = NewOp("aten.add_.Tensor", Phase.BACKWARD, Resource.HOST_THREADS)
_ADD_HERE = NewOp("aten.add_.Tensor", Phase.BACKWARD, Resource.COMPUTE)
_UPDATE = NewOp("memtune.host_update_.default", Phase.BOUNDARY, Resource.HOST_THREADS)
_UPDATE_DEFERRED = NewOp("memtune.host_update_.default", Phase.PROLOGUE, Resource.HOST_THREADS)


@functools.lru_cache(maxsize=8)
def parameters_by_block(step: Step) -> tuple[tuple[int, ...], ...]:
    """Return the parameter rows of each block."""
    block = columns_of(step.parameters).block
    return tuple(tuple(np.flatnonzero(block == i).tolist()) for i in range(len(step.blocks)))


@functools.lru_cache(maxsize=8)
def _state_of(step: Step) -> dict[int, list[int]]:
    """Return the storages of each parameter's optimizer state, without step counters."""
    found: dict[int, list[int]] = {}
    state = optimizer_moments(step)
    for storage, owner in zip(state.tolist(), step.storages.owner[state].tolist(), strict=True):
        found.setdefault(owner, []).append(storage)
    return found


class Weights:
    """The blocks' parameters: on the host, and resident from `begin` to `end` of a pack."""

    def __init__(self, new: RowReplay, step: Step) -> None:
        self._new, self._columns, self._by_block = new, columns_of(step.parameters), parameters_by_block(step)
        self._n_bytes = self._columns.n_bytes
        parameters = np.asarray([row for block in self._by_block for row in block], np.int32)
        self.hosts = np.full(len(self._columns.numel), -1, np.int32)
        self.hosts[parameters] = new.add_storages(
            self._n_bytes[parameters], Tier.HOST, Kind.PARAMETER, -1, parameters, FOREVER
        )
        # The step's own weights keep their numbers, without bytes: loads add a storage for each time of
        # residency.
        new.empty_initial(self._columns.storage[parameters])
        self._resident: dict[int, I32] = {}

    def begin(self, pack: Span, following: Span | None, phase: Phase) -> None:
        """Load the blocks of `pack` that are not resident, and prefetch those of `following`."""
        for blocks, copy in ((pack, _COPY_IN[phase]), (following or (0, 0), _PREFETCH[phase])):
            for block in range(*blocks):
                if block not in self._resident:
                    self._resident[block] = self._load(block, copy, phase)

    def _load(self, block: int, copy: NewOp, phase: Phase) -> I32:
        """Add an allocation and a copy of each parameter of `block`; return their storages."""
        rows = np.asarray(self._by_block[block], np.int32)
        numbers = self._new.loads(
            _ALLOCATE[phase], copy, self.hosts[rows], self._n_bytes[rows], rows, call=block
        )
        # Rows that are replayed from here on read this load.
        self._new.initial_number[self._columns.storage[rows]] = numbers
        return numbers

    def end(self, pack: Span) -> None:
        """Free a pack."""
        for block in range(*pack):
            # Through the last op so far: the pack's own ops and copies.
            self._new.hold(self._resident.pop(block), self._new.n_ops - 1)


class Gradients:
    """Gradients of all parameters; blocks' gradients are offloaded in their pack's last micro-batch."""

    def __init__(self, new: RowReplay, step: Step, ranks: int, deferred: Iterable[int] = ()) -> None:
        columns, count = columns_of(step.parameters), len(step.parameters)
        self._new, self._step, self._columns = new, step, columns
        self._average = (
            NewOp("memtune.all_reduce_.default", Phase.BACKWARD, Resource.INTRA_LINK, group=ranks)
            if ranks > 1
            else None
        )
        self._raw, gradient = raw_gradients(step), columns.gradient
        made = np.flatnonzero(self._raw >= 0)
        # The input is a later micro-batch, which adds to sums; the first one makes them instead
        # (`skipped_adds`).
        summed = made[step.storages.producer[gradient[made]] < 0]
        self.adds = np.full(count, -1, np.int32)
        """(parameters,) The op that adds to the sum of earlier micro-batches, -1 for none."""
        self.adds[summed] = adding_ops(step)[gradient[summed]]
        self._ready_after = np.full(count, -1, np.int32)
        self._ready_after[made] = np.where(
            self.adds[made] >= 0, self.adds[made], step.storages.grad_ready_after[self._raw[made]]
        )
        new.empty_initial(gradient[summed])
        rank = np.full(step.storages.n, step.storages.n, np.int64)
        rank[step.grad_order] = np.arange(len(step.grad_order))
        # By grad-ready op, then autograd's order among gradients of one op.
        self._order = made[np.lexsort((rank[gradient[made]], self._ready_after[made]))]
        self.storages: RowMask = np.zeros(step.storages.n, bool)
        """(m,) True for gradients, and for the gradients of a micro-batch that are added to them."""
        self.storages[self._raw[made]] = self.storages[gradient[made]] = True
        self._device_sum = np.full(count, -1, np.int32)
        self._host_sum = np.full(count, -1, np.int32)
        self._in_flight = -1
        self._in_flight_host = -1
        self._arrived: dict[tuple[int, int], list[int]] = {}
        """By bucket (block and itemsize): parameters whose gradients are in it, in grad-ready order."""
        self._native_bytes, self._state_of = native_update_bytes(step), _state_of(step)
        self._waiting: PendingUpdates[I32] = PendingUpdates(waiting_room(step))
        self._deferred = np.isin(columns.block, list(deferred))
        self.is_outside = columns.block < 0
        """(parameters,) True if the parameter belongs to no block."""

    def ready_in(self, rows: RowIndex) -> list[int]:
        """Return the parameters whose gradients are ready in `rows`, in grad-ready order."""
        inside = np.zeros(self._step.ops.n + 1, bool)
        inside[rows] = True
        found: list[int] = self._order[inside[self._ready_after[self._order]]].tolist()
        return found

    def ready_row(self, parameter: int) -> int:
        """Return the op after which the parameter's gradient is ready."""
        return int(self._ready_after[parameter])

    def raw(self, parameter: int) -> int:
        """Return the storage of one micro-batch's gradient, before accumulation."""
        return int(self._raw[parameter])

    def start_sum(self, parameter: int, number: int) -> None:
        """Make the first micro-batch's gradient the sum, as autograd does."""
        self._device_sum[parameter] = number
        # It was a temporary of its micro-batch; reports list the sum as a gradient.
        self._new.set_kind(number, Kind.GRADIENT)
        gradient = self._columns.gradient[parameter]
        if self._step.storages.producer[gradient] < 0:
            self._new.initial_number[gradient] = number

    def add_part(self, parameter: int, number: int) -> None:
        """Add a part of a tied weight's gradient to the sum; the first part becomes the sum."""
        if self._device_sum[parameter] < 0:
            self.start_sum(parameter, number)
            return
        n_bytes = int(self._step.storages.bytes[self._raw[parameter]])
        self._new.new_op(_ADD_HERE, 3 * n_bytes, reads=(number,), writes=(int(self._device_sum[parameter]),))

    def offload(self, parameter: int) -> None:
        """Start the D2H copy of the gradient, among replicas when its bucket is averaged."""
        for each in [parameter] if self._average is None else self._averaged(parameter, self._average):
            self._copy_down(each)

    def _averaged(self, parameter: int, average: NewOp) -> list[int]:
        """Copy the gradient to its bucket; return the parameters of a bucket that it fills."""
        key = int(self._columns.block[parameter]), int(self._columns.itemsize[parameter])
        members = [
            row
            for row in parameters_by_block(self._step)[key[0]]
            if self._raw[row] >= 0 and self._columns.itemsize[row] == key[1]
        ]
        n_bytes = {row: int(self._step.storages.bytes[self._raw[row]]) for row in members}
        arrived, number = self._arrived.setdefault(key, []), int(self._device_sum[parameter])
        bucket = number
        if len(members) > 1:
            makes = sum(n_bytes.values()), Tier.DEVICE, Kind.COMMUNICATION, -1
            bucket = (
                int(self._device_sum[arrived[0]])
                if arrived
                else self._new.new_op(_BUCKET, makes=makes, call=key[0])
            )
            # Its own memory is free after the copy, as in `GradientReducer`.
            self._new.new_op(_COPY, 2 * n_bytes[parameter], reads=(number,), writes=(bucket,), call=key[0])
        self._device_sum[parameter] = bucket
        arrived.append(parameter)
        if len(arrived) < len(members):
            return []
        self._new.new_op(average, sum(n_bytes.values()), writes=(bucket,))
        return self._arrived.pop(key)

    def _copy_down(self, parameter: int) -> None:
        """Start the D2H copy of a gradient; the copy before it must have ended."""
        n_bytes = int(self._step.storages.bytes[self._raw[parameter]])
        number = int(self._device_sum[parameter])
        # One copy in flight, as in the runtime: the previous source is free before this one starts.
        self.wait()
        block = int(self._columns.block[parameter])
        host = self._new.new_op(
            _OFFLOAD,
            n_bytes,
            reads=(number,),
            makes=(n_bytes, Tier.HOST, Kind.GRADIENT, parameter),
            call=block,
        )
        self._in_flight, self._in_flight_host = parameter, host

    def wait(self) -> None:
        """End the D2H copy in flight: free its source and add it to the sum of earlier groups."""
        if self._in_flight < 0:
            return
        row, self._in_flight = self._in_flight, -1
        self._new.hold(self._device_sum[row], self._new.n_ops - 1)
        if self._host_sum[row] < 0:
            # The first group's copy becomes the sum on the host.
            self._host_sum[row] = self._in_flight_host
        else:
            n_bytes = int(self._step.storages.bytes[self._raw[row]])
            self._new.new_op(
                _ADD, 3 * n_bytes, reads=(self._in_flight_host,), writes=(int(self._host_sum[row]),)
            )

    def update_deferred(self, hosts: I32) -> None:
        """Add the previous step's deferred updates."""
        if not self._deferred.any():
            return
        for block in parameters_by_block(self._step):
            rows = np.asarray([row for row in block if self._deferred[row] and self._raw[row] >= 0], np.int32)
            gradients = self._new.add_storages(
                self._step.storages.bytes[self._raw[rows]], Tier.HOST, Kind.GRADIENT, -1, rows, -1
            )
            for row, gradient in zip(rows.tolist(), gradients.tolist(), strict=True):
                # The gradients of a block are freed together.
                used = gradients.tolist() if row == rows[-1] else [gradient]
                self._update(row, used, hosts, _UPDATE_DEFERRED)

    def _update(self, row: int, gradients: Sequence[int], hosts: I32, op: NewOp) -> None:
        state = self._new.initial_number[self._state_of.get(row, [])].tolist()
        self._new.new_op(op, int(self._native_bytes[row]), reads=gradients, writes=(int(hosts[row]), *state))

    def update(self, pack: Span, hosts: I32) -> None:
        """Update a pack; keep the gradients of deferred blocks for the next step."""
        rows = sorted(
            row
            for block in range(*pack)
            for row in parameters_by_block(self._step)[block]
            if self._host_sum[row] >= 0
        )
        # Held past the step: the next step's prologue updates from them.
        self._new.hold([int(self._host_sum[row]) for row in rows if self._deferred[row]], FOREVER)
        rows = [row for row in rows if not self._deferred[row]]
        n_bytes = sum(int(self._step.storages.bytes[self._raw[row]]) for row in rows)
        # Before the pack's own updates: the host waits for old ones until its gradients fit.
        self._free_updated(self._waiting.make_room(n_bytes), self._new.n_ops - 1)
        for row in rows:
            self._update(row, (int(self._host_sum[row]),), hosts, _UPDATE)
        self._waiting.add(self._host_sum[rows], n_bytes)

    def _free_updated(self, gradients: Iterable[I32], op: int) -> None:
        """Free `gradients`, whose updates end with op `op`."""
        for each in gradients:
            self._new.hold(each, op)

    def wait_updates(self, op: int) -> None:
        """Free the remaining gradients of blocks: op `op` waits for their updates."""
        self._free_updated(self._waiting.drain(), op)

    def average_outside(self) -> None:
        """Average the gradients of parameters outside of the blocks among replicas."""
        if self._average is None:
            return
        for row in np.flatnonzero((self._device_sum >= 0) & (self._columns.block < 0)).tolist():
            self._new.new_op(
                self._average,
                int(self._step.storages.bytes[self._raw[row]]),
                writes=(int(self._device_sum[row]),),
            )

    def replace_gradients(self, made: I32) -> None:
        """Let the optimizer's ops read the sums instead of one micro-batch's gradients."""
        known = self._device_sum >= 0
        made[self._columns.gradient[known]] = self._device_sum[known]
        made[self._raw[known]] = self._device_sum[known]

    def hold_outside(self, rows: RowIndex, positions: I32) -> None:
        """Hold gradients of parameters outside of the blocks until the optimizer's rows free them."""
        parameters = np.flatnonzero((self._device_sum >= 0) & (self._columns.block < 0))
        held = self._step.storages.held_until[self._columns.gradient[parameters]]
        until = positions[np.maximum(np.searchsorted(rows, held, side="right") - 1, 0)]
        self._new.hold(self._device_sum[parameters], np.where(held == FOREVER, FOREVER, until))

    def columns(self) -> tuple[I32, I32]:
        """Return (parameters,) each one's gradient at the end, -1 if freed; and these in grad-ready order."""
        outside = self._columns.block < 0
        gradient = np.where(outside, self._device_sum, -1).astype(np.int32)
        grad_order = np.asarray([gradient[row] for row in self._order if gradient[row] >= 0], np.int32)
        return gradient, grad_order


def skipped_adds(gradients: Gradients, index: int, group: range) -> I32:
    """Return the accumulating ops that micro-batch `index` of `group` skips: it is the first of its sum."""
    first = np.where(gradients.is_outside, index == 0, index == group[0])
    found: I32 = gradients.adds[first & (gradients.adds >= 0)]
    return found
