"""The pass of `offload.experts.expert_offload`: experts on SSD, those of current blocks resident, a host
cache between.

The experts that a batch uses are not known in advance, but a recorded step shows which of them got rows
(`used_in`). If its idle experts are no accident, such a step is predicted. Otherwise the pass predicts the
step that uses all of them, which bounds memory and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.offload.experts.host_cache import expert_traffic
from memtune.offload.parameters import first_ops, stream_parameters
from memtune.program import (
    I32,
    I64,
    WRITES_IN_FLIGHT,
    Edit,
    Kind,
    Mask,
    Phase,
    Resource,
    Rule,
    Step,
    Tier,
    columns_of,
    gathers_of,
    memoized,
    owners_in_update,
    raw_gradients,
    rows_of_gradients,
    window_residency,
)
from memtune.workload import Expert

_OPS = (("write_ssd_", Resource.SSD_WRITE), ("from_ssd", Resource.SSD_READ))


@dataclass(frozen=True)
class ExpertOffloadSpec:
    """The knobs of `offload.experts.expert_offload`."""

    slots: int
    rule: Rule
    read_ahead: int
    on_device: int


def hide_dense_parameters(step: Step, experts: tuple[Expert, ...]) -> Step:
    """Return `step` as if its blocks had no parameters but experts, for `parameter_offload_pass`."""
    columns = columns_of(step.parameters)
    block = np.full(len(columns.block), -1, np.int32)
    expert_rows = _parameters(experts)
    block[expert_rows] = columns.block[expert_rows]
    return replace(step, parameters=replace(columns, block=block))


def _parameters(experts: tuple[Expert, ...]) -> npt.NDArray[np.intp]:
    return np.asarray(sorted(index for expert in experts for index in expert.parameters), np.intp)


_CHANCE_MAX = 0.01
"""Largest probability of an idle expert under even routing at which idle experts count as no accident."""


@memoized
def used_in(step: Step, experts: tuple[Expert, ...]) -> tuple[Expert, ...]:
    """Return the experts that get rows in any step like this; all if its routing may be an accident."""
    # A product with no row has no FLOPs. If T rows are distributed at random over E experts, some
    # expert gets none with a probability of at most E (1 - 1/E)^T.
    columns, forward = columns_of(step.parameters), step.ops.phase == Phase.FORWARD
    flops = np.zeros(step.storages.n)
    np.add.at(flops, step.uses.storage, np.where(forward, step.ops.flops, 0.0)[step.uses.op])
    # The weight of a product, not its bias, which has no FLOPs of its own.
    largest = [max(expert.parameters, key=lambda index: columns.numel[index]) for expert in experts]
    # A row times a weight: one multiplication and one addition per element.
    rows = flops[columns.storage[largest]] / (2 * columns.numel[largest])
    block = np.asarray([expert.block for expert in experts])
    for each in np.unique(block[rows == 0]):
        count, dealt = int((block == each).sum()), float(rows[block == each].sum())
        if count * (1 - 1 / count) ** dealt > _CHANCE_MAX:
            return experts
    return tuple(expert for expert, got in zip(experts, rows.tolist(), strict=True) if got)


def _without_memory(step: Step, idle: npt.NDArray[np.intp]) -> Step:
    """Return `step` with parameters `idle`, which no op reads, and their gradients of no bytes (Rule 1)."""
    columns = columns_of(step.parameters)
    n_bytes = step.storages.bytes.copy()
    numel = columns_of(step.parameters).numel.copy()
    gradients = np.concatenate([columns.gradient[idle], raw_gradients(step)[idle]])
    n_bytes[columns.storage[idle]] = 0
    n_bytes[gradients[gradients >= 0]] = 0
    # No rows: `stream_parameters` then moves no bytes for them.
    numel[idle] = 0
    return replace(step, parameters=replace(columns, numel=numel)).with_storages(bytes=n_bytes)


def experts_on_ssd(
    step: Step, experts: tuple[Expert, ...], spec: ExpertOffloadSpec, used: tuple[Expert, ...]
) -> Step:
    """Return `step` with its experts on SSD.

    Args:
        step: A step whose `hide_dense_parameters` is accepted by
            `offload.parameters.parameter_offload_pass.not_in_layers`.
        experts: Of the step.
        spec: The knobs.
        used: The experts that get rows.
    """
    blocks, before = len(step.blocks), columns_of(step.parameters)
    idle = _parameters(tuple(expert for expert in experts if expert not in set(used)))
    gathered = gathers_of(step) is not None
    if gathered:
        step = with_separate_gradients(step, ~np.isin(np.arange(len(before.block)), _parameters(experts)))
    shown = hide_dense_parameters(_without_memory(step, idle), experts)
    streamed = stream_parameters(
        shown, window_residency(blocks, min(spec.on_device, blocks), gathered=gathered)
    )
    # Idle experts have rows again: their records on SSD are whole.
    streamed = replace(streamed, parameters=replace(columns_of(streamed.parameters), numel=before.numel))
    edit, expert_rows = Edit(streamed), _parameters(experts)
    gradients = (
        (streamed.storages.tier == Tier.HOST)
        & (streamed.storages.kind == Kind.GRADIENT)
        & (streamed.storages.producer >= 0)
        & np.isin(streamed.storages.owner, expert_rows)
    )
    # Each is freed after its own update, not with the others of its block.
    edit.storages.held_until[gradients] = -1
    state = _on_ssd(edit, streamed, step, expert_rows)
    _drop_optimizer_uses(edit, streamed, step, expert_rows)
    pieces, experts = _piece_bytes(streamed, expert_rows, state), used
    n_bytes = np.asarray([sum(pieces[i] for i in expert.parameters) for expert in experts])
    # The host cache: every slot has room for the largest expert.
    held = np.asarray([min(spec.slots, len(experts)) * int(n_bytes.max())])
    edit.add_persistent(held, Kind.BUFFER, Tier.HOST)
    _transfers(edit, streamed, experts, spec, n_bytes)
    if spec.slots < len(experts):  # records that are being written
        held = np.asarray(
            [max(int(pieces[list(expert.parameters[-WRITES_IN_FLIGHT:])].sum()) for expert in experts)]
        )
        edit.add_persistent(held, Kind.BUFFER, Tier.HOST)
    # Parameters that are no experts belong to their blocks again.
    edit.parameters = replace(columns_of(streamed.parameters), block=before.block)
    return edit.done()


def _counters(step: Step, plain: Step, expert_rows: npt.NDArray[np.intp]) -> Mask:
    """Return (m,) True for the step counters of `expert_rows`."""
    # Counters have no owner; there is one for each parameter, in order.
    there = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0) & (step.storages.owner < 0)
    )
    given = np.flatnonzero(columns_of(plain.parameters).gradient >= 0)
    found = np.zeros(step.storages.n, bool)
    if len(there) == len(given):
        found[there[np.searchsorted(given, expert_rows)]] = True
    return found


def _on_ssd(edit: Edit, step: Step, plain: Step, expert_rows: npt.NDArray[np.intp]) -> I32:
    """Move weights and moments of `expert_rows` to SSD, step counters to the host; return the moments."""
    columns = columns_of(step.parameters)
    theirs = (step.storages.producer < 0) & np.isin(step.storages.owner, expert_rows)
    weights = theirs & (step.storages.kind == Kind.PARAMETER) & (step.storages.tier == Tier.HOST)
    state = theirs & (step.storages.kind == Kind.OPTIMIZER)
    size = np.zeros(step.storages.n, np.int64)
    size[theirs] = columns.n_bytes[step.storages.owner[theirs]]
    # Moments are as large as their weight; counters are small and remain in host memory.
    moments = state & (step.storages.bytes == size)
    state |= _counters(step, plain, expert_rows)
    # Experts without rows had no bytes so far, but have their place on SSD.
    edit.storages.bytes[weights] = size[weights]
    edit.set_storages(
        tier=np.where(
            weights | moments, np.uint8(Tier.SSD), np.where(state, np.uint8(Tier.HOST), step.storages.tier)
        ).astype(np.uint8)
    )
    return np.flatnonzero(moments).astype(np.int32)


def _drop_optimizer_uses(edit: Edit, step: Step, plain: Step, expert_rows: npt.NDArray[np.intp]) -> None:
    """Drop the uses of experts' storages by the optimizer's own ops, and the bytes of what these make of
    them: a foreach op has temporaries of all parameters.
    """
    columns, inside = columns_of(plain.parameters), step.ops.phase == Phase.OPTIMIZER
    theirs = np.isin(owners_in_update(step), expert_rows)
    theirs[columns.storage[expert_rows]] = True
    edit.storages.bytes[theirs & (step.storages.producer >= 0) & inside[step.storages.producer]] = 0
    edit.drop_uses((step.use_phase == Phase.OPTIMIZER) & theirs[step.uses.storage])


def _piece_bytes(step: Step, expert_rows: npt.NDArray[np.intp], moments: I32) -> I64:
    columns = columns_of(step.parameters)
    found = np.bincount(
        step.storages.owner[moments], step.storages.bytes[moments], len(columns.numel)
    ).astype(np.int64)
    found[expert_rows] += columns.n_bytes[expert_rows]
    return found


def _transfers(
    edit: Edit, step: Step, experts: tuple[Expert, ...], spec: ExpertOffloadSpec, n_bytes: I64
) -> None:
    """Add reads and writes of a steady step, before the first op of each moment."""
    end = step.backward_end + 1
    begins = np.append(first_ops(step), np.asarray([end], np.int32))
    boundary = len(begins) - 1
    gathered = gathers_of(step) is not None
    knobs = spec.slots, spec.rule, spec.read_ahead, spec.on_device, gathered
    moved = expert_traffic([each.block for each in experts], len(step.blocks), *knobs)
    # Kind 0 is a write, 1 a read, in the order of `_OPS`.
    moved_experts = [
        (kind, expert, moment)
        for moment, each in enumerate(moved)
        for kind in (0, 1)
        for expert in each[kind]
    ]
    kind, expert, moment = np.asarray(moved_experts, np.int32).reshape(-1, 3).T
    phase = np.where(moment < len(step.blocks), Phase.FORWARD, Phase.BACKWARD)
    phase = np.where(moment == boundary, Phase.BOUNDARY, phase)
    edit.add_kinds(
        [(f"memtune.{name}.default", resource) for name, resource in _OPS],
        kind,
        before=begins[moment].astype(np.int32),
        phase=phase.astype(np.uint8),
        traffic_bytes=n_bytes[expert],
    )


def with_separate_gradients(step: Step, resident: Mask) -> Step:
    """Return `step`, sharded by FSDP2, with the reduced gradients of some parameters in memory of their own.

    Args:
        step: A step in which all parameters of blocks belong to their block.
        resident: (parameters,) True for gradients to copy; sums of earlier micro-batches are copies already.
    """
    # Reduced gradients of a block are views of one buffer; copied ones do not keep others in memory.
    columns, rows = columns_of(step.parameters), rows_of_gradients(step)
    expert_rows, edit = rows.where(resident[rows.parameter]), Edit(step)
    if (expert_rows.sums >= 0).any():
        edit.storages.bytes[rows.sums] = np.bincount(
            expert_rows.sums, expert_rows.n_bytes, step.storages.n
        ).astype(np.int64)[rows.sums]
        return edit.done()
    clones = edit.add_ops(
        "aten.clone.default",
        after=expert_rows.after,
        phase=Phase.BACKWARD,
        resource=Resource.COMPUTE,
        traffic_bytes=2 * expert_rows.n_bytes,
        call=step.ops.call[expert_rows.after],
        reads=expert_rows.raw,
    )
    made = edit.add_storages(
        expert_rows.n_bytes,
        producer=clones,
        kind=Kind.GRADIENT,
        held_until=step.storages.held_until[expert_rows.raw],
        owner=expert_rows.parameter,
    )
    gradient = columns.gradient.copy()
    gradient[expert_rows.parameter] = made
    _replace_optimizer_reads(edit, step, rows.raw, expert_rows.parameter, made)
    edit.parameters = replace(columns, gradient=gradient)
    return edit.done()


def _replace_optimizer_reads(edit: Edit, step: Step, raw: I32, parameter: I32, made: I32) -> None:
    """Let each update of a weight read its own gradient."""
    inside = step.use_phase == Phase.OPTIMIZER
    edit.drop_uses(inside & np.isin(step.uses.storage, raw))
    of = np.full(len(step.parameters) + 1, -1, np.int32)  # index -1 (no parameter) reads the last entry
    of[parameter] = made
    weights = np.flatnonzero(inside & (of[step.parameter_of[step.uses.storage]] >= 0))
    edit.add_uses(step.uses.op[weights], of[step.parameter_of[step.uses.storage[weights]]])
