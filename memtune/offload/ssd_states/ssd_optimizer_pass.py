"""The pass of `offload.ssd_states.ssd_optimizer`: state is read, updated and written record by record.

It covers records on the host as well (`on_host`), where only gradients and new weights may be on SSD.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.program import (
    FOREVER,
    I32,
    I64,
    READS,
    WRITES,
    WRITES_IN_FLIGHT,
    Edit,
    Kind,
    Mask,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
    moments_of_parameters,
    own_update,
)

_READ, _OFFLOAD, _UPDATE, _COPY_TO_DEVICE, _WRITE, _WRITE_WEIGHT, _COPY_ON_HOST, _READ_GRADIENT = range(8)
_NOTHING = -1
_OPS = (
    ("from_ssd", Resource.SSD_READ),
    ("to_host", Resource.DEVICE_TO_HOST),
    ("host_update_", Resource.HOST_THREADS),
    ("copy_to_device_", Resource.HOST_TO_DEVICE),
    ("write_ssd_", Resource.SSD_WRITE),
    ("write_ssd_", Resource.SSD_WRITE),
    ("copy_", Resource.HOST_THREADS),
    ("from_ssd", Resource.SSD_READ),
)


@dataclass(frozen=True, eq=False)
class OffloadedParameters:
    """Offloaded parameters before the optimizer's pass: their gradients are on the host or SSD."""

    gradients: I32
    """(parameters,) Storage of each gradient; -1 for parameters on the device."""
    weights: I32
    """(parameters,) Storage on the host or SSD that receives each new weight; -1 if on the device."""

    @classmethod
    def from_step(cls, step: Step) -> OffloadedParameters:
        """Return the offloaded parameters of a step that `parameter_offload_pass` wrote."""
        gradients, weights = (np.full(len(step.parameters), -1, np.int32) for _ in range(2))
        # The offload pass has left these gradients to the optimizer's ops, which still read them.
        used = np.unique(step.uses.storage[step.use_phase == Phase.OPTIMIZER])
        used = used[(step.storages.kind[used] == Kind.GRADIENT) & (step.storages.tier[used] != Tier.DEVICE)]
        gradients[step.storages.owner[used]] = used
        kept = np.flatnonzero(
            (step.storages.kind == Kind.PARAMETER)
            & (step.storages.producer < 0)
            & (step.storages.tier != Tier.DEVICE)
        ).astype(np.int32)
        for each in kept.tolist():  # a page has no owner: it holds weights of all
            weights[gradients >= 0 if step.storages.owner[each] < 0 else step.storages.owner[each]] = each
        return cls(gradients, weights)

    @classmethod
    def none(cls, step: Step) -> OffloadedParameters:
        """Return the value for a step with all parameters on the device."""
        return cls(*(np.full(len(step.parameters), -1, np.int32) for _ in range(2)))


def optimizer_on_ssd(
    step: Step, read_ahead: int, slots: int = 1, offloaded: OffloadedParameters | None = None
) -> Step:
    """Return `step` with the optimizer's ops replaced by reads, native updates and writes of records.

    Args:
        step: Any step.
        read_ahead: Records that are read ahead.
        slots: SSD slots of each record, used alternately.
        offloaded: The offloaded parameters; None: all are on the device.
    """
    return _piece_by_piece(step, read_ahead, slots, offloaded or OffloadedParameters.none(step))


def optimizer_in_host_pieces(step: Step, read_ahead: int, offloaded: OffloadedParameters) -> Step:
    """Return the step of `optimizer_on_ssd` with weights and state on the host."""
    return _piece_by_piece(step, read_ahead, 0, offloaded)


def _piece_by_piece(step: Step, read_ahead: int, slots: int, offloaded: OffloadedParameters) -> Step:
    """Replace the optimizer's ops, record by record; `slots` is 0 for records on the host."""
    columns, (owners, optimizer) = columns_of(step.parameters), _updated(step, offloaded)
    on_device = columns.gradient >= 0
    if not len(owners) or not optimizer.any():
        return step
    edit = Edit(step)
    edit.drop_ops(optimizer)
    here, narrow = on_device[owners], columns.itemsize[owners] != 4
    weights = np.where(here, columns.storage[owners], offloaded.weights[owners]).astype(np.int32)
    waits = np.where(here, Tier.DEVICE, step.storages.tier[weights])
    # A float32 host copy that is updated in place needs no second master.
    is_master = (waits == Tier.HOST) & ~narrow if slots == 0 else np.zeros(len(owners), bool)
    masters = np.where(is_master, weights, -1)
    pieces = (
        Pieces.on_ssd(edit, step, owners, slots) if slots else Pieces.on_host(edit, step, owners, masters)
    )
    gradient_bytes = columns.n_bytes[owners]
    up = np.where(
        is_master,
        _NOTHING,
        np.where(here, _COPY_TO_DEVICE, np.where(waits == Tier.SSD, _WRITE_WEIGHT, _COPY_ON_HOST)),
    )
    kept = ~here & (step.storages.tier[offloaded.gradients[owners]] == Tier.SSD)
    rows, last = _insert(
        edit,
        int(np.flatnonzero(optimizer)[0]),
        pieces.traffic(gradient_bytes),
        read_ahead,
        _UpdateOps(here, up, kept, slots > 0),
    )

    host = (
        pieces.stream(edit, rows[_READ], rows[_UPDATE], rows[_WRITE])
        if slots
        else pieces.update_in_place(edit, rows[_UPDATE])
    )
    gradients = offloaded.gradients[owners]
    gradients[here] = _offload_gradients(edit, step, owners[here], gradient_bytes[here], rows[:, here])
    edit.storages.held_until[gradients[~here & ~kept]] = -1
    gradients[kept] = _read_gradients(
        edit, gradients[kept], gradient_bytes[kept], rows[_READ_GRADIENT][kept], owners[kept]
    )
    handed = np.flatnonzero(up != _NOTHING)
    new = rows[up[handed], handed]
    # Without records on SSD only the new weights are in the queue of writes.
    queue = up[handed] >= 0 if slots else up[handed] == _WRITE_WEIGHT
    keeps = narrow[handed] & (up[handed] == _WRITE_WEIGHT)  # bfloat16: in the gradient's memory
    _hold_while_written(edit, gradients[handed[queue]], new[queue], keeps[queue], last)
    edit.add_uses(rows[_UPDATE], writes=gradients)
    edit.add_uses(new, np.where(narrow, gradients, host)[handed], writes=weights[handed])
    edit.hold_to_the_end_of_step(last)
    return edit.done()


def _updated(step: Step, offloaded: OffloadedParameters) -> tuple[npt.NDArray[np.intp], Mask]:
    """Return the parameters with a gradient, resident or offloaded, and a mask of optimizer ops."""
    columns = columns_of(step.parameters)
    owners = np.flatnonzero(columns.trainable & ((columns.gradient >= 0) | (offloaded.gradients >= 0)))
    return owners, own_update(step)


def _offload_gradients(edit: Edit, step: Step, owners: npt.NDArray[np.intp], n_bytes: I64, rows: I32) -> I32:
    """Add host gradients of the `owners`, freed on the device, for the `rows` of `_insert`."""
    gradients = columns_of(step.parameters).gradient[owners]
    owner = step.storages.owner[gradients]
    down = edit.add_storages(
        n_bytes, producer=rows[_OFFLOAD], tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner
    )
    edit.add_uses(rows[_OFFLOAD], gradients)
    freed = step.storages.held_until[gradients] != FOREVER  # DDP's buckets are not freed
    edit.storages.held_until[gradients[freed]] = -1
    edit.release_before(gradients[freed], rows[_UPDATE][freed])
    return down


def _read_gradients(edit: Edit, gradients: I32, n_bytes: I64, rows: I32, owner: npt.NDArray[np.intp]) -> I32:
    """Add the host copies of gradients on SSD, from their reads on."""
    edit.add_uses(rows, gradients)
    return edit.add_storages(
        n_bytes, producer=rows, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner.astype(np.int32)
    )


def _hold_while_written(edit: Edit, gradients: I32, new: I32, keeps: Mask, last: int) -> None:
    """Hold the memory of new weights that are written to SSD until the write after the next one starts."""
    # The queue holds `WRITES_IN_FLIGHT` writes; each is finished when that many more have started.
    until = np.append(
        new[WRITES_IN_FLIGHT:], np.full(min(WRITES_IN_FLIGHT, len(new)), last, np.int32)
    ).astype(np.int32)
    edit.hold_through(gradients[keeps], until[keeps])


@dataclass(frozen=True, eq=False)
class Pieces:
    """The records of updated parameters, on SSD or the host; one entry each."""

    state: I32
    at: npt.NDArray[np.intp]
    """Index of the record of each storage in `state`."""
    masters: I32
    n_bytes: I64
    update_bytes: I64
    """Bytes that one native update of each record reads and writes."""
    owner: I32

    @classmethod
    def on_ssd(cls, edit: Edit, step: Step, parameters: npt.NDArray[np.intp], slots: int = 1) -> Pieces:
        """Move weights and moments to SSD; `slots` is the number of SSD slots of each record."""
        pieces = cls._on(edit, step, parameters, Tier.SSD, np.full(len(parameters), -1, np.int32))
        for _ in range(1, slots):
            edit.add_persistent(pieces.n_bytes, Kind.OPTIMIZER, Tier.SSD, pieces.owner)
        return pieces

    @classmethod
    def on_host(cls, edit: Edit, step: Step, parameters: npt.NDArray[np.intp], masters: I32) -> Pieces:
        """Move weights and moments to the host; `masters` are existing master weights, -1 for none."""
        return cls._on(edit, step, parameters, Tier.HOST, masters)

    def traffic(self, sizes: I64) -> dict[int, I64]:
        """Return the bytes that each kind of op moves; `sizes` are those of weights, and so of gradients."""
        records = {_READ: self.n_bytes, _UPDATE: self.update_bytes, _WRITE: self.n_bytes}
        copies = dict.fromkeys((_OFFLOAD, _COPY_TO_DEVICE, _WRITE_WEIGHT, _READ_GRADIENT), sizes)
        # A copy on the host is read and written by the host's own threads.
        return records | copies | {_COPY_ON_HOST: 2 * sizes}

    @classmethod
    def _on(
        cls, edit: Edit, step: Step, parameters: npt.NDArray[np.intp], tier: Tier, masters: I32
    ) -> Pieces:
        """Move the state of `parameters` to `tier`; return it as pieces, with a master for each."""
        columns = columns_of(step.parameters)
        state, at = moments_of_parameters(step, parameters)
        numel, itemsize = columns.numel[parameters], columns.itemsize[parameters].astype(np.int64)
        moment_bytes = np.bincount(at, np.full(len(at), 4), len(parameters)).astype(np.int64) * numel
        edit.storages.bytes[state] = 4 * numel[at]
        edit.set_storages(
            tier=np.where(
                step.storages.kind == Kind.OPTIMIZER, np.uint8(Tier.HOST), step.storages.tier
            ).astype(np.uint8)
        )
        edit.storages.tier[state] = tier
        owner, masters, made = parameters.astype(np.int32), masters.astype(np.int32), masters < 0
        masters[made] = edit.add_persistent(4 * numel[made], Kind.PARAMETER, tier, owner[made])
        update_bytes = 8 * numel + np.where(itemsize == 4, 1, 2) * itemsize * numel + 2 * moment_bytes
        return cls(state, at, masters, 4 * numel + moment_bytes, update_bytes, owner)

    def update_in_place(self, edit: Edit, update: I32) -> I32:
        """Update each record where it is; return the master weights."""
        edit.add_uses(update, writes=self.masters)
        edit.add_uses(update[self.at], writes=self.state)
        return self.masters

    def stream(
        self, edit: Edit, read: I32, update: I32, write: I32, order: npt.NDArray[np.intp] | None = None
    ) -> I32:
        """Add the host memory of each record, from its read until two writes later; return it, by record.

        Args:
            edit: Of the step.
            read: Reads of the records.
            update: Updates of the records.
            write: Writes of the records.
            order: Order of the writes; None: that of the records.

        Returns:
            The host memory of each record.
        """
        host = edit.add_storages(self.n_bytes, producer=read, tier=Tier.HOST, owner=self.owner)
        for ops, mutates in ((read, False), (write, True)):
            edit.add_uses(ops, self.masters, mode=mutates)
            edit.add_uses(ops[self.at], self.state, mode=mutates)
        edit.add_uses(update, writes=host)
        edit.add_uses(write, host)
        # Workers may write in another order than the records'.
        held, written = (host, write) if order is None else (host[order], write[order])
        _hold_in_queue(edit, held, written)
        return host


def _hold_in_queue(edit: Edit, held: I32, writes: I32) -> None:
    """Hold the memory that `writes` write until the write `WRITES_IN_FLIGHT` later starts, or the last."""
    edit.release_before(held[:-WRITES_IN_FLIGHT], writes[WRITES_IN_FLIGHT:])
    last = held[-WRITES_IN_FLIGHT:]
    edit.hold_through(last, writes[-1])


class _UpdateOps(NamedTuple):
    """The kinds of ops that update each parameter."""

    here: Mask
    """(parameters,) True if the gradient is on the device."""
    up: npt.NDArray[np.intp]
    """(parameters,) Kind of the op that stores the new weight (`_COPY_TO_DEVICE`, …), or `_NOTHING`."""
    kept: Mask
    """(parameters,) True if the gradient is on SSD."""
    streams: bool
    """True if records are read and written."""

    def in_order(self, read_ahead: int) -> list[tuple[int, int]]:
        """Return (kind, parameter) of each op in the order of `SsdOptimizer.stream`."""
        count = len(self.here)
        read, write = ([_READ], [_WRITE]) if self.streams else ([], [])
        reads = [[*read, *([_READ_GRADIENT] if kept else [])] for kept in self.kept.tolist()]
        # The reads that `stream` starts before its loop.
        found = [(kind, i) for i in range(min(read_ahead, count)) for kind in reads[i]]
        for i, (down, new) in enumerate(zip(self.here.tolist(), self.up.tolist(), strict=True)):
            # Without read-ahead each record is read when its turn comes.
            kinds = [*(reads[i] if read_ahead == 0 else []), *([_OFFLOAD] if down else []), _UPDATE]
            kinds += [*([new] if new != _NOTHING else []), *write]
            found += [(kind, i) for kind in kinds]
            if read_ahead and i + read_ahead < count:
                found += [(kind, i + read_ahead) for kind in reads[i + read_ahead]]
        return found


def swept_from_ssd(step: Step, read_ahead: int, offloaded: OffloadedParameters) -> Step:
    """Return `step` with its optimizer's ops replaced by a sweep at its start, over the last step's
    gradients.

    Args:
        step: A step that `offload.parameters.parameter_offload_pass` wrote.
        read_ahead: Records that are read ahead.
        offloaded: The offloaded parameters of `step`.
    """
    # The pass of `offload.ssd_states.ssd_lock_free`, for the pace at which a sweep applies the
    # gradients of one step.
    columns, (owners, optimizer) = columns_of(step.parameters), _updated(step, offloaded)
    on_device = columns.gradient >= 0
    if not len(owners) or not optimizer.any():
        return step
    edit, here = Edit(step), on_device[owners]
    edit.drop_ops(optimizer)
    sizes, ready = (columns.n_bytes[owners], offloaded.gradients[owners[~here]])
    # Gradients outlive the step: the sweep in the next one reads them.
    edit.storages.held_until[ready] = FOREVER
    pieces = Pieces.on_ssd(edit, step, owners)
    nothing = np.zeros(len(owners), bool)
    rows, _ = _insert(
        edit,
        0,
        pieces.traffic(sizes),
        read_ahead,
        _UpdateOps(nothing, np.full(len(owners), _COPY_ON_HOST), nothing, True),
        Phase.BOUNDARY,
    )
    host = pieces.stream(edit, rows[_READ], rows[_UPDATE], rows[_WRITE])
    old = edit.add_storages(sizes, tier=Tier.HOST, kind=Kind.GRADIENT, owner=pieces.owner)
    edit.add_uses(rows[_UPDATE], writes=old)
    edit.add_uses(rows[_COPY_ON_HOST], host)
    # A sweep writes a second copy of the weights, so that training's does not change within a step.
    pages = (
        (step.storages.kind == Kind.PARAMETER)
        & (step.storages.tier == Tier.HOST)
        & (step.storages.producer < 0)
    )
    edit.add_persistent(step.storages.bytes[pages], Kind.PARAMETER, Tier.HOST, step.storages.owner[pages])
    published = edit.add_persistent(sizes[here], Kind.PARAMETER, Tier.HOST, pieces.owner[here])
    _add_asynchronous_copies(edit, step, owners[here], published, int(np.flatnonzero(optimizer)[0]))
    return edit.done()


def _add_asynchronous_copies(
    edit: Edit, step: Step, owners: npt.NDArray[np.intp], published: I32, anchor: int
) -> None:
    """Add D2H copies of gradients, which remain on the host, then H2D copies of the `published` weights."""
    # All are inserted before the op `anchor`.
    columns = columns_of(step.parameters)
    gradients, sizes = columns.gradient[owners], columns.n_bytes[owners]
    at = np.full(len(owners), anchor, np.int32)
    found = {}
    for name, resource, stream in (
        ("to_host", Resource.DEVICE_TO_HOST, 0),
        ("copy_to_device_", Resource.HOST_TO_DEVICE, 1),
    ):
        found[name] = edit.add_ops(
            f"memtune.{name}.default",
            before=at,
            phase=Phase.OPTIMIZER,
            resource=resource,
            traffic_bytes=sizes,
            stream=stream,
            prefetch=1 - stream,
        )
    down, up = found["to_host"], found["copy_to_device_"]
    edit.add_storages(
        sizes,
        producer=down,
        tier=Tier.HOST,
        kind=Kind.GRADIENT,
        held_until=int(FOREVER),
        owner=step.storages.owner[gradients],
    )
    edit.add_uses(down, gradients)
    freed = step.storages.held_until[gradients] != FOREVER  # DDP's buckets are not freed
    edit.storages.held_until[gradients[freed]] = -1
    edit.release_before(gradients[freed], np.append(down[1:], up[:1])[freed])
    edit.add_uses(up, published, writes=columns.storage[owners])
    edit.hold_to_the_end_of_step(int(up[-1]))


def _insert(
    edit: Edit,
    anchor: int,
    traffic: dict[int, I64],
    read_ahead: int,
    ways: _UpdateOps,
    phase: Phase = Phase.OPTIMIZER,
) -> tuple[I32, int]:
    """Insert the ops of all updates before the op `anchor`.

    Args:
        edit: Of the step.
        anchor: An op.
        traffic: (parameters,) bytes of each op, by its kind.
        read_ahead: Records that are read ahead.
        ways: The ops of each parameter.
        phase: Of the ops.

    Returns:
        (8, parameters) rows by kind, -1 for no op, and the last op.
    """
    kind, index = np.asarray(ways.in_order(read_ahead), np.int32).T
    rows = edit.add_kinds(
        [(f"{'aten' if name == 'copy_' else 'memtune'}.{name}.default", on) for name, on in _OPS],
        kind,
        before=np.full(len(kind), anchor, np.int32),
        phase=phase,
        traffic_bytes=np.stack([traffic[each] for each in range(len(_OPS))])[kind, index],
        stream=(kind == _COPY_TO_DEVICE).astype(np.uint8),  # the copy stream orders it before later use
        prefetch=(kind == _OFFLOAD).astype(np.uint8),
    )
    found = np.full((len(_OPS), len(ways.here)), -1, np.int32)
    found[kind, index] = rows
    return found, int(rows[-1])


def gradients_on_ssd(step: Step, offloaded: OffloadedParameters) -> tuple[Step, OffloadedParameters]:
    """Return `step` with offloaded parameters' gradients on SSD until the optimizer reads them, and their
    storages.

    The pass of `offload.parameters.SsdGradients`.

    Args:
        step: A step that `offload.parameters.parameter_offload_pass` wrote, with updates by the optimizer.
        offloaded: The offloaded parameters of `step`.
    """
    parameters = np.flatnonzero(offloaded.gradients >= 0).astype(np.int32)
    if not len(parameters):
        return step, offloaded
    edit, kept = Edit(step), offloaded.gradients[parameters]
    # A sum of several micro-batches is older than the step, and no copy makes it.
    summed = bool((step.storages.producer[kept] < 0).any())
    hosts, copies, adds = _host_sums(step, kept) if summed else (kept, step.storages.producer[kept], kept)
    # In the order of the D2H copies, which is that of the writes.
    order = np.argsort(copies, kind="stable")
    parameters, kept, hosts, copies, adds = (each[order] for each in (parameters, kept, hosts, copies, adds))
    n_bytes = step.storages.bytes[hosts]
    if summed:
        places, after = kept, adds
        edit.set_storages(tier=step.storages.tier.copy())
        edit.storages.tier[kept] = Tier.SSD
        edit.storages.held_until[kept] = FOREVER
        _read_sums(edit, step, kept, hosts, copies, adds)
    else:
        places = edit.add_persistent(n_bytes, Kind.GRADIENT, Tier.SSD, parameters)
        # A gradient is written when its copy has ended, not when it has started.
        after = _copy_ends(step, copies)
    write = edit.add_ops(
        "memtune.write_ssd_.default",
        after=after,
        phase=Phase.BACKWARD,
        resource=Resource.SSD_WRITE,
        traffic_bytes=n_bytes,
        reads=hosts,
        writes=places,
    )
    # Units of FSDP2 are freed when a moment begins, after the writes that end the one before it.
    _release_after(edit, step, after, write, step.storages.kind == Kind.COMMUNICATION)
    if int(after[-1]) >= step.backward_end:
        edit.hold_to_the_end_of_backward(int(write[-1]))
    edit.storages.held_until[hosts] = -1
    _hold_in_queue(edit, hosts, write)
    moved = np.arange(step.storages.n, dtype=np.int32)
    moved[kept] = places
    used_later = step.use_phase == Phase.OPTIMIZER
    edit.set_uses(storage=np.where(used_later, moved[step.uses.storage], edit.uses.storage).astype(np.int32))
    gradients = offloaded.gradients.copy()
    gradients[parameters] = places
    return edit.done(), replace(offloaded, gradients=gradients)


def _release_after(edit: Edit, step: Step, after: I32, ops: I32, which: Mask) -> None:
    """Hold the device storages `which` that end at `after[i]` until the op `ops[i]`, inserted after it."""
    op_of = np.full(step.ops.n, -1, np.int32)
    op_of[after] = ops
    ends = (
        which
        & (step.storages.tier == Tier.DEVICE)
        & (step.storages.producer >= 0)
        & (step.freed_after < step.ops.n)
    )
    owners = np.flatnonzero(ends).astype(np.int32)
    until = op_of[step.freed_after[owners]]
    edit.hold_through(owners[until >= 0], until[until >= 0])


def _host_sums(step: Step, sums: I32) -> tuple[I32, I32, I32]:
    """Return of each of the host's `sums`: the gradient added to it, that one's D2H copy, the addition."""
    row_of = np.full(step.storages.n, -1, np.int32)
    row_of[sums] = np.arange(len(sums))
    in_body = (step.use_phase < Phase.BOUNDARY) & (step.ops.resource[step.uses.op] == Resource.HOST_THREADS)
    adds = np.flatnonzero((row_of[step.uses.storage] >= 0) & (step.uses.mode == WRITES) & in_body)
    add_of = np.full(len(sums), -1, np.int32)
    add_of[row_of[step.uses.storage[adds]]] = step.uses.op[adds]
    added = np.full(step.ops.n, -1, np.int32)
    reads = np.flatnonzero((step.uses.mode == READS) & in_body)
    added[step.uses.op[reads]] = step.uses.storage[reads]
    hosts = added[add_of]
    return hosts, step.storages.producer[hosts], add_of


def _read_sums(edit: Edit, step: Step, sums: I32, hosts: I32, copies: I32, adds: I32) -> None:
    """Read each sum from SSD during the D2H copy of its gradient; add it into the gradient's memory."""
    n_bytes = step.storages.bytes[hosts]
    read = edit.add_ops(
        "memtune.from_ssd.default",
        after=copies,
        phase=Phase.BACKWARD,
        resource=Resource.SSD_READ,
        traffic_bytes=n_bytes,
        prefetch=1,
        reads=sums,
    )
    # Autograd holds the gradient until the hook, which starts the read, returns.
    _release_after(edit, step, copies, read, np.ones(step.storages.n, bool))
    so_far = edit.add_storages(
        n_bytes, producer=read, tier=Tier.HOST, kind=Kind.GRADIENT, owner=step.storages.owner[hosts]
    )
    row_of = np.full(step.ops.n, -1, np.int32)
    row_of[adds] = np.arange(len(adds))
    row = row_of[step.uses.op]
    # The sum is added into the new gradient's memory, which is then written; the read buffer is freed.
    swapped = np.where(step.uses.mode == WRITES, hosts[row], so_far[row])
    edit.set_uses(storage=np.where(row >= 0, swapped, edit.uses.storage).astype(np.int32))


def _copy_ends(step: Step, copies: I32) -> I32:
    """Return the op after which each copy is finished: its source is freed, or copied again."""
    source = _sources(step, copies)
    after = step.freed_after[source].copy()
    shared = np.flatnonzero(source[1:] == source[:-1])  # rows of a block's gradients are contiguous
    after[shared] = copies[shared + 1] - 1
    return after


def _sources(step: Step, copies: I32) -> I32:
    """Return the device storage that each copy reads."""
    found = np.full(step.ops.n, -1, np.int32)
    reads = step.uses.mode == READS
    found[step.uses.op[reads]] = step.uses.storage[reads]
    return found[copies]
