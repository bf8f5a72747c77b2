"""The pass of `runtime.sharding`: what FSDP2 does to one rank's step, buffer by buffer.

Seen by recording FSDP2 (torch 2.13) on fake tensors: a unit's shards are gathered into one buffer, which is copied out
into the parameters and held until the *next* unit has copied out; backward gathers one unit ahead; the buffer that is
reduce-scattered is held until the next unit's gradients are there.

On CUDA gathers and reductions have streams of their own: a gather waits, in forward, for the copy-out of the unit two before it
and in backward for the one before it (`wait_for_unshard`). On CPU every collective is waited for at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.gathers import Gathered, When, gather_units
from memtune.passes.reductions import Reduced, reduce_gradients
from memtune.passes.shares import Mask, divided, raw_gradients, shards_of
from memtune.passes.units import Ragged, Units, units_of
from memtune.passes.waiting import waiting_sources
from memtune.program import I32, I64, Kind, Phase, Step
from memtune.sharding import Sharding


def shard_states(step: Step, how: Sharding) -> Step:
    """`step` as one rank runs it under FSDP2."""
    units = units_of(step, how.blocks_per_unit)
    edit = Edit(step)
    uses = _Redirect(step)
    if len(units):
        kept = np.full(len(units), not how.reshard_after_forward)
        kept[0] |= units.has_root and how.keeps_root
        secondary = _forward(edit, step, how, units, kept, uses)
        if not kept.all():
            _backward(edit, step, how, units, kept, secondary, uses)
    reduced = reduce_gradients(edit, step, how)
    edit.use_storage = uses.apply(edit.use_storage)
    return _resized(edit, step, how, reduced)


class _Redirect:
    """Which uses of a whole parameter now go to which gathered copy: by op range, before the optimizer."""

    def __init__(self, step: Step) -> None:
        self._rows, self._parameter, self._forward = _parameter_uses(step)
        # (parameters,) the copies that forward and that backward use.
        self._in_forward = np.full(len(step.parameters), -1, np.int32)
        self._in_backward = self._in_forward.copy()

    def to(self, parameters: I32, storages: I32, *, forward: bool) -> None:
        (self._in_forward if forward else self._in_backward)[parameters] = storages

    def apply(self, use_storage: I32) -> I32:
        new = np.where(self._forward, self._in_forward[self._parameter], self._in_backward[self._parameter])
        redirected = use_storage.copy()
        redirected[self._rows[new >= 0]] = new[new >= 0]
        return redirected


@functools.lru_cache(maxsize=8)
def _parameter_uses(step: Step) -> tuple[I64, I32, Mask]:
    """The uses of parameters before the optimizer: their rows, which parameter each reads, and whether it is in forward."""
    parameter = step.parameter_of[step.use_storage]
    rows = np.flatnonzero((parameter >= 0) & (step.use_phase < Phase.BOUNDARY))
    return rows, parameter[rows], step.use_phase[rows] == Phase.FORWARD


def _forward(edit: Edit, step: Step, how: Sharding, units: Units, kept: Mask, uses: _Redirect) -> _Secondary | None:
    """Gather each unit when its forward starts; its buffer stays until the next unit has copied out, the last to the end."""
    whole = _whole(step, how, units.parameters)
    place = np.arange(len(units))
    when = When(np.maximum(place - (how.prefetch or 0), 0), place, units.first_forward)
    made = gather_units(edit, whole, when, Phase.FORWARD, how.degree, ahead=how.ahead(Phase.FORWARD), stream=how.gather_stream)
    unit, waiting = _waiting_sources(step, how.blocks_per_unit)
    edit.hold_through(waiting, _last_at(made, when)[unit])
    # What stays gathered between forward and backward.
    edit.hold_through(made.whole, np.where(kept, units.last_backward, units.last_forward)[whole.part])
    edit.hold_through(made.buffer, np.append(made.copy[1:], step.leave[-1:]))
    secondary = None
    if how.group_after_forward < how.degree and not kept.all():
        divided = ~kept
        divided[0] &= not units.has_root
        secondary = _keep(edit, how, made, whole, np.where(divided, units.last_forward, -1).astype(np.int32))
    uses.to(units.parameters.values, made.whole, forward=True)
    again = kept[whole.part]
    uses.to(units.parameters.values[again], made.whole[again], forward=False)
    return secondary


def _last_at(made: Gathered, when: When) -> I32:
    """(units,) the last op put before the forward of each: its own copy, or the last gather that runs ahead from there."""
    last = made.copy.copy()
    ahead = when.issued < when.used
    last[when.issued[ahead]] = made.gather[ahead]  # of several gathers in one place the last one stays
    return last


def _whole(step: Step, how: Sharding, parameters: Ragged) -> Ragged:
    """Bytes of each parameter when gathered, padded to what the ranks hold."""
    return replace(parameters, values=shards_of(columns_of(step.parameters), how.degree).n_bytes[parameters.values] * how.degree)


@dataclass(frozen=True, eq=False)
class _Secondary:
    """What groups smaller than the sharding degree keep of units between forward and backward, parameter by parameter."""

    part: I32
    """(units, parameters) flattened: the storage of each, -1 where there is none."""


def _keep(edit: Edit, how: Sharding, made: Gathered, whole: Ragged, last_forward: I32) -> _Secondary:
    """Copy this rank's part of each parameter when its unit's forward ends, then let the whole one go."""
    mine = np.flatnonzero(last_forward[whole.part] >= 0)
    n_bytes = whole.values[mine] // how.group_after_forward
    copy = edit.add_ops(
        "aten.clone.default", after=last_forward[whole.part[mine]], phase=Phase.FORWARD, traffic_bytes=2 * n_bytes
    )
    parts = np.full(len(whole.values), -1, np.int32)
    parts[mine] = edit.add_storages(n_bytes, producer=copy, kind=Kind.COMMUNICATION)
    edit.add_uses(copy, made.whole[mine])
    return _Secondary(parts)


@functools.lru_cache(maxsize=8)
def _waiting_sources(step: Step, blocks_per_unit: int) -> tuple[I32, I32]:
    """Units whose forward starts with a copy to the host, and what the copy before it holds until then, pair by pair."""
    return waiting_sources(step, units_of(step, blocks_per_unit).first_forward)


def _backward(
    edit: Edit, step: Step, how: Sharding, units: Units, kept: Mask, secondary: _Secondary | None, uses: _Redirect
) -> None:
    """Gather again, by default one unit ahead: its buffer is filled when the backward of the one after it (forward) starts."""
    order = np.arange(len(units))[::-1]
    if units.has_root:  # its backward begins where the model's does
        order = np.concatenate([order[-1:], order[:-1]])
    starts, place = units.first_backward[order], np.arange(len(order))
    order, place = order[~kept[order]], place[~kept[order]]
    early = np.maximum(place - (1 if how.prefetch is None else how.prefetch), 0)
    when = When(early, place, starts)
    parameters = units.parameters.picked(order)
    whole = _whole(step, how, parameters)
    groups = np.where((order == 0) & units.has_root, how.degree, how.group_after_forward)
    made = gather_units(edit, whole, when, Phase.BACKWARD, groups, ahead=how.ahead(Phase.BACKWARD), stream=how.gather_stream)
    edit.hold_through(made.whole, units.last_backward[order][whole.part])
    uses.to(parameters.values, made.whole, forward=False)
    if secondary is not None:
        parts = Ragged(secondary.part, units.parameters.count).picked(order)
        there = parts.values >= 0
        edit.hold_through(parts.values[there], made.copy[parts.part[there]])


def _resized(edit: Edit, step: Step, how: Sharding, reduced: Reduced) -> Step:
    """Parameters, state and the optimizer's temporaries at shard size; the optimizer reads the sharded gradients."""
    columns, mine = columns_of(step.parameters), reduced.of.parameters
    shards = shards_of(columns, how.degree)
    raw = reduced.of.raw[reduced.of.raw >= 0]
    # Between the first and the last micro-batch whole sums all stay to the end: with three and more an upper end.
    end = np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]
    edit.held_until[raw] = int(end) if how.sums == "whole" and how.micro_batches > 2 else -1
    edit.kind[raw] = Kind.TEMPORARY
    rows, owner = divided(step)
    ratio = shards.numel / np.maximum(columns.numel, 1)
    edit.bytes[rows] = np.round(edit.bytes[rows] * ratio[owner]).astype(np.int64)
    edit.bytes[raw] = step.bytes[raw]
    gradient = np.full(len(columns.gradient), -1, np.int32)
    if reduced.of.accumulated:
        edit.drop_ops(_whole_sums(step))
    if reduced.of.accumulated and how.sums == "further":
        sums = columns.gradient[columns.gradient >= 0]
        edit.bytes[sums], edit.held_until[sums] = 0, -1
    if reduced.of.accumulated and how.sums == "shards":
        joined = _sums_by_unit(edit, columns.gradient, mine)
        edit.use_storage = joined[edit.use_storage]
        gone = np.flatnonzero(joined[: step.n_storages] != np.arange(step.n_storages))
        np.add.at(edit.bytes, joined[gone], edit.bytes[gone])
        edit.bytes[gone] = 0
        gradient[columns.gradient >= 0] = joined[columns.gradient[columns.gradient >= 0]]
        landing = edit.landing
    else:
        taken, landing = reduced.taken[mine.part], reduced.taken
        gradient[mine.values] = taken
        moved = np.full(step.n_storages, -1, np.int32)
        moved[columns.gradient[mine.values]] = taken
        later = _uses_after_backward(step)
        target = moved[step.use_storage[later]]
        edit.use_storage = edit.use_storage.copy()
        edit.use_storage[later[target >= 0]] = target[target >= 0]
        edit.hold_through(reduced.taken, np.full(len(reduced.taken), step.n_ops - 1, np.int32))
    edit.landing = landing
    edit.parameters = replace(columns, gradient=gradient, shapes=shards.shapes, numel=shards.numel)
    return edit.done()


@functools.lru_cache(maxsize=8)
def _uses_after_backward(step: Step) -> I64:
    """Rows of the uses by ops that run once a step, after backward."""
    return np.flatnonzero(step.use_phase >= Phase.BOUNDARY)


def _whole_sums(step: Step) -> Mask:
    """(n,) ops of later micro-batches that add a whole gradient: sums are kept sharded and added to after the reduction."""
    gradient = np.zeros(step.n_storages + 1, bool)  # the last entry serves "none"
    gradient[columns_of(step.parameters).gradient[raw_gradients(step) >= 0]] = True
    adds = (step.use_mutates == 1) & gradient[step.use_storage] & (step.use_phase < Phase.BOUNDARY)
    adds &= step.producer[step.use_storage] < 0
    dropped = np.zeros(step.n_ops, bool)
    dropped[step.use_op[adds]] = True
    return dropped


def _sums_by_unit(edit: Edit, gradient: I32, parameters: Ragged) -> I32:
    """By storage, the one that holds its bytes: the gradients of a unit are parts of one storage, also when summed."""
    joined = np.arange(edit.n_storages, dtype=np.int32)
    joined[gradient[parameters.values]] = gradient[parameters.values[parameters.starts]][parameters.part]
    return joined
