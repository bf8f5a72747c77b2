"""Pass of `offload.optimizer.host_optimizer`: state on the host, D2H of gradients, H2D of weights; and the
conditions of its native update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from memtune import refusals
from memtune.program import (
    FOREVER,
    I32,
    I64,
    Edit,
    Kind,
    Mask,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
    moments_of_parameters,
    one_by_one,
    own_update,
)
from memtune.technique import Reason, Target

UPDATES = {
    "user": ", by your optimizer",
    "native": "",
    "master": ", from float32 masters of bfloat16 weights",
}
"""End of a sentence about an update on the host, by the knob `update`."""


@dataclass(frozen=True)
class Native:
    """A native update: bytes per element of its moments, and elements that share a scale (0: no scales)."""

    moment_bytes: int = 4
    block: int = 0


def optimizer_on_host(
    step: Step, native: Native | None = None, with_offloader: I32 | None = None, n_resident_ops: int = 0
) -> Step:
    """Return `step` with the optimizer's ops on host threads and its state in host memory.

    Args:
        step: Any step.
        native: One pass over each parameter instead of the optimizer's ops; narrower parameters have float32
            masters.
        with_offloader: Parameters whose weights an offloader copies to the device when they are used.
        n_resident_ops: Number of the optimizer's first ops that run on the device with all that they touch
            (`offload.optimizer.resident_state_pass`).
    """
    if native is None:
        step = one_by_one(step, n_resident_ops)
    columns = columns_of(step.parameters)
    on_device, resident = of_first_ops(step, n_resident_ops)
    offloaded = columns.trainable & (columns.gradient >= 0) & ~resident[columns.storage]
    weights, gradients = columns.storage[offloaded], columns.gradient[offloaded]
    sizes = columns.n_bytes[offloaded]  # of parts of a shared storage, where sharded
    optimizer = step.ops.phase == Phase.OPTIMIZER
    if not optimizer.any():
        return step
    if not len(weights):  # an offloader moves the weights and gradients of all parameters
        edit = Edit(step)
        if native is not None:
            without_own_update(edit, step, n_resident_ops)
        on_host(edit, step, optimizer & ~on_device, resident)
        return edit.done()
    first, last = np.flatnonzero(optimizer)[[0, -1]].astype(np.int32)
    edit = Edit(step)
    host_gradients = _gradients_to_host(edit, step, gradients, sizes, first)
    owner = step.storages.owner[gradients]
    master_bytes = sizes if native is None else 4 * columns.numel[offloaded]
    host_weights = edit.add_persistent(master_bytes, Kind.PARAMETER, Tier.HOST, owner)
    # The optimizer's ops are the recorded ones; only the storages that they touch are on the host.
    moved = np.arange(step.storages.n, dtype=np.int32)
    moved[gradients], moved[weights] = host_gradients, host_weights
    inside = step.use_phase == Phase.OPTIMIZER
    edit.set_uses(storage=np.where(inside, moved[edit.uses.storage], edit.uses.storage))
    if native is not None:
        _one_pass(edit, step, native, np.flatnonzero(offloaded), host_weights, host_gradients)
    # An offloader loads a weight at its next use, so the step copies none.
    copied = (
        np.ones(len(weights), bool)
        if with_offloader is None
        else ~np.isin(np.flatnonzero(offloaded), with_offloader)
    )
    held = (
        host_weights
        if native is None
        else np.where(columns.itemsize[offloaded] == 4, host_weights, host_gradients)
    )
    up = _weights_to_device(edit, weights[copied], held[copied], sizes[copied], last)
    # A bfloat16 gradient's memory holds the new weight until it is on the device; others are freed at the
    # same place.
    edit.hold_through(host_gradients[copied], up)
    if not copied.all():
        edit.hold_through(host_gradients[~copied], np.full(int((~copied).sum()), last, np.int32))
    if len(up):
        edit.hold_to_the_end_of_step(int(up[-1]))
    on_host(edit, step, optimizer & ~on_device, resident)
    return edit.done()


def _gradients_to_host(edit: Edit, step: Step, gradients: I32, n_bytes: I64, first: np.int32) -> I32:
    """Add D2H copies of `gradients` before the optimizer's op `first`; return their storages on the host."""
    at = np.full(len(gradients), first, np.int32)
    down = _copies(edit, "memtune.to_host.default", at, gradients, n_bytes, Resource.DEVICE_TO_HOST)
    # A gradient is freed on the device when the next one's copy starts, the last one when its own has ended.
    freed = step.storages.held_until[gradients] != FOREVER  # views of DDP's buckets, which are permanent
    edit.storages.held_until[gradients[freed]] = -1
    edit.release_before(gradients[:-1][freed[:-1]], down[1:][freed[:-1]])
    owner = step.storages.owner[gradients]
    return edit.add_storages(n_bytes, producer=down, tier=Tier.HOST, kind=Kind.GRADIENT, owner=owner)


def _weights_to_device(edit: Edit, weights: I32, held: I32, n_bytes: I64, last: np.int32) -> I32:
    """Insert the H2D copies of the new weights, from the host storages `held`, after the op `last`."""
    return edit.add_ops(
        "memtune.copy_to_device_.default",
        after=np.full(len(weights), last, np.int32),
        phase=Phase.OPTIMIZER,
        resource=Resource.HOST_TO_DEVICE,
        traffic_bytes=n_bytes,
        stream=1,  # on the compute stream: complete in its order
        reads=held,
        writes=weights,
    )


def of_first_ops(step: Step, count: int) -> tuple[Mask, Mask]:
    """Return masks of the optimizer's first `count` ops and of the storages that they touch."""
    ops, storages = np.zeros(step.ops.n, bool), np.zeros(step.storages.n, bool)
    if count:
        ops[np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[:count]] = True
        storages[step.uses.storage[ops[step.uses.op]]] = True
        storages |= (step.storages.producer >= 0) & ops[step.storages.producer]
    return ops, storages


def _copies(edit: Edit, name: str, before: I32, storages: I32, sizes: I64, resource: Resource) -> I32:
    return edit.add_ops(
        name,
        before=before,
        phase=Phase.BOUNDARY,
        resource=resource,
        traffic_bytes=sizes,
        prefetch=1,
        reads=storages,
    )


def _one_pass(
    edit: Edit, step: Step, native: Native, offloaded: npt.NDArray[np.intp], weights: I32, gradients: I32
) -> None:
    """Replace the optimizer's ops by one op per parameter, with state in the format of `native`."""
    optimizer = without_own_update(edit, step)
    updates = edit.add_ops(
        "memtune.host_update_.default",
        before=np.full(len(offloaded), optimizer[-1], np.int32),
        phase=Phase.OPTIMIZER,
        resource=Resource.HOST_THREADS,
        traffic_bytes=update_bytes(step, native, offloaded),
    )
    update_by(edit, step, native, offloaded, updates)
    for written in (weights, gradients):
        edit.add_uses(updates, writes=written)


def without_own_update(edit: Edit, step: Step, n_resident_ops: int = 0) -> npt.NDArray[np.intp]:
    """Drop the optimizer's own ops except the first `n_resident_ops`; return their rows."""
    optimizer = own_update(step) & ~of_first_ops(step, n_resident_ops)[0]
    edit.drop_ops(optimizer)
    return np.flatnonzero(optimizer)


def update_bytes(step: Step, native: Native, offloaded: npt.NDArray[np.intp]) -> I64:
    """Return the bytes that each native pass moves: gradient, weight, moments read and written."""
    columns, (_, at) = columns_of(step.parameters), moments_of_parameters(step, offloaded)
    numel, itemsize = columns.numel[offloaded], columns.itemsize[offloaded].astype(np.int64)
    # One float32 scale per block of 8-bit moments.
    scales = -(-numel[at] // native.block) * 4 if native.block else np.zeros(len(at), np.int64)
    each = 2 * (native.moment_bytes * numel[at] + scales)
    # The float32 weight, read and written, and the gradient; a narrow gradient's memory is also written.
    found: I64 = 8 * numel + np.where(itemsize == 4, 1, 2) * itemsize * numel
    return found + np.bincount(at, each, len(offloaded)).astype(np.int64)


def update_by(edit: Edit, step: Step, native: Native, offloaded: npt.NDArray[np.intp], updates: I32) -> None:
    """Let the op `updates[i]` change the state of parameter `offloaded[i]`, in the format of `native`."""
    columns, (state, at) = columns_of(step.parameters), moments_of_parameters(step, offloaded)
    numel = columns.numel[offloaded]
    edit.storages.bytes[state] = native.moment_bytes * numel[at]
    edit.add_uses(updates[at], writes=state)
    if native.block:
        scale_bytes = -(-numel[at] // native.block) * 4
        held = edit.add_persistent(scale_bytes, Kind.OPTIMIZER, Tier.HOST, step.storages.owner[state])
        edit.add_uses(updates[at], writes=held)


def on_host(edit: Edit, step: Step, optimizer: Mask, resident: Mask | None = None) -> None:
    """Move optimizer state (except `resident`) and results to the host, and the ops to host threads."""
    computes = optimizer & (step.ops.resource == Resource.COMPUTE)
    edit.set_storages(tier=step.storages.tier.copy())
    state = (step.storages.kind == Kind.OPTIMIZER) & ~(np.False_ if resident is None else resident)
    edit.storages.tier[state | ((step.storages.producer >= 0) & computes[step.storages.producer])] = Tier.HOST
    edit.set_ops(resource=np.where(computes, np.uint8(Resource.HOST_THREADS), step.ops.resource))


# Conditions of the native update on optimizers and parameters.
_OWN = "offload: {states: {kind: optimizer_cpu, update: user}}"


def unknown_optimizer(target: Target) -> Reason | None:
    """Return why the native update cannot replace the user's optimizer."""
    why = "" if target.optimizer is None else target.optimizer.native_refusal
    return Reason(why, _OWN) if why else None


def no_state_to_offload(step: Step) -> Reason | None:
    """Return the reason if no parameter is trained, or the optimizer has no state."""
    is_trained = (columns_of(step.parameters).gradient >= 0).any()
    has_state = is_trained and (step.storages.kind == Kind.OPTIMIZER).any()
    return None if has_state else refusals.no_optimizer_state()


def no_native_update(step: Step, update: Literal["native", "master"], target: Target) -> Reason | None:
    """Return why the host's native update does not apply: an unknown optimizer, or a parameter type.

    `native` is for float32 parameters, `master` for narrower ones.
    """
    if (reason := unknown_optimizer(target)) is not None:
        return reason
    columns = columns_of(step.parameters)
    sizes = set(columns.itemsize[columns.gradient >= 0].tolist())
    if update == "native" and sizes != {4}:
        return refusals.float32_weights("update: master")
    if update == "master" and 2 not in sizes:
        return Reason("the parameters are float32 themselves", "update: native")
    return None


def not_contiguous(step: Step) -> Reason | None:
    """Return why a parameter is no flat row of elements: it has gaps in memory, or shares it."""
    columns = columns_of(step.parameters)
    wrong = (columns.gradient >= 0) & (step.storages.bytes[columns.storage] != columns.n_bytes)
    if not wrong.any():
        return None
    name = columns.names[int(np.argmax(wrong))]
    return refusals.not_contiguous(name)
