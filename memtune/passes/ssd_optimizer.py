"""The pass of `runtime.ssd_optimizer`: weights and state on SSD, read, updated and written parameter by parameter.

That of `runtime.host_pieces` as well, where they are on the host and only gradients and new weights may be on SSD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.program import FOREVER, I32, I64, Kind, Phase, Resource, Step, Tier
from memtune.read_ahead import WRITES

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
        """Those of what `passes.stream` made, which left them to the optimizer, or of what came of that."""
        gradients, weights = (np.full(len(step.parameters), -1, np.int32) for _ in range(2))
        used = np.unique(step.use_storage[step.use_phase == Phase.OPTIMIZER])
        used = used[(step.kind[used] == Kind.GRADIENT) & (step.tier[used] != Tier.DEVICE)]
        gradients[step.owner[used]] = used
        kept = np.flatnonzero((step.kind == Kind.PARAMETER) & (step.producer < 0) & (step.tier != Tier.DEVICE)).astype(np.int32)
        for each in kept.tolist():  # pages hold those of all
            weights[gradients >= 0 if step.owner[each] < 0 else step.owner[each]] = each
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
    waits = np.where(here, Tier.DEVICE, step.tier[weights])
    is_master = (waits == Tier.HOST) & ~narrow if slots == 0 else np.zeros(len(mine), bool)
    masters = np.where(is_master, weights, -1)
    pieces = Pieces.on_ssd(edit, step, mine, slots) if slots else Pieces.on_host(edit, step, mine, masters)
    gradient_bytes = columns.numel[mine] * columns.itemsize[mine].astype(np.int64)
    up = np.where(is_master, _NOTHING, np.where(here, _UP, np.where(waits == Tier.SSD, _KEEP, _COPY)))
    traffic = {_READ: pieces.n_bytes, _UPDATE: pieces.update_bytes, _WRITE: pieces.n_bytes, _COPY: 2 * gradient_bytes}
    traffic |= dict.fromkeys((_DOWN, _UP, _KEEP, _GRADIENT), gradient_bytes)
    kept = ~here & (step.tier[away.gradients[mine]] == Tier.SSD)
    rows, last = _insert(edit, int(np.flatnonzero(optimizer)[0]), traffic, ahead, _Ways(here, up, kept, slots > 0))

    host = pieces.stream(edit, rows[_READ], rows[_UPDATE], rows[_WRITE]) if slots else pieces.stay(edit, rows[_UPDATE])
    gradients = away.gradients[mine]
    gradients[here] = _gradients_down(edit, step, mine[here], gradient_bytes[here], rows[:, here])
    edit.held_until[gradients[~here & ~kept]] = -1
    gradients[kept] = _gradients_read(edit, gradients[kept], gradient_bytes[kept], rows[_GRADIENT][kept], mine[kept])
    handed = np.flatnonzero(up != _NOTHING)
    new = rows[up[handed], handed]
    queue = up[handed] >= 0 if slots else up[handed] == _KEEP
    keeps = narrow[handed] & (up[handed] == _KEEP)  # written from the gradient's memory, as long as the piece
    _hold_while_written(edit, gradients[handed[queue]], new[queue], keeps[queue], last)
    edit.add_uses(rows[_UPDATE], gradients, mutates=True)
    edit.add_uses(new, np.where(narrow, gradients, host)[handed])
    edit.add_uses(new, weights[handed], mutates=True)
    edit.hold_to_the_end_of_step(last)
    return edit.done()


def _updated(step: Step, away: Away) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """The parameters that have a gradient, on the device or away, and which ops are the optimizer's own."""
    columns = columns_of(step.parameters)
    mine = np.flatnonzero(columns.trainable & ((columns.gradient >= 0) | (away.gradients >= 0)))
    return mine, (step.op_phase == Phase.OPTIMIZER) & (step.op_resource == Resource.COMPUTE)


def _gradients_down(edit: Edit, step: Step, mine: npt.NDArray[np.intp], n_bytes: I64, rows: I32) -> I32:
    """Gradients of the parameters `mine` on the host, let go on the device; `rows` are those of their ops."""
    gradients = columns_of(step.parameters).gradient[mine]
    owner = step.owner[gradients]
    down = edit.add_storages(n_bytes, producer=rows[_DOWN], tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)
    edit.add_uses(rows[_DOWN], gradients)
    freed = step.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.held_until[gradients[freed]] = -1
    edit.let_go_before(gradients[freed], rows[_UPDATE][freed])
    return down


def _gradients_read(edit: Edit, gradients: I32, n_bytes: I64, rows: I32, owner: npt.NDArray[np.intp]) -> I32:
    """Gradients on SSD as they are in host memory from their reads on."""
    edit.add_uses(rows, gradients)
    return edit.add_storages(n_bytes, producer=rows, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner.astype(np.int32))


def _hold_while_written(edit: Edit, gradients: I32, new: I32, keeps: npt.NDArray[np.bool_], last: int) -> None:
    """Python lets go of what is written when the write after the next one has begun, or all are over.

    Args:
        edit: Of the step.
        gradients: Of what is written, in the order of the writes.
        new: The op that hands each new weight on.
        keeps: What is written is the gradient's memory.
        last: The last op of all.
    """
    until = np.append(new[WRITES:], np.full(min(WRITES, len(new)), last, np.int32)).astype(np.int32)
    edit.hold_through(gradients[keeps], until[keeps])


@dataclass(frozen=True, eq=False)
class Pieces:
    """Weight and moments of each parameter that is updated, side by side on SSD, or on the host; one entry each."""

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
                pieces.n_bytes, producer=nowhere, tier=Tier.SSD, kind=Kind.OPTIMIZER, held_until=forever, owner=pieces.owner
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
        edit.bytes[state] = 4 * numel[at]
        edit.tier = np.where(step.kind == Kind.OPTIMIZER, np.uint8(Tier.HOST), step.tier).astype(np.uint8)
        edit.tier[state] = tier
        owner, masters, made = mine.astype(np.int32), masters.astype(np.int32), masters < 0
        nowhere, forever = np.full(int(made.sum()), -1, np.int32), np.full(int(made.sum()), FOREVER, np.int32)
        masters[made] = edit.add_storages(
            4 * numel[made], producer=nowhere, tier=tier, kind=Kind.PARAMETER, held_until=forever, owner=owner[made]
        )
        update_bytes = 8 * numel + np.where(itemsize == 4, 1, 2) * itemsize * numel + 2 * moment_bytes
        return cls(state, at, masters, 4 * numel + moment_bytes, update_bytes, owner)

    def stay(self, edit: Edit, update: I32) -> I32:
        """Each is updated where it is; returns the master weights."""
        edit.add_uses(update, self.masters, mutates=True)
        edit.add_uses(update[self.at], self.state, mutates=True)
        return self.masters

    def stream(self, edit: Edit, read: I32, update: I32, write: I32, order: npt.NDArray[np.intp] | None = None) -> I32:
        """Host memory of each from its read until two writes later; `order`: in which they are written. Returns the memory."""
        host = edit.add_storages(self.n_bytes, producer=read, tier=Tier.HOST, owner=self.owner)
        for ops, mutates in ((read, False), (write, True)):
            edit.add_uses(ops, self.masters, mutates=mutates)
            edit.add_uses(ops[self.at], self.state, mutates=mutates)
        edit.add_uses(update, host, mutates=True)
        edit.add_uses(write, host)
        held, written = (host, write) if order is None else (host[order], write[order])
        edit.let_go_before(held[:-WRITES], written[WRITES:])
        edit.hold_through(held[-WRITES:], np.full(len(held[-WRITES:]), written[-1], np.int32))
        return host


def _moments(step: Step, mine: npt.NDArray[np.intp]) -> tuple[I32, npt.NDArray[np.intp]]:
    """State storages as large as their parameter, and the index of each one's parameter among `mine`."""
    columns = columns_of(step.parameters)
    sizes = columns.numel[mine] * columns.itemsize[mine]
    state = np.flatnonzero((step.kind == Kind.OPTIMIZER) & (step.producer < 0) & np.isin(step.owner, mine)).astype(np.int32)
    at = np.searchsorted(mine, step.owner[state])
    moments = step.bytes[state] == sizes[at]  # the others count steps
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
    """`step` with its optimizer's ops replaced by a sweep at its beginning, of the gradients that the step before has left.

    The pass of `runtime.lock_free_on_ssd`, at a pace at which a sweep takes the gradients of one step.

    Args:
        step: What `passes.stream` made.
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
    edit.held_until[landed] = FOREVER
    pieces = Pieces.on_ssd(edit, step, mine)
    traffic = {_READ: pieces.n_bytes, _UPDATE: pieces.update_bytes, _WRITE: pieces.n_bytes, _COPY: 2 * sizes}
    traffic |= dict.fromkeys((_DOWN, _UP, _KEEP, _GRADIENT), sizes)
    nothing = np.zeros(len(mine), bool)
    rows, _ = _insert(edit, 0, traffic, ahead, _Ways(nothing, np.full(len(mine), _COPY), nothing, True), Phase.BOUNDARY)
    host = pieces.stream(edit, rows[_READ], rows[_UPDATE], rows[_WRITE])
    nowhere = np.full(len(mine), -1, np.int32)
    old = edit.add_storages(sizes, producer=nowhere, tier=Tier.HOST, kind=Kind.GRADIENT, owner=pieces.owner)
    edit.add_uses(rows[_UPDATE], old, mutates=True)
    edit.add_uses(rows[_COPY], host)
    pages = (step.kind == Kind.PARAMETER) & (step.tier == Tier.HOST) & (step.producer < 0)
    _published(edit, step.bytes[pages], step.owner[pages])
    published = _published(edit, sizes[here], pieces.owner[here])
    _delivered(edit, step, mine[here], published, int(np.flatnonzero(optimizer)[0]))
    return edit.done()


def _published(edit: Edit, n_bytes: I64, owner: I32) -> I32:
    """Host memory for weights that a sweep writes."""
    nowhere, forever = np.full(len(n_bytes), -1, np.int32), np.full(len(n_bytes), FOREVER, np.int32)
    return edit.add_storages(n_bytes, producer=nowhere, tier=Tier.HOST, kind=Kind.PARAMETER, held_until=forever, owner=owner)


def _delivered(edit: Edit, step: Step, mine: npt.NDArray[np.intp], published: I32, anchor: int) -> None:
    """Gradients of the parameters `mine` go down and stay there, then the `published` weights come up, before the op `anchor`."""
    columns = columns_of(step.parameters)
    gradients, sizes = columns.gradient[mine], columns.numel[mine] * columns.itemsize[mine].astype(np.int64)
    at, forever = np.full(len(mine), anchor, np.int32), np.full(len(mine), FOREVER, np.int32)
    found = {}
    for name, resource, stream in (("to_host", Resource.DEVICE_TO_HOST, 0), ("copy_to_device_", Resource.HOST_TO_DEVICE, 1)):
        found[name] = edit.add_ops(
            f"memtune.{name}.default", before=at, phase=Phase.OPTIMIZER, resource=resource, traffic_bytes=sizes, stream=stream,
            prefetch=1 - stream,
        )  # fmt: skip
    down, up = found["to_host"], found["copy_to_device_"]
    edit.add_storages(sizes, producer=down, tier=Tier.HOST, kind=Kind.GRADIENT, held_until=forever, owner=step.owner[gradients])
    edit.add_uses(down, gradients)
    freed = step.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.held_until[gradients[freed]] = -1
    edit.let_go_before(gradients[freed], np.append(down[1:], up[:1])[freed])
    edit.add_uses(up, published)
    edit.add_uses(up, columns.storage[mine], mutates=True)
    edit.hold_to_the_end_of_step(int(up[-1]))


def _insert(
    edit: Edit, anchor: int, traffic: dict[int, I64], ahead: int, ways: _Ways, phase: Phase = Phase.OPTIMIZER
) -> tuple[I32, int]:
    """The ops of all turns, before the op `anchor`; returns (8, parameters) rows, -1 where there is no op, and the last op.

    Args:
        edit: Of the step.
        anchor: An op.
        traffic: (parameters,) bytes of each op, by its kind.
        ahead: Pieces that are read ahead.
        ways: What there is to do.
        phase: Of the ops.
    """
    kind, index = np.asarray(ways.turns(ahead), np.int32).T
    names = np.asarray([edit.name_id(f"{'aten' if name == 'copy_' else 'memtune'}.{name}.default") for name, _ in _OPS], np.int32)
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
