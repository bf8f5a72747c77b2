"""The optimizer's phase one parameter at a time, as torch runs it for parameters in host memory.

On an accelerator torch's optimizers take all parameters at once (foreach kernels), and their temporaries are
as large as all parameters together. A step that is translated for one keeps both forms: its ops are those of
the device, `Step.updates_on_host` those of the host, which a pass that moves the optimizer there puts in
their place. They name state by its parameter, since passes renumber storages and cut them into shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.program.edit import Edit
from memtune.program.parameter_columns import columns_of
from memtune.program.step import F64, FOREVER, I32, I64, U8, Kind, Phase, Resource, Step

_PLACES = 1 << 10
"""Keys of one parameter: its weight, its gradient, then its state."""


@dataclass(frozen=True, eq=False)
class UpdatesOnHost:
    """Ops that update one parameter after the other."""

    # (n,) ops
    names: tuple[str, ...]
    parameter: I32  # index of the parameter that it updates, -1 for several
    flops: F64
    traffic_bytes: I64

    # (t,) storages that they make
    producer: I32  # row of the ops
    bytes: I64
    held_until: I32  # row of the ops, FOREVER or -1
    owner: I32
    float_bytes: U8
    kind: U8

    # (u,) uses
    op: I32
    mode: U8
    made: I32  # row of the storages, -1 for one that exists before
    key: I64  # of a storage that exists before (`_known`)
    used_bytes: I64  # of the storage


def owners_in_update(step: Step) -> I32:
    """Return (m,) the parameter of each storage, counters included; -1 for none."""
    # A counter, which an op updates alone, comes before the other state of its parameter and gets that owner.
    owner, parameter = step.storages.owner.copy(), step.parameter_of
    owner[parameter >= 0] = parameter[parameter >= 0]
    state = np.flatnonzero((step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0))
    # State without an owner (step counters) belongs to the parameter whose moments follow it.
    known = np.flatnonzero(owner[state] >= 0)
    if len(known):
        following = np.minimum(np.searchsorted(known, np.arange(len(state))), len(known) - 1)
        owner[state] = owner[state[known[following]]]
    return owner


def own_update(step: Step) -> npt.NDArray[np.bool_]:
    """Return a mask of the ops of the user's optimizer, with those that count its steps on the host."""
    is_own = np.asarray([not name.startswith("memtune.") for name in step.names], bool)[step.ops.name]
    counts = (step.ops.resource == Resource.HOST_THREADS) & is_own
    mask: npt.NDArray[np.bool_] = (step.ops.phase == Phase.OPTIMIZER) & (
        (step.ops.resource == Resource.COMPUTE) | counts
    )
    return mask


def updates_on_host(step: Step) -> UpdatesOnHost | None:
    """Return the optimizer's phase of a step that is recorded on the CPU; None if it has another state than
    that of parameters.
    """
    ops = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)
    row = np.full(step.ops.n, -1, np.int32)
    row[ops] = np.arange(len(ops))
    producer, owner = step.storages.producer, owners_in_update(step)
    made = np.flatnonzero((producer >= 0) & (row[np.maximum(producer, 0)] >= 0))
    number = np.full(step.storages.n, -1, np.int32)
    number[made] = np.arange(len(made))
    uses = np.flatnonzero(row[step.uses.op] >= 0)
    used = step.uses.storage[uses]
    outside = np.unique(used[number[used] < 0])
    keys, storages = _known(step, owner)
    key = np.full(step.storages.n, -1, np.int64)
    key[storages] = keys
    if not len(ops) or (key[outside] < 0).any():
        return None
    held = step.storages.held_until[made]
    inside = (held >= 0) & (held != FOREVER)
    parameter = np.full(len(ops), -1, np.int32)
    np.maximum.at(parameter, row[step.uses.op[uses]], owner[used])
    return UpdatesOnHost(
        names=tuple(step.names[name] for name in step.ops.name[ops]),
        parameter=parameter,
        flops=step.ops.flops[ops],
        traffic_bytes=step.ops.traffic_bytes[ops],
        producer=row[producer[made]],
        bytes=step.storages.bytes[made],
        held_until=np.where(inside, row[np.where(inside, held, ops[-1])], held).astype(np.int32),
        owner=owner[made],
        float_bytes=step.storages.float_bytes[made],
        kind=step.storages.kind[made],
        op=row[step.uses.op[uses]],
        mode=step.uses.mode[uses],
        made=number[used],
        key=key[used],
        used_bytes=step.storages.bytes[used],
    )


def one_by_one(step: Step, n_first: int = 0) -> Step:
    """Return `step` with the optimizer's ops, except its first `n_first`, as they are on the host."""
    updates, own = step.updates_on_host, np.flatnonzero(own_update(step))[n_first:]
    if updates is None or not len(own):
        return step
    is_own = np.zeros(step.ops.n, bool)
    is_own[own] = True
    producer, owner = step.storages.producer, owners_in_update(step)
    is_made = (producer >= 0) & is_own[np.maximum(producer, 0)]
    used = step.uses.storage[is_own[step.uses.op]]
    keys, known = _known(step, owner)
    # Parameters that others update (another rank, the device) have no op here.
    mine = np.isin(updates.parameter, np.append(owner[used[~is_made[used]]], -1))
    uses = np.flatnonzero(mine[updates.op])
    of_state = uses[updates.made[uses] < 0]
    at = np.minimum(np.searchsorted(keys, updates.key[of_state]), len(keys) - 1)
    if (keys[at] != updates.key[of_state]).any():
        return step  # the state is another one by now
    # Of sharded parameters the update has a part, although the weight may be whole.
    scale = np.ones(len(step.parameters))
    part = step.storages.bytes[known[at]] / np.maximum(updates.used_bytes[of_state], 1)
    np.minimum.at(scale, updates.key[of_state] // _PLACES, part)
    edit = Edit(step)
    edit.drop_ops(is_own)
    rows = np.full(len(mine), -1, np.int32)
    ids = {name: edit.name_id(name) for name in dict.fromkeys(updates.names)}
    of_op = np.where(updates.parameter >= 0, scale[updates.parameter], 1.0)[mine]
    rows[mine] = edit.add_ops(
        np.asarray([ids[name] for name in updates.names], np.int32)[mine],
        before=np.full(int(mine.sum()), own[-1], np.int32),
        phase=Phase.OPTIMIZER,
        flops=updates.flops[mine] * of_op,
        traffic_bytes=np.rint(updates.traffic_bytes[mine] * of_op).astype(np.int64),
    )
    storage = np.full(len(updates.made), -1, np.int32)
    storage[of_state] = known[at]
    made = _made(edit, step, updates, rows, scale)
    of_made = uses[updates.made[uses] >= 0]
    storage[of_made] = made[updates.made[of_made]]
    for mode in np.unique(updates.mode).tolist():
        these = uses[updates.mode[uses] == mode]
        edit.add_uses(rows[updates.op[these]], storage[these], mode=mode)
    held = step.storages.held_until
    waits = np.flatnonzero((held >= own[0]) & (held != FOREVER) & ~is_made).astype(np.int32)
    # References that outlived the ops of the device outlive those of the host.
    edit.hold_through(waits, np.full(len(waits), rows.max(), np.int32))
    return replace(edit.done(), updates_on_host=None)


def _known(step: Step, owner: I32) -> tuple[I64, I32]:
    """Return ascending keys of what belongs to parameters (weights, gradients, state), and the storages."""
    columns = columns_of(step.parameters)
    parameter = np.arange(len(step.parameters), dtype=np.int64)
    with_gradient = columns.gradient >= 0
    state = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0) & (owner >= 0)
    )
    state = state[np.argsort(owner[state], kind="stable")]
    place = np.arange(len(state)) - np.searchsorted(owner[state], owner[state])
    keys = np.concatenate(
        [
            parameter * _PLACES,
            parameter[with_gradient] * _PLACES + 1,
            owner[state].astype(np.int64) * _PLACES + 2 + place,
        ]
    )
    storages = np.concatenate([columns.storage, columns.gradient[with_gradient], state]).astype(np.int32)
    order = np.argsort(keys)
    return keys[order], storages[order]


def _made(edit: Edit, step: Step, updates: UpdatesOnHost, rows: I32, scale: F64) -> I32:
    """Add what the ops in `rows` make; return (t,) the new storages, -1 for those of other ops."""
    there = np.flatnonzero(rows[updates.producer] >= 0)
    owner, n_bytes = updates.owner[there], updates.bytes[there]
    numel = columns_of(step.parameters).numel[owner]
    # Results of another shape (a number) are not cut with the parameter.
    whole = (owner >= 0) & (n_bytes >= numel) & (n_bytes % np.maximum(numel, 1) == 0)
    held = updates.held_until[there]
    inside = (held >= 0) & (held != FOREVER)
    kept = np.flatnonzero(rows >= 0)
    # Python frees a result when it makes the next parameter's.
    until = kept[np.minimum(np.searchsorted(kept, np.where(inside, held, 0)), len(kept) - 1)]
    made = np.full(len(updates.producer), -1, np.int32)
    made[there] = edit.add_storages(
        np.where(whole, np.rint(n_bytes * scale[owner]), n_bytes).astype(np.int64),
        producer=rows[updates.producer[there]],
        kind=updates.kind[there],
        held_until=np.where(inside, rows[until], held).astype(np.int32),
        owner=owner,
        float_bytes=updates.float_bytes[there],
    )
    return made
