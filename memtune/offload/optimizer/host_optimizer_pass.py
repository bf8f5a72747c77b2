"""Pass of `offload.optimizer.host_optimizer`: state and masters on the host, D2H of gradients, H2D of
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program import FOREVER, I32, I64, WRITES, Edit, Kind, Phase, Resource, Step, Tier, columns_of


@dataclass(frozen=True)
class Native:
    """A native update: bytes per element of its moments, and elements that share a scale (0: no scales)."""

    moment_bytes: int = 4
    block: int = 0


def optimizer_on_host(
    step: Step, native: Native | None = None, stay_down: I32 | None = None, stay: int = 0
) -> Step:
    """Return `step` with the optimizer's ops on host threads and its state in host memory.

    Args:
        step: Any step.
        native: One pass over each parameter instead of the optimizer's ops; narrower parameters have float32
            masters.
        stay_down: Parameters whose weights an offloader copies to the device when they are used.
        stay: Number of the optimizer's first ops that run on the device with all that they touch
            (`offload.optimizer.resident_state_pass`).
    """
    columns = columns_of(step.parameters)
    on_device, stays = of_first_ops(step, stay)
    mine = columns.trainable & (columns.gradient >= 0) & ~stays[columns.storage]
    weights, gradients = columns.storage[mine], columns.gradient[mine]
    sizes = columns.numel[mine] * columns.itemsize[mine]  # of parts of a shared storage, where sharded
    optimizer = step.ops.phase == Phase.OPTIMIZER
    if not len(weights) or not optimizer.any():
        return step
    first, last = np.flatnonzero(optimizer)[[0, -1]].astype(np.int32)
    edit = Edit(step)
    down = _copies(
        edit,
        step,
        "memtune.to_host.default",
        np.full(len(weights), first, np.int32),
        gradients,
        sizes,
        Resource.DEVICE_TO_HOST,
    )
    owner = step.storages.owner[gradients]
    host_gradients = edit.add_storages(sizes, producer=down, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)
    host_weights = edit.add_storages(
        sizes if native is None else 4 * columns.numel[mine],
        producer=np.full(len(weights), -1, np.int32),
        tier=Tier.HOST,
        kind=Kind.PARAMETER,
        held_until=np.full(len(weights), FOREVER, np.int32),
        owner=owner,
    )
    moved = np.arange(step.storages.n, dtype=np.int32)
    moved[gradients], moved[weights] = host_gradients, host_weights
    inside = step.use_phase == Phase.OPTIMIZER
    edit.set_uses(storage=np.where(inside, moved[edit.uses.storage], edit.uses.storage))

    # A gradient is let go on the device when the next one starts down, the last one when it has arrived.
    freed = step.storages.held_until[gradients] != FOREVER  # DDP's buckets stay
    edit.storages.held_until[gradients[freed]] = -1
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
    held = (
        host_weights
        if native is None
        else np.where(columns.itemsize[mine] == 4, host_weights, host_gradients)
    )
    edit.add_uses(up, held[goes])
    edit.add_uses(up, weights[goes], mode=WRITES)
    edit.hold_through(host_gradients[goes], up)
    if not goes.all():
        edit.hold_through(host_gradients[~goes], np.full(int((~goes).sum()), last, np.int32))
    if len(up):
        edit.hold_to_the_end_of_step(int(up[-1]))
    on_host(edit, step, optimizer & ~on_device, stays)
    return edit.done()


def of_first_ops(step: Step, count: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return masks of the optimizer's first `count` ops and of the storages that they touch."""
    ops, storages = np.zeros(step.ops.n, bool), np.zeros(step.storages.n, bool)
    if count:
        ops[np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[:count]] = True
        storages[step.uses.storage[ops[step.uses.op]]] = True
        storages |= (step.storages.producer >= 0) & ops[step.storages.producer]
    return ops, storages


def _copies(
    edit: Edit, step: Step, name: str, before: I32, storages: I32, sizes: I64, resource: Resource
) -> I32:
    ops = edit.add_ops(
        name, before=before, phase=Phase.BOUNDARY, resource=resource, traffic_bytes=sizes, prefetch=1
    )
    edit.add_uses(ops, storages)
    return ops


def _one_pass(
    edit: Edit, step: Step, native: Native, mine: npt.NDArray[np.intp], weights: I32, gradients: I32
) -> None:
    """Replace the optimizer's ops by one op per parameter, with state in the format of `native`."""
    optimizer = without_own_update(edit, step)
    updates = edit.add_ops(
        "memtune.host_update_.default",
        before=np.full(len(mine), optimizer[-1], np.int32),
        phase=Phase.OPTIMIZER,
        resource=Resource.HOST_THREADS,
        traffic_bytes=update_bytes(step, native, mine),
    )
    update_by(edit, step, native, mine, updates)
    edit.add_uses(updates, weights, mode=WRITES)
    edit.add_uses(updates, gradients, mode=WRITES)


def without_own_update(edit: Edit, step: Step, stay: int = 0) -> npt.NDArray[np.intp]:
    """Drop the optimizer's own ops except the first `n_resident_ops`; return their rows."""
    optimizer = (
        (step.ops.phase == Phase.OPTIMIZER)
        & (step.ops.resource == Resource.COMPUTE)
        & ~of_first_ops(step, stay)[0]
    )
    edit.drop_ops(optimizer)
    return np.flatnonzero(optimizer)


def _moments(step: Step, mine: npt.NDArray[np.intp]) -> tuple[I32, npt.NDArray[np.intp]]:
    """Return state storages as large as their parameter (others count steps), and its index in `mine`."""
    columns = columns_of(step.parameters)
    sizes = columns.numel[mine] * columns.itemsize[mine]
    chosen = np.zeros(len(columns.numel) + 1, bool)  # the last entry serves "none"
    chosen[mine] = True
    state = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0) & chosen[step.storages.owner]
    ).astype(np.int32)
    at = np.searchsorted(mine, step.storages.owner[state])
    moments = step.storages.bytes[state] == sizes[at]
    return state[moments], at[moments]


def update_bytes(step: Step, native: Native, mine: npt.NDArray[np.intp]) -> I64:
    """Return the bytes that one native pass over each parameter moves: gradient, weight, moments read and
    written.
    """
    columns, (_, at) = columns_of(step.parameters), _moments(step, mine)
    numel, itemsize = columns.numel[mine], columns.itemsize[mine].astype(np.int64)
    scales = -(-numel[at] // native.block) * 4 if native.block else np.zeros(len(at), np.int64)
    each = 2 * (native.moment_bytes * numel[at] + scales)
    found: I64 = 8 * numel + np.where(itemsize == 4, 1, 2) * itemsize * numel
    return found + np.bincount(at, each, len(mine)).astype(np.int64)


def update_by(edit: Edit, step: Step, native: Native, mine: npt.NDArray[np.intp], updates: I32) -> None:
    """Let the op `updates[i]` change the state of parameter `mine[i]`, in the format of `native`."""
    columns, (state, at) = columns_of(step.parameters), _moments(step, mine)
    numel = columns.numel[mine]
    edit.storages.bytes[state] = native.moment_bytes * numel[at]
    edit.add_uses(updates[at], state, mode=WRITES)
    if native.block:
        there, forever = np.full(len(at), -1, np.int32), np.full(len(at), FOREVER, np.int32)
        owner, scales = step.storages.owner[state], -(-numel[at] // native.block) * 4
        held = edit.add_storages(
            scales, producer=there, tier=Tier.HOST, kind=Kind.OPTIMIZER, held_until=forever, owner=owner
        )
        edit.add_uses(updates[at], held, mode=WRITES)


def on_host(
    edit: Edit, step: Step, optimizer: npt.NDArray[np.bool_], stays: npt.NDArray[np.bool_] | None = None
) -> None:
    """Move optimizer state, except `resident`, and results of optimizer ops to the host, and the ops to host
    threads.
    """
    computes = optimizer & (step.ops.resource == Resource.COMPUTE)
    edit.set_storages(tier=step.storages.tier.copy())
    state = (step.storages.kind == Kind.OPTIMIZER) & ~(np.False_ if stays is None else stays)
    edit.storages.tier[state | ((step.storages.producer >= 0) & computes[step.storages.producer])] = Tier.HOST
    edit.set_ops(resource=np.where(computes, np.uint8(Resource.HOST_THREADS), step.ops.resource))
