"""The pass of `offload.ssd_states.ssd_optimizer`: weights and state on SSD, read, updated and written
parameter by parameter.

That of `offload.ssd_states.ssd_optimizer` as well, where they are on the host and only gradients and new
weights may be on SSD.
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
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
)

_READ, _DOWN, _UPDATE, _UP, _WRITE, _KEEP, _COPY, _GRADIENT = range(8)
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
class Away:
    """Parameters that are not on the device, and whose gradients are on the host, or on SSD, already."""

    gradients: I32
    """(parameters,) -1 for those that are on the device."""
    weights: I32
    """(parameters,) where new weights go, on the host or on SSD."""

    @classmethod
    def of(cls, step: Step) -> Away:
        """Those of what `offload.parameters.parameter_offload_pass` made, which left them to the optimizer,
        or of what came of that.
        """
        gradients, weights = (np.full(len(step.parameters), -1, np.int32) for _ in range(2))
        used = np.unique(step.uses.storage[step.use_phase == Phase.OPTIMIZER])
        used = used[(step.storages.kind[used] == Kind.GRADIENT) & (step.storages.tier[used] != Tier.DEVICE)]
        gradients[step.storages.owner[used]] = used
        kept = np.flatnonzero(
            (step.storages.kind == Kind.PARAMETER)
            & (step.storages.producer < 0)
            & (step.storages.tier != Tier.DEVICE)
        ).astype(np.int32)
        for each in kept.tolist():  # pages hold those of all
            weights[gradients >= 0 if step.storages.owner[each] < 0 else step.storages.owner[each]] = each
        return cls(gradients, weights)

    @classmethod
    def none(cls, step: Step) -> Away:
        """All are on the device."""
        return cls(*(np.full(len(step.parameters), -1, np.int32) for _ in range(2)))


def optimizer_on_ssd(step: Step, ahead: int, slots: int = 1, away: Away | None = None) -> Step:
    """`step` with the optimizer's ops replaced by reads, native updates and writes.

    Args:
        step: Any step.
        ahead: Pieces that are read ahead.
        slots: Places on SSD for each piece, which take turns.
        away: Parameters that are not on the device; None: all are.
    """
    return _piece_by_piece(step, ahead, slots, away or Away.none(step))


def optimizer_in_host_pieces(step: Step, ahead: int, away: Away) -> Step:
    """As `optimizer_on_ssd`, with weights and state on the host.

    Args:
        step: Any step.
        ahead: Gradients that are read ahead, of those that are on SSD.
        away: Parameters that are not on the device.
    """
    return _piece_by_piece(step, ahead, 0, away)


def _piece_by_piece(step: Step, ahead: int, slots: int, away: Away) -> Step:
    """`slots`: 0 for pieces on the host."""
    columns, (mine, optimizer) = columns_of(step.parameters), _updated(step, away)
    on_device = columns.gradient >= 0
    if not len(mine) or not optimizer.any():
        return step
    edit = Edit(step)
    edit.drop_ops(optimizer)
    here, narrow = on_device[mine], columns.itemsize[mine] != 4
    weights = np.where(here, columns.storage[mine], away.weights[mine]).astype(np.int32)
    waits = np.where(here, Tier.DEVICE, step.storages.tier[weights])
    is_master = (waits == Tier.HOST) & ~narrow if slots == 0 else np.zeros(len(mine), bool)
    masters = np.where(is_master, weights, -1)
    pieces = Pieces.on_ssd(edit, step, mine, slots) if slots else Pieces.on_host(edit, step, mine, masters)
    gradient_bytes = columns.numel[mine] * columns.itemsize[mine].astype(np.int64)
    up = np.where(is_master, _NOTHING, np.where(here, _UP, np.where(waits == Tier.SSD, _KEEP, _COPY)))
    traffic = {
        _READ: pieces.n_bytes,
        _UPDATE: pieces.update_bytes,
        _WRITE: pieces.n_bytes,
        _COPY: 2 * gradient_bytes,
    }
    traffic |= dict.fromkeys((_DOWN, _UP, _KEEP, _GRADIENT), gradient_bytes)
    kept = ~here & (step.storages.tier[away.gradients[mine]] == Tier.SSD)
    rows, last = _insert(
        edit, int(np.flatnonzero(optimizer)[0]), traffic, ahead, _Ways(here, up, kept, slots > 0)
    )

    host = (
        pieces.stream(edit, rows[_READ], rows[_UPDATE], rows[_WRITE])
        if slots
        else pieces.stay(edit, rows[_UPDATE])
    )
    gradients = away.gradients[mine]
    gradients[here] = _gradients_down(edit, step, mine[here], gradient_bytes[here], rows[:, here])
    edit.storages.held_until[gradients[~here & ~kept]] = -1
    gradients[kept] = _gradients_read(
        edit, gradients[kept], gradient_bytes[kept], rows[_GRADIENT][kept], mine[kept]
    )
    handed = np.flatnonzero(up != _NOTHING)
    new = rows[up[handed], handed]
    queue = up[handed] >= 0 if slots else up[handed] == _KEEP
    keeps = narrow[handed] & (up[handed] == _KEEP)  # written from the gradient's memory, as long as the piece
    _hold_while_written(edit, gradients[handed[queue]], new[queue], keeps[queue], last)
    edit.add_uses(rows[_UPDATE], gradients, mode=WRITES)
    edit.add_uses(new, np.where(narrow, gradients, host)[handed])
    edit.add_uses(new, weights[handed], mode=WRITES)
    edit.hold_to_the_end_of_step(last)
    return edit.done()


def _updated(step: Step, away: Away) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """The parameters that have a gradient, on the device or away, and which ops are the optimizer's own."""
    columns = columns_of(step.parameters)
    mine = np.flatnonzero(columns.trainable & ((columns.gradient >= 0) | (away.gradients >= 0)))
    return mine, (step.ops.phase == Phase.OPTIMIZER) & (step.ops.resource == Resource.COMPUTE)


def _gradients_down(edit: Edit, step: Step, mine: npt.NDArray[np.intp], n_bytes: I64, rows: I32) -> I32:
    """Gradients of the parameters `mine` on the host, let go on the device; `rows` are those of their ops."""
    gradients = columns_of(step.parameters).gradient[mine]
    owner = step.storages.owner[gradients]
    down = edit.add_storages(n_bytes, producer=rows[_DOWN], tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)
    edit.add_uses(rows[_DOWN], gradients)
    freed = step.storages.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.storages.held_until[gradients[freed]] = -1
    edit.let_go_before(gradients[freed], rows[_UPDATE][freed])
    return down


def _gradients_read(edit: Edit, gradients: I32, n_bytes: I64, rows: I32, owner: npt.NDArray[np.intp]) -> I32:
    """Gradients on SSD as they are in host memory from their reads on."""
    edit.add_uses(rows, gradients)
    return edit.add_storages(
        n_bytes, producer=rows, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner.astype(np.int32)
    )


def _hold_while_written(
    edit: Edit, gradients: I32, new: I32, keeps: npt.NDArray[np.bool_], last: int
) -> None:
    """Python lets go of what is written when the write after the next one has begun, or all are over.

    Args:
        edit: Of the step.
        gradients: Of what is written, in the order of the writes.
        new: The op that hands each new weight on.
        keeps: What is written is the gradient's memory.
        last: The last op of all.
    """
    until = np.append(
        new[WRITES_IN_FLIGHT:], np.full(min(WRITES_IN_FLIGHT, len(new)), last, np.int32)
    ).astype(np.int32)
    edit.hold_through(gradients[keeps], until[keeps])


@dataclass(frozen=True, eq=False)
class Pieces:
    """Weight and moments of each parameter that is updated, side by side on SSD, or on the host; one entry
    each.
    """

    state: I32
    at: npt.NDArray[np.intp]
    """Whose each storage of `state` is."""
    masters: I32
    n_bytes: I64
    update_bytes: I64
    """What one native pass over each moves."""
    owner: I32

    @classmethod
    def on_ssd(cls, edit: Edit, step: Step, mine: npt.NDArray[np.intp], slots: int = 1) -> Pieces:
        """Move them there; `slots`: places for each, which take turns."""
        pieces = cls._on(edit, step, mine, Tier.SSD, np.full(len(mine), -1, np.int32))
        nowhere, forever = np.full(len(mine), -1, np.int32), np.full(len(mine), FOREVER, np.int32)
        for _ in range(1, slots):
            edit.add_storages(
                pieces.n_bytes,
                producer=nowhere,
                tier=Tier.SSD,
                kind=Kind.OPTIMIZER,
                held_until=forever,
                owner=pieces.owner,
            )
        return pieces

    @classmethod
    def on_host(cls, edit: Edit, step: Step, mine: npt.NDArray[np.intp], masters: I32) -> Pieces:
        """Move them there; `masters`: what there is a master weight already, -1 for none."""
        return cls._on(edit, step, mine, Tier.HOST, masters)

    @classmethod
    def _on(cls, edit: Edit, step: Step, mine: npt.NDArray[np.intp], tier: Tier, masters: I32) -> Pieces:
        columns = columns_of(step.parameters)
        state, at = _moments(step, mine)
        numel, itemsize = columns.numel[mine], columns.itemsize[mine].astype(np.int64)
        moment_bytes = np.bincount(at, np.full(len(at), 4), len(mine)).astype(np.int64) * numel
        edit.storages.bytes[state] = 4 * numel[at]
        edit.set_storages(
            tier=np.where(
                step.storages.kind == Kind.OPTIMIZER, np.uint8(Tier.HOST), step.storages.tier
            ).astype(np.uint8)
        )
        edit.storages.tier[state] = tier
        owner, masters, made = mine.astype(np.int32), masters.astype(np.int32), masters < 0
        nowhere, forever = np.full(int(made.sum()), -1, np.int32), np.full(int(made.sum()), FOREVER, np.int32)
        masters[made] = edit.add_storages(
            4 * numel[made],
            producer=nowhere,
            tier=tier,
            kind=Kind.PARAMETER,
            held_until=forever,
            owner=owner[made],
        )
        update_bytes = 8 * numel + np.where(itemsize == 4, 1, 2) * itemsize * numel + 2 * moment_bytes
        return cls(state, at, masters, 4 * numel + moment_bytes, update_bytes, owner)

    def stay(self, edit: Edit, update: I32) -> I32:
        """Each is updated where it is; returns the master weights."""
        edit.add_uses(update, self.masters, mode=WRITES)
        edit.add_uses(update[self.at], self.state, mode=WRITES)
        return self.masters

    def stream(
        self, edit: Edit, read: I32, update: I32, write: I32, order: npt.NDArray[np.intp] | None = None
    ) -> I32:
        """Host memory of each from its read until two writes later; `order`: in which they are written.
        Returns the memory.
        """
        host = edit.add_storages(self.n_bytes, producer=read, tier=Tier.HOST, owner=self.owner)
        for ops, mutates in ((read, False), (write, True)):
            edit.add_uses(ops, self.masters, mode=mutates)
            edit.add_uses(ops[self.at], self.state, mode=mutates)
        edit.add_uses(update, host, mode=WRITES)
        edit.add_uses(write, host)
        held, written = (host, write) if order is None else (host[order], write[order])
        edit.let_go_before(held[:-WRITES_IN_FLIGHT], written[WRITES_IN_FLIGHT:])
        edit.hold_through(
            held[-WRITES_IN_FLIGHT:], np.full(len(held[-WRITES_IN_FLIGHT:]), written[-1], np.int32)
        )
        return host


def _moments(step: Step, mine: npt.NDArray[np.intp]) -> tuple[I32, npt.NDArray[np.intp]]:
    """State storages as large as their parameter, and the index of each one's parameter among `mine`."""
    columns = columns_of(step.parameters)
    sizes = columns.numel[mine] * columns.itemsize[mine]
    state = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER)
        & (step.storages.producer < 0)
        & np.isin(step.storages.owner, mine)
    ).astype(np.int32)
    at = np.searchsorted(mine, step.storages.owner[state])
    moments = step.storages.bytes[state] == sizes[at]  # the others count steps
    return state[moments], at[moments]


class _Ways(NamedTuple):
    """What happens to each parameter in the step."""

    here: npt.NDArray[np.bool_]
    """(parameters,) whether the gradient is on the device."""
    up: npt.NDArray[np.intp]
    """(parameters,) where the new weight goes: `_UP`, `_KEEP`, `_COPY` or `_NOTHING`."""
    kept: npt.NDArray[np.bool_]
    """(parameters,) whether the gradient is on SSD."""
    streams: bool
    """Pieces are read and written."""

    def turns(self, ahead: int) -> list[tuple[int, int]]:
        """(kind, parameter) of each op in the order of Rules 1 and 2; `ahead`: pieces that are read ahead."""
        count = len(self.here)
        read, write = ([_READ], [_WRITE]) if self.streams else ([], [])
        reads = [[*read, *([_GRADIENT] if kept else [])] for kept in self.kept.tolist()]
        found = [(kind, i) for i in range(min(ahead, count)) for kind in reads[i]]
        for i, (down, new) in enumerate(zip(self.here.tolist(), self.up.tolist(), strict=True)):
            kinds = [*(reads[i] if ahead == 0 else []), *([_DOWN] if down else []), _UPDATE]
            kinds += [*([new] if new != _NOTHING else []), *write]
            found += [(kind, i) for kind in kinds]
            if ahead and i + ahead < count:
                found += [(kind, i + ahead) for kind in reads[i + ahead]]
        return found


def swept_from_ssd(step: Step, ahead: int, away: Away) -> Step:
    """`step` with its optimizer's ops replaced by a sweep at its beginning, of the gradients that the step
    before has left.

    The pass of `offload.ssd_states.ssd_lock_free`, at a pace at which a sweep takes the gradients of one
    step.

    Args:
        step: What `offload.parameters.parameter_offload_pass` made.
        ahead: Pieces that are read ahead.
        away: Parameters that are not on the device: some of it.
    """
    columns, (mine, optimizer) = columns_of(step.parameters), _updated(step, away)
    on_device = columns.gradient >= 0
    if not len(mine) or not optimizer.any():
        return step
    edit, here = Edit(step), on_device[mine]
    edit.drop_ops(optimizer)
    sizes, landed = columns.numel[mine] * columns.itemsize[mine].astype(np.int64), away.gradients[mine[~here]]
    edit.storages.held_until[landed] = FOREVER
    pieces = Pieces.on_ssd(edit, step, mine)
    traffic = {_READ: pieces.n_bytes, _UPDATE: pieces.update_bytes, _WRITE: pieces.n_bytes, _COPY: 2 * sizes}
    traffic |= dict.fromkeys((_DOWN, _UP, _KEEP, _GRADIENT), sizes)
    nothing = np.zeros(len(mine), bool)
    rows, _ = _insert(
        edit, 0, traffic, ahead, _Ways(nothing, np.full(len(mine), _COPY), nothing, True), Phase.BOUNDARY
    )
    host = pieces.stream(edit, rows[_READ], rows[_UPDATE], rows[_WRITE])
    nowhere = np.full(len(mine), -1, np.int32)
    old = edit.add_storages(sizes, producer=nowhere, tier=Tier.HOST, kind=Kind.GRADIENT, owner=pieces.owner)
    edit.add_uses(rows[_UPDATE], old, mode=WRITES)
    edit.add_uses(rows[_COPY], host)
    pages = (
        (step.storages.kind == Kind.PARAMETER)
        & (step.storages.tier == Tier.HOST)
        & (step.storages.producer < 0)
    )
    _published(edit, step.storages.bytes[pages], step.storages.owner[pages])
    published = _published(edit, sizes[here], pieces.owner[here])
    _delivered(edit, step, mine[here], published, int(np.flatnonzero(optimizer)[0]))
    return edit.done()


def _published(edit: Edit, n_bytes: I64, owner: I32) -> I32:
    """Host memory for weights that a sweep writes."""
    nowhere, forever = np.full(len(n_bytes), -1, np.int32), np.full(len(n_bytes), FOREVER, np.int32)
    return edit.add_storages(
        n_bytes, producer=nowhere, tier=Tier.HOST, kind=Kind.PARAMETER, held_until=forever, owner=owner
    )


def _delivered(edit: Edit, step: Step, mine: npt.NDArray[np.intp], published: I32, anchor: int) -> None:
    """Gradients of the parameters `mine` go down and stay there, then the `published` weights come up, before
    the op `anchor`.
    """
    columns = columns_of(step.parameters)
    gradients, sizes = columns.gradient[mine], columns.numel[mine] * columns.itemsize[mine].astype(np.int64)
    at, forever = np.full(len(mine), anchor, np.int32), np.full(len(mine), FOREVER, np.int32)
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
        held_until=forever,
        owner=step.storages.owner[gradients],
    )
    edit.add_uses(down, gradients)
    freed = step.storages.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.storages.held_until[gradients[freed]] = -1
    edit.let_go_before(gradients[freed], np.append(down[1:], up[:1])[freed])
    edit.add_uses(up, published)
    edit.add_uses(up, columns.storage[mine], mode=WRITES)
    edit.hold_to_the_end_of_step(int(up[-1]))


def _insert(
    edit: Edit, anchor: int, traffic: dict[int, I64], ahead: int, ways: _Ways, phase: Phase = Phase.OPTIMIZER
) -> tuple[I32, int]:
    """The ops of all turns, before the op `anchor`; returns (8, parameters) rows, -1 where there is no op,
    and the last op.

    Args:
        edit: Of the step.
        anchor: An op.
        traffic: (parameters,) bytes of each op, by its kind.
        ahead: Pieces that are read ahead.
        ways: What there is to do.
        phase: Of the ops.
    """
    kind, index = np.asarray(ways.turns(ahead), np.int32).T
    names = np.asarray(
        [edit.name_id(f"{'aten' if name == 'copy_' else 'memtune'}.{name}.default") for name, _ in _OPS],
        np.int32,
    )
    rows = edit.add_ops(
        names[kind],
        before=np.full(len(kind), anchor, np.int32),
        phase=phase,
        resource=np.asarray([resource for _, resource in _OPS], np.uint8)[kind],
        traffic_bytes=np.stack([traffic[each] for each in range(len(_OPS))])[kind, index],
        stream=(kind == _UP).astype(np.uint8),  # a copy back is complete in stream order
        prefetch=(kind == _DOWN).astype(np.uint8),
    )
    found = np.full((len(_OPS), len(ways.here)), -1, np.int32)
    found[kind, index] = rows
    return found, int(rows[-1])


# The pass of `offload.ssd_states.ssd_parameters`: gradients that have landed on the host are written to SSD,
# where the step finds them.
def gradients_on_ssd(step: Step, away: Away) -> tuple[Step, Away]:
    """`step` with the gradients of `away` on SSD between landing and the optimizer, and where they are.

    Args:
        step: What `offload.parameters.parameter_offload_pass` made and left to the optimizer.
        away: Of it.
    """
    parameters = np.flatnonzero(away.gradients >= 0).astype(np.int32)
    if not len(parameters):
        return step, away
    edit, summed = Edit(step), bool((step.storages.producer[away.gradients[parameters]] < 0).any())
    brought = (
        _landed(step, away.gradients[parameters])[1]
        if summed
        else step.storages.producer[away.gradients[parameters]]
    )
    parameters = parameters[np.argsort(brought, kind="stable")]
    kept = away.gradients[parameters]
    hosts, copies, adds = _landed(step, kept) if summed else (kept, step.storages.producer[kept], kept)
    n_bytes = step.storages.bytes[hosts]
    if summed:
        places, after = kept, adds
        edit.set_storages(tier=step.storages.tier.copy())
        edit.storages.tier[kept] = Tier.SSD
        edit.storages.held_until[kept] = FOREVER
        _read_sums(edit, step, kept, hosts, copies, adds)
    else:
        nowhere, forever = np.full(len(kept), -1, np.int32), np.full(len(kept), FOREVER, np.int32)
        places = edit.add_storages(
            n_bytes, producer=nowhere, tier=Tier.SSD, kind=Kind.GRADIENT, held_until=forever, owner=parameters
        )
        after = _arrived(step, copies)
    write = edit.add_ops(
        "memtune.write_ssd_.default",
        after=after,
        phase=Phase.BACKWARD,
        resource=Resource.SSD_WRITE,
        traffic_bytes=n_bytes,
    )
    edit.add_uses(write, hosts)
    edit.add_uses(write, places, mode=WRITES)
    _release_after(
        edit, step, after, write, step.storages.kind == Kind.COMMUNICATION
    )  # units, when a moment begins
    if int(after[-1]) >= int(np.flatnonzero(step.ops.phase < Phase.BOUNDARY)[-1]):
        edit.hold_to_the_end_of_backward(int(write[-1]))
    edit.storages.held_until[hosts] = -1
    edit.let_go_before(hosts[:-WRITES_IN_FLIGHT], write[WRITES_IN_FLIGHT:])
    edit.hold_through(hosts[-WRITES_IN_FLIGHT:], np.full(len(hosts[-WRITES_IN_FLIGHT:]), write[-1], np.int32))
    moved = np.arange(step.storages.n, dtype=np.int32)
    moved[kept] = places
    used_later = step.use_phase == Phase.OPTIMIZER
    edit.set_uses(storage=np.where(used_later, moved[step.uses.storage], edit.uses.storage).astype(np.int32))
    gradients = away.gradients.copy()
    gradients[parameters] = places
    return edit.done(), replace(away, gradients=gradients)


def _release_after(edit: Edit, step: Step, after: I32, ops: I32, which: npt.NDArray[np.bool_]) -> None:
    """What of the device's storages `which` is let go at `after[i]` is let go at the op `ops[i]`, which comes
    right after it.
    """
    op_of = np.full(step.ops.n, -1, np.int32)
    op_of[after] = ops
    ends = (
        which
        & (step.storages.tier == Tier.DEVICE)
        & (step.storages.producer >= 0)
        & (step.freed_after < step.ops.n)
    )
    mine = np.flatnonzero(ends).astype(np.int32)
    until = op_of[step.freed_after[mine]]
    edit.hold_through(mine[until >= 0], until[until >= 0])


def _landed(step: Step, sums: I32) -> tuple[I32, I32, I32]:
    """Of each of `sums` on the host: the gradient that is added to it, the op that brought it, and the
    addition.
    """
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
    """Rule 2: each sum comes to the host while the gradient does; the addition is into the gradient's
    memory.
    """
    n_bytes = step.storages.bytes[hosts]
    read = edit.add_ops(
        "memtune.from_ssd.default",
        after=copies,
        phase=Phase.BACKWARD,
        resource=Resource.SSD_READ,
        traffic_bytes=n_bytes,
        prefetch=1,
    )
    edit.add_uses(read, sums)
    _release_after(
        edit, step, copies, read, np.ones(step.storages.n, bool)
    )  # autograd holds on until the hook returns
    so_far = edit.add_storages(
        n_bytes, producer=read, tier=Tier.HOST, kind=Kind.GRADIENT, owner=step.storages.owner[hosts]
    )
    row_of = np.full(step.ops.n, -1, np.int32)
    row_of[adds] = np.arange(len(adds))
    row = row_of[step.uses.op]
    swapped = np.where(step.uses.mode == WRITES, hosts[row], so_far[row])
    edit.set_uses(storage=np.where(row >= 0, swapped, edit.uses.storage).astype(np.int32))


def _arrived(step: Step, copies: I32) -> I32:
    """The op after which each copy is finished: the device lets go of its source, or the next copy out of
    that begins.
    """
    source = _sources(step, copies)
    after = step.freed_after[source].copy()
    shared = np.flatnonzero(source[1:] == source[:-1])  # rows of a block's gradients, which lie side by side
    after[shared] = copies[shared + 1] - 1
    return after


def _sources(step: Step, copies: I32) -> I32:
    """What each copy reads on the device."""
    found = np.full(step.ops.n, -1, np.int32)
    reads = step.uses.mode == READS
    found[step.uses.op[reads]] = step.uses.storage[reads]
    return found[copies]
