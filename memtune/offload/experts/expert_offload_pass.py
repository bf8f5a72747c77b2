"""The pass of `offload.experts.expert_offload`: experts on SSD, those of the current blocks on the device, a
cache in host memory between.

Which experts a batch uses is not known before it runs, but a recorded step shows which of them got rows
(`used_in`). Where that is no accident, such a step is predicted, one after another. Elsewhere it is the step
that uses them all: no other needs more memory or moves more bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.offload.core import gathers_of, rows_of_gradients
from memtune.offload.experts.resume_experts_pass import hold_to_the_end, spare_places, write_what_stays
from memtune.offload.parameters import first_ops, stream_parameters
from memtune.program import (
    FOREVER,
    I32,
    WRITES,
    WRITES_IN_FLIGHT,
    Edit,
    Kind,
    Phase,
    Resource,
    Rule,
    Step,
    Tier,
    columns_of,
    raw_gradients,
    remembered,
    window,
)
from memtune.workload import Expert, trace

_OPS = (("write_ssd_", Resource.SSD_WRITE), ("from_ssd", Resource.SSD_READ))


@dataclass(frozen=True)
class How:
    """The knobs of `offload.experts.expert_offload`."""

    slots: int
    rule: Rule
    ahead: int
    on_device: int
    keeps: bool = False
    """Each complete step stays on SSD."""


def only_experts(step: Step, experts: tuple[Expert, ...]) -> Step:
    """`step` as if its blocks had no other parameters: what comes and goes by the rules of
    `offload.parameters.parameter_offload_pass`.
    """
    columns = columns_of(step.parameters)
    block = np.full(len(columns.block), -1, np.int32)
    mine = _parameters(experts)
    block[mine] = columns.block[mine]
    return replace(step, parameters=replace(columns, block=block))


def _parameters(experts: tuple[Expert, ...]) -> npt.NDArray[np.intp]:
    return np.asarray(sorted(index for expert in experts for index in expert.parameters), np.intp)


_BY_CHANCE = 0.01
"""A block's idle experts are no accident if even rows dealt evenly among all would leave one out with less
than this.
"""


@remembered
def used_in(step: Step, experts: tuple[Expert, ...]) -> tuple[Expert, ...]:
    """Those that get rows whenever a step like this one runs: all of them where its routing does not say.

    A product with no row has no FLOPs. Of E experts that T rows are dealt to at random, one gets none with a
    probability of E (1 - 1/E)^T at most.
    """
    columns, forward = columns_of(step.parameters), step.ops.phase == Phase.FORWARD
    flops = np.zeros(step.storages.n)
    np.add.at(flops, step.uses.storage, np.where(forward, step.ops.flops, 0.0)[step.uses.op])
    largest = [max(expert.parameters, key=lambda index: columns.numel[index]) for expert in experts]
    rows = flops[columns.storage[largest]] / (2 * columns.numel[largest])
    block = np.asarray([expert.block for expert in experts])
    for each in np.unique(block[rows == 0]):
        count, dealt = int((block == each).sum()), float(rows[block == each].sum())
        if count * (1 - 1 / count) ** dealt > _BY_CHANCE:
            return experts
    return tuple(expert for expert, got in zip(experts, rows.tolist(), strict=True) if got)


def _without_memory(step: Step, idle: npt.NDArray[np.intp]) -> Step:
    """`step` with the parameters `idle`, which nobody reads, of no bytes, nor their gradients: Rule 1."""
    columns, n_bytes, numel = (
        columns_of(step.parameters),
        step.storages.bytes.copy(),
        columns_of(step.parameters).numel.copy(),
    )
    gradients = np.concatenate([columns.gradient[idle], raw_gradients(step)[idle]])
    n_bytes[columns.storage[idle]] = 0
    n_bytes[gradients[gradients >= 0]] = 0
    numel[idle] = 0
    return replace(step, parameters=replace(columns, numel=numel)).with_storages(bytes=n_bytes)


def experts_on_ssd(
    step: Step, experts: tuple[Expert, ...], how: How, used: tuple[Expert, ...], ranks: int = 1
) -> Step:
    """`step` with its experts on SSD.

    Args:
        step: One of which `offload.parameters.parameter_offload_pass.not_in_layers` has nothing to say about
            `only_experts`.
        experts: Of the step.
        how: What is kept where.
        used: Those of them that get rows.
        ranks: Replicas that average gradients before updates.
    """
    blocks, before = len(step.blocks), columns_of(step.parameters)
    idle = _parameters(tuple(expert for expert in experts if expert not in set(used)))
    gathered = gathers_of(step) is not None
    if gathered:
        step = with_own_gradients(step, ~np.isin(np.arange(len(before.block)), _parameters(experts)))
    shown = only_experts(_without_memory(step, idle), experts)
    streamed = stream_parameters(shown, window(blocks, min(how.on_device, blocks), gathered=gathered))
    streamed = replace(streamed, parameters=replace(columns_of(streamed.parameters), numel=before.numel))
    edit, mine = Edit(streamed), _parameters(experts)
    gradients = (
        (streamed.storages.tier == Tier.HOST)
        & (streamed.storages.kind == Kind.GRADIENT)
        & np.isin(streamed.storages.owner, mine)
    )
    edit.storages.held_until[
        gradients & (streamed.storages.producer >= 0)
    ] = -1  # each is let go when its own update is over
    state = _on_ssd(edit, streamed, step, mine)
    _not_of_the_optimizer(edit, streamed, step, mine)
    pieces, experts = _piece_bytes(streamed, mine, state), used
    n_bytes = np.asarray([sum(pieces[i] for i in expert.parameters) for expert in experts])
    nowhere, forever = np.full(1, -1, np.int32), np.full(1, FOREVER, np.int32)
    held = np.asarray([min(how.slots, len(experts)) * int(n_bytes.max())])
    edit.add_storages(held, producer=nowhere, tier=Tier.HOST, kind=Kind.BUFFER, held_until=forever)
    leaves, at_end = _moves(edit, streamed, experts, how, n_bytes)
    if how.slots < len(experts) and (len(leaves) or not how.keeps):  # pieces that are being written
        held = np.asarray(
            [max(int(pieces[list(expert.parameters[-WRITES_IN_FLIGHT:])].sum()) for expert in experts)]
        )
        from_, until = (leaves, None) if how.keeps else (nowhere, forever)
        some = edit.add_storages(held, producer=from_, tier=Tier.HOST, kind=Kind.BUFFER, held_until=until)
        if how.keeps:
            edit.hold_through(some, at_end)
    if ranks > 1:
        _averages(edit, streamed, mine, ranks)
    if how.keeps:
        _keep(edit, streamed, mine, pieces, ranks)
    edit.parameters = replace(columns_of(streamed.parameters), block=before.block)
    return edit.done()


def _counters(step: Step, plain: Step, mine: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """(m,) what counts the steps of `mine`: nothing says whose a counter is, but there is one for each
    parameter, in order.
    """
    there = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0) & (step.storages.owner < 0)
    )
    given = np.flatnonzero(columns_of(plain.parameters).gradient >= 0)
    found = np.zeros(step.storages.n, bool)
    if len(there) == len(given):
        found[there[np.searchsorted(given, mine)]] = True
    return found


def _on_ssd(edit: Edit, step: Step, plain: Step, mine: npt.NDArray[np.intp]) -> I32:
    """Weights and moments of the parameters `mine` to SSD, what counts steps to the host; returns the
    moments.
    """
    columns = columns_of(step.parameters)
    theirs = (step.storages.producer < 0) & np.isin(step.storages.owner, mine)
    weights = theirs & (step.storages.kind == Kind.PARAMETER) & (step.storages.tier == Tier.HOST)
    state = theirs & (step.storages.kind == Kind.OPTIMIZER)
    size = np.zeros(step.storages.n, np.int64)
    size[theirs] = (columns.numel * columns.itemsize)[step.storages.owner[theirs]]
    moments = state & (step.storages.bytes == size)
    state |= _counters(step, plain, mine)
    edit.storages.bytes[weights] = size[weights]
    edit.set_storages(
        tier=np.where(
            weights | moments, np.uint8(Tier.SSD), np.where(state, np.uint8(Tier.HOST), step.storages.tier)
        ).astype(np.uint8)
    )
    return np.flatnonzero(moments).astype(np.int32)


def _not_of_the_optimizer(edit: Edit, step: Step, plain: Step, mine: npt.NDArray[np.intp]) -> None:
    """Its own ops no longer touch what belongs to experts."""
    columns = columns_of(plain.parameters)
    theirs = np.isin(step.storages.owner, mine)
    theirs[columns.storage[mine]] = True
    edit.drop_uses((step.use_phase == Phase.OPTIMIZER) & theirs[step.uses.storage])


def _piece_bytes(step: Step, mine: npt.NDArray[np.intp], moments: I32) -> npt.NDArray[np.int64]:
    columns = columns_of(step.parameters)
    found = np.bincount(
        step.storages.owner[moments], step.storages.bytes[moments], len(columns.numel)
    ).astype(np.int64)
    found[mine] += (columns.numel * columns.itemsize)[mine]
    return found


def _keep(
    edit: Edit, step: Step, mine: npt.NDArray[np.intp], pieces: npt.NDArray[np.int64], ranks: int
) -> None:
    """All that is trained has two places on SSD; what stays on the device is written to one, and ranks wait
    for each other.
    """
    spare_places(edit, pieces[mine])
    last = write_what_stays(edit, step, mine)
    if ranks > 1:
        end = np.full(1, step.ops.n, np.int32)
        last = _flags(edit, end, np.full(1, 4, np.int64), ranks, Phase.OPTIMIZER)
    if len(last):
        hold_to_the_end(edit, step, last)


def _moves(
    edit: Edit, step: Step, experts: tuple[Expert, ...], how: How, n_bytes: npt.NDArray[np.int64]
) -> tuple[I32, I32]:
    """Reads and writes of a steady step, before the first op of each moment.

    Returns the op from which on an expert leaves the cache to be written, if any does, and the first write at
    the step's end.
    """
    end = int(np.flatnonzero(step.ops.phase < Phase.BOUNDARY)[-1]) + 1
    begins = np.append(first_ops(step), np.asarray([end, step.ops.n], np.int32))
    boundary = len(begins) - 2
    gathered = gathers_of(step) is not None
    knobs = how.slots, how.rule, how.ahead, how.on_device, gathered, how.keeps
    moved = trace([each.block for each in experts], len(step.blocks), *knobs)
    turns = [
        (kind, expert, moment)
        for moment, each in enumerate(moved)
        for kind in (0, 1)
        for expert in each[kind]
    ]
    kind, expert, moment = np.asarray(turns, np.int32).reshape(-1, 3).T
    phase = np.where(moment < len(step.blocks), Phase.FORWARD, Phase.BACKWARD)
    phase = np.where(moment == boundary, Phase.BOUNDARY, np.where(moment > boundary, Phase.OPTIMIZER, phase))
    names = np.asarray([edit.name_id(f"memtune.{name}.default") for name, _ in _OPS], np.int32)
    rows = edit.add_ops(
        names[kind],
        before=begins[moment].astype(np.int32),
        phase=phase.astype(np.uint8),
        resource=np.asarray([resource for _, resource in _OPS], np.uint8)[kind],
        traffic_bytes=n_bytes[expert],
    )
    first = next((at for at, each in enumerate(moved) if each.room_for), -1)
    leaves = rows[(kind == 0) & (moment == first)][:1]
    if len(leaves):
        leaves = _since(step, experts, first, moved[first].room_for[0], leaves)
    return leaves, rows[moment > boundary][:1]


def _since(step: Step, experts: tuple[Expert, ...], moment: int, comes: int, write: I32) -> I32:
    """The op from which on an expert is being written that leaves the cache for the one that `comes`.

    Those of a block are updated one after the other: what has been updated before has let go of its
    gradients.
    """
    block = experts[comes].block
    if moment != 2 * len(step.blocks) - block:  # it comes to go up to the device
        return write
    updates, parameter = _updates(step)
    before = [index for each in experts[:comes] if each.block == block for index in each.parameters]
    over = updates[np.isin(parameter, before)][-1:]
    return over if len(over) else write


def _averages(edit: Edit, step: Step, mine: npt.NDArray[np.intp], ranks: int) -> None:
    """Before a block's updates flags, and each gradient up, averaged and down again; flags once more in the
    optimizer's step.
    """
    columns = columns_of(step.parameters)
    updates, parameter = _updates(step)
    of_block = np.bincount(columns.block[parameter], minlength=len(step.blocks))
    _, first = np.unique(columns.block[parameter], return_index=True)
    last = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)[:1].astype(np.int32)
    before = np.concatenate([updates[first], last])
    _flags(
        edit,
        before,
        8 * np.append(of_block[columns.block[parameter[first]]], len(mine)).astype(np.int64),
        ranks,
    )
    n_bytes = (columns.numel * columns.itemsize)[parameter]
    names = ("memtune.to_device.default", "memtune.all_reduce_.default", "memtune.to_host.default")
    resource = (Resource.HOST_TO_DEVICE, Resource.INTRA_LINK, Resource.DEVICE_TO_HOST)
    rows = edit.add_ops(
        np.tile(np.asarray([edit.name_id(name) for name in names], np.int32), len(updates)),
        before=np.repeat(updates, 3),
        phase=Phase.BOUNDARY,
        resource=np.tile(np.asarray(resource, np.uint8), len(updates)),
        traffic_bytes=np.repeat(n_bytes, 3),
        group=np.tile(np.asarray([0, ranks, 0], np.int32), len(updates)),
    ).reshape(-1, 3)
    there = edit.add_storages(n_bytes, producer=rows[:, 0], kind=Kind.TEMPORARY)
    edit.add_uses(rows[:, 1], there, mode=WRITES)
    edit.add_uses(rows[:, 2], there)


def _updates(step: Step) -> tuple[I32, I32]:
    """Updates on the host, and whose each is."""
    updates = np.flatnonzero(step.ops.name == step.names.index("memtune.host_update_.default")).astype(
        np.int32
    )
    weights, reads = np.isin(step.uses.op, updates), step.storages.kind[step.uses.storage] == Kind.PARAMETER
    owner = np.full(step.ops.n, -1, np.int32)
    owner[step.uses.op[weights & reads]] = step.storages.owner[step.uses.storage[weights & reads]]
    return updates, owner[updates]


def _flags(
    edit: Edit, before: I32, n_bytes: npt.NDArray[np.int64], ranks: int, phase: Phase = Phase.BOUNDARY
) -> I32:
    """A message of `n_bytes` before each op `before`; returns its row."""
    make, share = (
        edit.add_ops(name, before=before, phase=phase, resource=resource, traffic_bytes=traffic, group=group)
        for name, resource, traffic, group in (
            ("aten.new_empty.default", Resource.NOTHING, 0, 0),
            ("memtune.all_reduce_.default", Resource.INTRA_LINK, n_bytes, ranks),
        )
    )
    flags = edit.add_storages(n_bytes, producer=make, kind=Kind.COMMUNICATION)
    edit.add_uses(share, flags, mode=WRITES)
    return share


# Gradients that stay, copied out of the piece in which FSDP2 has reduced them with others of their block:
# those may leave.
def with_own_gradients(step: Step, stays: npt.NDArray[np.bool_]) -> Step:
    """`step`, divided by FSDP2, with the gradients of some parameters of blocks in memory of their own once
    they are reduced.

    Args:
        step: All parameters of whose blocks are said to be in them.
        stays: (parameters,) whose gradients are copied; sums of earlier micro-batches have been.
    """
    columns, rows = columns_of(step.parameters), rows_of_gradients(step)
    mine, edit = rows.where(stays[rows.parameter]), Edit(step)
    if (mine.sums >= 0).any():
        edit.storages.bytes[rows.sums] = np.bincount(mine.sums, mine.n_bytes, step.storages.n).astype(
            np.int64
        )[rows.sums]
        return edit.done()
    clones = edit.add_ops(
        "aten.clone.default",
        after=mine.after,
        phase=Phase.BACKWARD,
        resource=Resource.COMPUTE,
        traffic_bytes=2 * mine.n_bytes,
        call=step.ops.call[mine.after],
    )
    edit.add_uses(clones, mine.raw)
    made = edit.add_storages(
        mine.n_bytes,
        producer=clones,
        kind=Kind.GRADIENT,
        held_until=step.storages.held_until[mine.raw],
        owner=mine.parameter,
    )
    gradient = columns.gradient.copy()
    gradient[mine.parameter] = made
    _read_by_the_optimizer(edit, step, rows.raw, mine.parameter, made)
    edit.parameters = replace(columns, gradient=gradient)
    return edit.done()


def _read_by_the_optimizer(edit: Edit, step: Step, raw: I32, parameter: I32, made: I32) -> None:
    """Each update of a weight reads its own gradient."""
    inside = step.use_phase == Phase.OPTIMIZER
    edit.drop_uses(inside & np.isin(step.uses.storage, raw))
    of = np.full(len(step.parameters) + 1, -1, np.int32)  # its last entry serves -1
    of[parameter] = made
    weights = np.flatnonzero(inside & (of[step.parameter_of[step.uses.storage]] >= 0))
    edit.add_uses(step.uses.op[weights], of[step.parameter_of[step.uses.storage[weights]]])
