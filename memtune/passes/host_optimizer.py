"""The pass of `runtime.host_optimizer`: state and master weights on the host, gradients down, weights up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.program import FOREVER, I32, I64, Kind, Phase, Resource, Step, Tier


@dataclass(frozen=True)
class Native:
    """A native update in place of the optimizer's ops: bytes of an element of its moments, elements that share a scale."""

    moment_bytes: int = 4
    block: int = 0


def optimizer_on_host(step: Step, native: Native | None = None, stay_down: I32 | None = None, stay: int = 0) -> Step:
    """`step` with the optimizer's ops on host threads and its state in host memory.

    Args:
        step: Any step.
        native: One pass over each parameter in place of the optimizer's ops; narrower parameters have float32 masters.
        stay_down: Parameters whose weights somebody else brings up when they are used.
        stay: So many of the optimizer's ops, the first ones, stay on the device with all that they touch (`passes.stays`).
    """
    columns = columns_of(step.parameters)
    on_device, stays = of_first_ops(step, stay)
    mine = columns.trainable & (columns.gradient >= 0) & ~stays[columns.storage]
    weights, gradients = columns.storage[mine], columns.gradient[mine]
    sizes = columns.numel[mine] * columns.itemsize[mine]  # of parts of a shared storage, where sharded
    optimizer = step.op_phase == Phase.OPTIMIZER
    if not len(weights) or not optimizer.any():
        return step
    first, last = np.flatnonzero(optimizer)[[0, -1]].astype(np.int32)
    edit = Edit(step)
    down = _copies(
        edit, step, "memtune.to_host.default", np.full(len(weights), first, np.int32), gradients, sizes, Resource.DEVICE_TO_HOST
    )
    owner = step.owner[gradients]
    host_gradients = edit.add_storages(sizes, producer=down, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)
    host_weights = edit.add_storages(
        sizes if native is None else 4 * columns.numel[mine],
        producer=np.full(len(weights), -1, np.int32),
        tier=Tier.HOST,
        kind=Kind.PARAMETER,
        held_until=np.full(len(weights), FOREVER, np.int32),
        owner=owner,
    )
    moved = np.arange(step.n_storages, dtype=np.int32)
    moved[gradients], moved[weights] = host_gradients, host_weights
    inside = step.use_phase == Phase.OPTIMIZER
    edit.use_storage = np.where(inside, moved[edit.use_storage], edit.use_storage)

    # A gradient is let go on the device when the next one starts down, the last one when it has arrived.
    freed = step.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.held_until[gradients[freed]] = -1
    edit.let_go_before(gradients[:-1][freed[:-1]], down[1:][freed[:-1]])
    if native is not None:
        _one_pass(edit, step, native, np.flatnonzero(mine), host_weights, host_gradients)
    goes = np.ones(len(weights), bool) if stay_down is None else ~np.isin(np.flatnonzero(mine), stay_down)
    up = edit.add_ops(
        "memtune.copy_to_device_.default",
        after=np.full(int(goes.sum()), last, np.int32),
        phase=Phase.OPTIMIZER,
        resource=Resource.HOST_TO_DEVICE,
        traffic_bytes=sizes[goes],
        stream=1,  # a copy back is complete in stream order
    )
    held = host_weights if native is None else np.where(columns.itemsize[mine] == 4, host_weights, host_gradients)
    edit.add_uses(up, held[goes])
    edit.add_uses(up, weights[goes], mutates=True)
    edit.hold_through(host_gradients[goes], up)
    if not goes.all():
        edit.hold_through(host_gradients[~goes], np.full(int((~goes).sum()), last, np.int32))
    if len(up):
        edit.hold_to_the_end_of_step(int(up[-1]))
    on_host(edit, step, optimizer & ~on_device, stays)
    return edit.done()


def of_first_ops(step: Step, count: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The first `count` ops of the optimizer, and the storages that they touch."""
    ops, storages = np.zeros(step.n_ops, bool), np.zeros(step.n_storages, bool)
    if count:
        ops[np.flatnonzero(step.op_phase == Phase.OPTIMIZER)[:count]] = True
        storages[step.use_storage[ops[step.use_op]]] = True
        storages |= (step.producer >= 0) & ops[step.producer]
    return ops, storages


def _copies(edit: Edit, step: Step, name: str, before: I32, storages: I32, sizes: I64, resource: Resource) -> I32:
    ops = edit.add_ops(name, before=before, phase=Phase.BOUNDARY, resource=resource, traffic_bytes=sizes, prefetch=1)
    edit.add_uses(ops, storages)
    return ops


def _one_pass(edit: Edit, step: Step, native: Native, mine: npt.NDArray[np.intp], weights: I32, gradients: I32) -> None:
    """The optimizer's ops away, one op per parameter in their place; its state in the format of `native`."""
    optimizer = without_own_update(edit, step)
    updates = edit.add_ops(
        "memtune.host_update_.default",
        before=np.full(len(mine), optimizer[-1], np.int32),
        phase=Phase.OPTIMIZER,
        resource=Resource.HOST_THREADS,
        traffic_bytes=update_bytes(step, native, mine),
    )
    update_by(edit, step, native, mine, updates)
    edit.add_uses(updates, weights, mutates=True)
    edit.add_uses(updates, gradients, mutates=True)


def without_own_update(edit: Edit, step: Step, stay: int = 0) -> npt.NDArray[np.intp]:
    """Take the optimizer's own ops away, but for the first `stay`; returns where they were."""
    optimizer = (step.op_phase == Phase.OPTIMIZER) & (step.op_resource == Resource.COMPUTE) & ~of_first_ops(step, stay)[0]
    edit.drop_ops(optimizer)
    return np.flatnonzero(optimizer)


def _moments(step: Step, mine: npt.NDArray[np.intp]) -> tuple[I32, npt.NDArray[np.intp]]:
    """State storages as large as their parameter (the others count steps), and where that is among `mine`."""
    columns = columns_of(step.parameters)
    sizes = columns.numel[mine] * columns.itemsize[mine]
    chosen = np.zeros(len(columns.numel) + 1, bool)  # the last entry serves "none"
    chosen[mine] = True
    state = np.flatnonzero((step.kind == Kind.OPTIMIZER) & (step.producer < 0) & chosen[step.owner]).astype(np.int32)
    at = np.searchsorted(mine, step.owner[state])
    moments = step.bytes[state] == sizes[at]
    return state[moments], at[moments]


def update_bytes(step: Step, native: Native, mine: npt.NDArray[np.intp]) -> I64:
    """What one native pass over each parameter moves: gradient and weights, moments there and back."""
    columns, (_, at) = columns_of(step.parameters), _moments(step, mine)
    numel, itemsize = columns.numel[mine], columns.itemsize[mine].astype(np.int64)
    scales = -(-numel[at] // native.block) * 4 if native.block else np.zeros(len(at), np.int64)
    each = 2 * (native.moment_bytes * numel[at] + scales)
    found: I64 = 8 * numel + np.where(itemsize == 4, 1, 2) * itemsize * numel
    return found + np.bincount(at, each, len(mine)).astype(np.int64)


def update_by(edit: Edit, step: Step, native: Native, mine: npt.NDArray[np.intp], updates: I32) -> None:
    """The op `updates[i]` changes the state of parameter `mine[i]`, which is in the format of `native`."""
    columns, (state, at) = columns_of(step.parameters), _moments(step, mine)
    numel = columns.numel[mine]
    edit.bytes[state] = native.moment_bytes * numel[at]
    edit.add_uses(updates[at], state, mutates=True)
    if native.block:
        there, forever = np.full(len(at), -1, np.int32), np.full(len(at), FOREVER, np.int32)
        owner, scales = step.owner[state], -(-numel[at] // native.block) * 4
        held = edit.add_storages(scales, producer=there, tier=Tier.HOST, kind=Kind.OPTIMIZER, held_until=forever, owner=owner)
        edit.add_uses(updates[at], held, mutates=True)


def on_host(edit: Edit, step: Step, optimizer: npt.NDArray[np.bool_], stays: npt.NDArray[np.bool_] | None = None) -> None:
    """Optimizer state, but for `stays`, and what optimizer ops make to the host tier, the ops themselves to host threads."""
    computes = optimizer & (step.op_resource == Resource.COMPUTE)
    edit.tier = step.tier.copy()
    state = (step.kind == Kind.OPTIMIZER) & ~(np.False_ if stays is None else stays)
    edit.tier[state | ((step.producer >= 0) & computes[step.producer])] = Tier.HOST
    edit.op_resource = np.where(computes, np.uint8(Resource.HOST_THREADS), step.op_resource)
