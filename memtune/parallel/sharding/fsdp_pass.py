"""The pass of `parallel.sharding.fsdp_sharding`: FSDP2's effect on one rank's step, buffer by buffer.

Observed by recording FSDP2 (torch 2.13) on fake tensors: a unit's shards are gathered into one buffer, which
is copied out into the parameters and held until the *next* unit has copied out; backward prefetches one unit;
the reduce-scatter input is held until the next unit's gradients are ready.

On CUDA all-gathers and reductions have streams of their own: a gather waits, in forward, for the copy-out of
the unit two before it and in backward for the one before it (`wait_for_unshard`). On CPU compute waits for
every collective at once.

One file: all-gathers and reductions share the visits of a unit, its streams and the order of its buffers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from memtune.parallel.sharding.unit_visits import (
    UnitVisits,
    backward_visits,
    forward_visits,
    mistargeted_prefetches,
    model_ends,
)
from memtune.program import (
    I32,
    I64,
    WRITES,
    Edit,
    FsdpUnits,
    Kind,
    Mask,
    Phase,
    PlacedOps,
    Ragged,
    Resource,
    Shards,
    Step,
    add_storages,
    columns_of,
    pending_copy_sources,
    raw_gradients,
    resize_to_shards,
    sharded_storages,
    shards_of,
    units_of,
)

_CAST, _EMPTY = "aten._to_copy.default", "aten.empty.memory_format"
_CAST_SHARDS = "aten._foreach_copy_.default"


def shard_states(step: Step, sharding: Sharding) -> Step:
    """Return `step` as one rank runs it under FSDP2."""
    units = units_of(step, sharding.blocks_per_unit)
    edit = Edit(step)
    uses = _Redirect(step)
    # Units without a backward are resharded, or their prefetch is dropped, when the whole backward has ended.
    to_the_end = [np.empty(0, np.int32)]
    if len(units):
        kept = np.full(len(units), not sharding.reshard_after_forward)
        # Unit 0 is the root if parameters lie outside of the blocks.
        kept[0] |= units.has_root and sharding.keeps_root
        secondary = _forward(edit, step, sharding, units, kept, uses, to_the_end)
        if not kept.all() or not backward_visits(step, sharding.blocks_per_unit).is_first.all():
            _backward(edit, step, sharding, units, kept, secondary, uses)
        if sharding.prefetch is None:
            to_the_end.append(_prefetch_without_use(edit, step, sharding, units, kept))
    reduced = reduce_gradients(edit, step, sharding)
    edit.hold_through(np.concatenate(to_the_end), reduced.last)
    # Last: the edits above add uses of full parameters that must not be redirected.
    edit.set_uses(storage=uses.apply(edit.uses.storage))
    return _resized(edit, step, sharding, reduced)


class _Redirect:
    """Redirects uses of a full parameter before the optimizer to its gathered copies, each the latest."""

    def __init__(self, step: Step) -> None:
        self._rows, self._parameter, forward = _parameter_uses(step)
        self._n_ops = step.ops.n + 1
        self._use = self._key(self._parameter, step.uses.op[self._rows], is_forward=forward)
        # (copies,) where each begins, and its storage.
        self._begins: list[I64] = []
        self._storages: list[I32] = []

    def _key(self, parameter: I32, op: I32, *, is_forward: bool | Mask) -> I64:
        """Return numbers that sort by parameter, pass and op."""
        found: I64 = (2 * parameter.astype(np.int64) + is_forward) * self._n_ops + op
        return found

    def add_copies(self, parameters: I32, begins: I32, storages: I32, *, forward: bool) -> None:
        self._begins.append(self._key(parameters, begins, is_forward=forward))
        self._storages.append(storages)

    def apply(self, use_storage: I32) -> I32:
        begins, storages = np.concatenate(self._begins), np.concatenate(self._storages)
        order = np.argsort(begins, kind="stable")
        begins, storages = begins[order], storages[order]
        after = np.searchsorted(begins, self._use, side="right")
        of = self._use // self._n_ops
        # A use before the first copy of its pass is of that copy.
        there = np.append(begins // self._n_ops, -1)
        place = np.where((after > 0) & (there[after - 1] == of), after - 1, after)
        found = there[place] == of
        redirected = use_storage.copy()
        redirected[self._rows[found]] = storages[place[found]]
        return redirected


@functools.lru_cache(maxsize=8)
def _parameter_uses(step: Step) -> tuple[I64, I32, Mask]:
    """Return the uses of parameters before the optimizer: rows, parameters, and True in forward."""
    parameter = step.parameter_of[step.uses.storage]
    rows = np.flatnonzero((parameter >= 0) & (step.use_phase < Phase.BOUNDARY))
    return rows, parameter[rows], step.use_phase[rows] == Phase.FORWARD


def _forward(
    edit: Edit,
    step: Step,
    sharding: Sharding,
    units: FsdpUnits,
    kept: Mask,
    uses: _Redirect,
    to_the_end: list[I32],
) -> _Secondary | None:
    """Gather each unit when its forward starts; it is held until the next unit has copied out."""
    visits = forward_visits(step, sharding.blocks_per_unit)
    place = np.flatnonzero(visits.is_first | ~kept[visits.unit])
    gathered = visits.picked(place)
    parameters = units.parameters.picked(gathered.unit)
    whole = _unsharded_bytes(step, sharding, parameters)
    casts = _cast_parameters(step, sharding, parameters)
    starts = visits.first if sharding.param_itemsize is None else _after_input_casts(step, visits)
    # A gather is issued when the unit `prefetch` places before in this call of the model is copied out.
    issued = np.maximum(place - (sharding.prefetch or 0), visits.model_call_begins[place])
    when = GatherTiming(issued, place, starts)
    again = ~gathered.is_first & ~(units.has_root & (gathered.unit == 0))
    made = gather_units(
        edit,
        whole,
        when,
        Phase.FORWARD,
        np.where(again, sharding.group_after_forward, sharding.degree),
        prefetch_distance=sharding.prefetch_distance(Phase.FORWARD),
        stream=sharding.gather_stream,
        casts=casts,
    )
    visit, waiting = _waiting_sources(step, sharding.blocks_per_unit)
    last_at = _last_at(made, when)[visit]
    edit.hold_through(waiting[last_at >= 0], last_at[last_at >= 0])
    # Units in `kept` remain gathered until the end of their first backward, the others until their forward
    # ends.
    backward = backward_visits(step, sharding.blocks_per_unit)
    until = np.zeros(len(units), np.int32)
    until[backward.unit[backward.is_first]] = backward.last[backward.is_first]
    held = np.where(kept[gathered.unit], until[gathered.unit], gathered.last)
    edit.hold_through(made.whole, held[whole.part])
    to_the_end.append(made.whole[(kept & (units.last_backward < 0))[gathered.unit][whole.part]])
    # FSDP2 keeps the last all-gather's result until the next copy-out has been issued on its stream.
    ends = model_ends(step)[gathered.model_call]
    follows = np.append(gathered.model_call[1:] == gathered.model_call[:-1], False)
    edit.hold_through(made.buffer, np.where(follows, np.append(made.copy[1:], -1), ends))
    secondary = None
    if sharding.group_after_forward < sharding.degree and not kept.all():
        divided = ~kept
        divided[0] &= not units.has_root
        secondary = _keep_secondary_shards(
            edit, sharding, made, whole, np.where(divided[gathered.unit], gathered.last, -1).astype(np.int32)
        )
        _hold_to_next(edit, gathered, secondary, whole, made.copy)
    uses.add_copies(parameters.values, gathered.first[whole.part], made.whole, forward=True)
    # Units that stay gathered are used by backward from forward's storages.
    resident = kept[gathered.unit][whole.part]
    uses.add_copies(
        parameters.values[resident],
        np.zeros(int(resident.sum()), np.int32),
        made.whole[resident],
        forward=False,
    )
    return secondary.of_last(gathered, units, whole) if secondary is not None else None


def _hold_to_next(edit: Edit, gathered: UnitVisits, secondary: _Secondary, whole: Ragged, copy: I32) -> None:
    """Hold the smaller shards of each visit until the next one of the unit has copied out."""
    later = np.flatnonzero(~gathered.is_first)
    for row in later.tolist():
        before = int(np.flatnonzero(gathered.unit[:row] == gathered.unit[row])[-1])
        parts = secondary.part[whole.part == before]
        edit.hold_through(parts[parts >= 0], np.full(int((parts >= 0).sum()), copy[row], np.int32))


def _after_input_casts(step: Step, visits: UnitVisits) -> I32:
    """Return (visits,) the first op of each forward behind the casts of its inputs."""
    # They precede the gather (torch/distributed/fsdp/_fully_shard/_fsdp_state.py `_pre_forward`).
    starts = visits.first.copy()
    if _CAST not in step.names:
        return starts
    casts = step.ops.name == step.names.index(_CAST)
    read, made = np.zeros(step.ops.n, np.int64), np.zeros(step.ops.n, np.int64)
    np.add.at(read, step.uses.op, step.storages.bytes[step.uses.storage])
    produced = np.flatnonzero(step.storages.producer >= 0)
    np.add.at(made, step.storages.producer[produced], step.storages.bytes[produced])
    narrows = casts & (made < read)
    for visit, start in enumerate(starts.tolist()):
        while start < visits.last[visit] and narrows[start]:
            start += 1
        starts[visit] = start
    return starts


def _last_at(made: GatheredUnit, when: GatherTiming) -> I32:
    """Return (places,) the last op inserted before the forward of each; -1 for none."""
    last = np.full(len(when.op), -1, np.int32)
    last[when.used] = made.copy
    prefetching = when.issued < when.used
    # Of several gathers issued at one place, numpy's assignment keeps the last one, which is wanted.
    last[when.issued[prefetching]] = made.gather[prefetching]
    return last


def _unsharded_bytes(step: Step, sharding: Sharding, parameters: Ragged) -> Ragged:
    """Return bytes of each parameter when gathered, padded to a multiple of the ranks."""
    columns = columns_of(step.parameters)
    shards = shards_of(columns, sharding.degree)
    itemsize = sharding.param_itemsize or columns.itemsize.astype(np.int64)
    return replace(parameters, values=(shards.numel * itemsize)[parameters.values] * sharding.degree)


def _cast_parameters(step: Step, sharding: Sharding, parameters: Ragged) -> Mask | None:
    """Return which of `parameters` are cast before a gather, those of another type; None if none is."""
    if sharding.param_itemsize is None:
        return None
    other: Mask = columns_of(step.parameters).itemsize[parameters.values] != sharding.param_itemsize
    return other if other.any() else None


@dataclass(frozen=True, eq=False)
class _Secondary:
    """Shards over smaller groups, which units keep between forward and backward, by parameter."""

    part: I32
    """(units, parameters) flattened: the storage of each, -1 where there is none."""

    def of_last(self, visits: UnitVisits, units: FsdpUnits, whole: Ragged) -> _Secondary:
        """Return those of the last visit of each unit; `self` and `whole` have an entry per visit."""
        last = np.empty(len(units), np.int64)
        last[visits.unit[visits.is_last]] = np.flatnonzero(visits.is_last)
        return _Secondary(Ragged(self.part, whole.count).picked(last).values)


def _keep_secondary_shards(
    edit: Edit, sharding: Sharding, made: GatheredUnit, whole: Ragged, last_forward: I32
) -> _Secondary:
    """Copy this rank's shard of each parameter when its unit's forward ends, then free the full parameter."""
    # -1: the unit keeps no smaller shard.
    mine = np.flatnonzero(last_forward[whole.part] >= 0)
    n_bytes = whole.values[mine] // sharding.group_after_forward
    copy = edit.add_ops(
        "aten.clone.default",
        after=last_forward[whole.part[mine]],
        phase=Phase.FORWARD,
        traffic_bytes=2 * n_bytes,
        reads=made.whole[mine],
    )
    parts = np.full(len(whole.values), -1, np.int32)
    parts[mine] = edit.add_storages(n_bytes, producer=copy, kind=Kind.COMMUNICATION)
    return _Secondary(parts)


@functools.lru_cache(maxsize=8)
def _waiting_sources(step: Step, blocks_per_unit: int) -> tuple[I32, I32]:
    """Return visits whose forward starts with a copy to the host, and what the copy before it holds."""
    return pending_copy_sources(step, forward_visits(step, blocks_per_unit).first)


def _backward(
    edit: Edit,
    step: Step,
    sharding: Sharding,
    units: FsdpUnits,
    kept: Mask,
    secondary: _Secondary | None,
    uses: _Redirect,
) -> None:
    """Gather again, by default when the backward of the unit after it (in forward order) starts."""
    visits = backward_visits(step, sharding.blocks_per_unit)
    is_root = units.has_root & (visits.unit == 0)
    place = np.flatnonzero(np.where(visits.is_first, ~kept[visits.unit], ~is_root))
    gathered = visits.picked(place)
    parameters = units.parameters.picked(gathered.unit)
    whole = _unsharded_bytes(step, sharding, parameters)
    # The root keeps no shards of smaller groups, so all its ranks gather again; so do they once a backward
    # has resharded a unit.
    groups = np.where(is_root[place] | ~gathered.is_first, sharding.degree, sharding.group_after_forward)
    made = gather_units(
        edit,
        whole,
        GatherTiming(_issued(step, visits, sharding, bool(units.has_root))[place], place, visits.first),
        Phase.BACKWARD,
        groups,
        prefetch_distance=sharding.prefetch_distance(Phase.BACKWARD),
        stream=sharding.gather_stream,
        casts=_cast_parameters(step, sharding, parameters),
    )
    edit.hold_through(made.whole, gathered.last[whole.part])
    uses.add_copies(parameters.values, gathered.first[whole.part], made.whole, forward=False)
    if secondary is not None:
        copy = np.where(units.last_backward < 0, step.backward_end, -1).astype(np.int32)
        copy[gathered.unit[gathered.is_first]] = made.copy[gathered.is_first]
        parts = Ragged(secondary.part, units.parameters.count)
        there = parts.values >= 0
        edit.hold_through(parts.values[there], copy[parts.part[there]])


def _prefetch_without_use(edit: Edit, step: Step, sharding: Sharding, units: FsdpUnits, kept: Mask) -> I32:
    """Gather units that FSDP2 prefetches although they have no backward; return the buffers."""
    visit, unit = mistargeted_prefetches(step, sharding.blocks_per_unit)
    visit, unit = visit[~kept[unit]], unit[~kept[unit]]
    if not len(unit):
        return np.empty(0, np.int32)
    parameters = units.parameters.picked(unit)
    whole = _unsharded_bytes(step, sharding, parameters)
    cast_bytes = _bytes_cast(
        whole, _cast_parameters(step, sharding, parameters), sharding.group_after_forward
    )
    n_rows = 2 if cast_bytes is None else 4
    make = n_rows * np.arange(len(unit)) + n_rows - 2
    ops = _gather_ops(
        make,
        whole.sums(),
        cast_bytes,
        backward_visits(step, sharding.blocks_per_unit).first[visit],
        sharding.group_after_forward,
        sharding.gather_stream,
    )
    rows = edit.add_placed_ops(ops, phase=Phase.BACKWARD)
    buffer = edit.add_storages(whole.sums(), producer=rows[make], kind=Kind.COMMUNICATION)
    _add_gather_uses(edit, rows, make, buffer, cast_bytes)
    return buffer


def _issued(step: Step, visits: UnitVisits, sharding: Sharding, has_root: bool) -> I64:
    """Return (visits,) the place at which the gather of each is issued."""
    # FSDP2 prefetches one unit in backward by default, none in forward. A model that runs twice has no
    # prefetch from the backward of one call to that of the other where units name what they prefetch, or
    # where the root is between the two.
    place = np.arange(len(visits.unit))
    early = np.maximum(place - (1 if sharding.prefetch is None else sharding.prefetch), 0)
    if sharding.prefetch is not None or has_root:
        early = np.maximum(early, visits.model_call_begins)
    if sharding.prefetch is None and has_root:
        # FSDP2's default is given once per backward of a unit, and the root's lasts to the end.
        root_again = (visits.unit == 0) & ~visits.is_first
        early = np.where(np.append(False, root_again[:-1]), place, early)
    if sharding.prefetch is None:
        mistargeted, _ = mistargeted_prefetches(step, sharding.blocks_per_unit)
        early = np.where(np.isin(place - 1, mistargeted), place, early)
    # A unit that runs again right after itself is still unsharded when it would be prefetched.
    follows = np.append(False, visits.unit[1:] == visits.unit[:-1])
    return np.where(follows, place, early)


def _resized(edit: Edit, step: Step, sharding: Sharding, reduced: ReducedUnit) -> Step:
    """Resize parameters, state and the optimizer's temporaries and work to shards."""
    columns, mine = columns_of(step.parameters), reduced.of.parameters
    shards = shards_of(columns, sharding.degree)
    raw = reduced.of.raw[reduced.of.raw >= 0]
    # Between the first and the last micro-batch whole sums all stay to the end: with three and more an upper
    # end.
    end = step.backward_end
    edit.storages.held_until[raw] = (
        int(end) if sharding.sums == "whole" and sharding.micro_batches > 2 else -1
    )
    edit.storages.kind[raw] = Kind.TEMPORARY
    # State, gradients and the optimizer's temporaries shrink with their parameter.
    rows, owner = sharded_storages(step)
    ratio = shards.numel / np.maximum(columns.numel, 1)
    resize_to_shards(edit, step, ratio, rows, owner)
    if sharding.param_itemsize is not None:  # sums of narrow gradients are as wide as the shards
        sums = step.storages.kind[rows] == Kind.GRADIENT
        edit.storages.bytes[rows[sums]] = shards.n_bytes[owner[sums]]
    edit.storages.bytes[raw] = step.storages.bytes[raw]
    gradient = np.full(len(columns.gradient), -1, np.int32)
    if reduced.of.accumulated:
        # Accumulation happens on shards, after the reduction.
        edit.drop_ops(_whole_sums(step))
    if reduced.of.accumulated and sharding.sums == "further":
        sums = columns.gradient[columns.gradient >= 0]
        edit.storages.bytes[sums], edit.storages.held_until[sums] = 0, -1
    if reduced.of.accumulated and sharding.sums == "shards":
        joined = _sums_by_unit(edit, columns.gradient, mine)
        edit.set_uses(storage=joined[edit.uses.storage])
        gone = np.flatnonzero(joined[: step.storages.n] != np.arange(step.storages.n))
        np.add.at(edit.storages.bytes, joined[gone], edit.storages.bytes[gone])
        edit.storages.bytes[gone] = 0
        gradient[columns.gradient >= 0] = joined[columns.gradient[columns.gradient >= 0]]
        grad_order = edit.grad_order
    else:
        taken, grad_order = reduced.taken[mine.part], reduced.taken
        gradient[mine.values] = taken
        moved = np.full(step.storages.n, -1, np.int32)
        moved[columns.gradient[mine.values]] = taken
        later = _uses_after_backward(step)
        target = moved[step.uses.storage[later]]
        edit.set_uses(storage=edit.uses.storage.copy())
        edit.uses.storage[later[target >= 0]] = target[target >= 0]
        # The shards' gradients are the parameters' `.grad` until `zero_grad`.
        edit.hold_through(reduced.taken, step.ops.n - 1)
    edit.grad_order = grad_order
    edit.parameters = replace(columns, gradient=gradient, shapes=shards.shapes, numel=shards.numel)
    return edit.done()


@functools.lru_cache(maxsize=8)
def _uses_after_backward(step: Step) -> I64:
    """Return rows of the uses by ops that run once per step, after backward."""
    return np.flatnonzero(step.use_phase >= Phase.BOUNDARY)


def _whole_sums(step: Step) -> Mask:
    """Return (n,) ops of later micro-batches that add an unsharded gradient."""
    # Sums are sharded, and are added to after the reduction.
    gradient = np.zeros(step.storages.n + 1, bool)  # the last entry serves "none"
    gradient[columns_of(step.parameters).gradient[raw_gradients(step) >= 0]] = True
    adds = (step.uses.mode == WRITES) & gradient[step.uses.storage] & (step.use_phase < Phase.BOUNDARY)
    adds &= step.storages.producer[step.uses.storage] < 0
    dropped = np.zeros(step.ops.n, bool)
    dropped[step.uses.op[adds]] = True
    return dropped


def _sums_by_unit(edit: Edit, gradient: I32, parameters: Ragged) -> I32:
    """Return, by storage, the one with its bytes: a unit's gradients, and sums, are views of one."""
    joined = np.arange(edit.n_storages, dtype=np.int32)
    joined[gradient[parameters.values]] = gradient[parameters.values[parameters.starts]][parameters.part]
    return joined


@dataclass(frozen=True, eq=False)
class GatheredUnit:
    """Results of all-gathers: (units,) buffers, gathers and copy-out ops, and the full parameters by unit."""

    buffer: I32
    gather: I32
    copy: I32
    whole: I32


@dataclass(frozen=True, eq=False)
class GatherTiming:
    """Timing of gathers: (units,) places in the order of compute, and (places,) the op of each."""

    issued: I64
    """Place at which the gather is issued."""
    used: I64
    """Place at which the unit is copied out."""
    op: I32

    def starts(self, count: I64, rows: int) -> tuple[I64, I64]:
        """Return (units,) first rows: of the `rows` of each gather, the `count` + 1 rows of each copy-out."""
        # A prefetching gather is inserted after the copy-out of the unit at its place.
        units, early = np.arange(len(count)), self.issued < self.used
        # At one place: a gather used there first, then the copy-out, then gathers that prefetch.
        keys = (np.concatenate([units, units]), np.concatenate([2 * early, np.ones_like(units)]))
        order = np.lexsort((*keys, np.concatenate([self.issued, self.used])))
        size = np.concatenate([np.full(len(count), rows), count + 1])
        start = np.empty_like(size)
        start[order] = np.cumsum(size[order]) - size[order]
        return start[: len(count)], start[len(count) :]


def gather_units(
    edit: Edit,
    whole: Ragged,
    when: GatherTiming,
    phase: Phase,
    group: int | I64,
    *,
    prefetch_distance: int,
    stream: int,
    casts: Mask | None = None,
) -> GatheredUnit:
    """Gather units from `group` ranks each and copy them out into full parameters.

    Args:
        edit: Edit of the step.
        whole: Bytes of the parameters of each unit; its ops: a buffer, the all-gather; an allocation per
            parameter, the copy-out.
        when: Places of gathers and copy-outs.
        phase: Phase of all inserted ops.
        group: Ranks that hold a shard each.
        prefetch_distance: Prefetch distance of a gather on the link's own stream (`Ops.prefetch`).
        stream: Stream of the gathers.
        casts: Parameters whose shards are first cast, each unit's into one flat tensor that is freed after
            the gather: two ops more. None for none.
    """
    # Per gather: [flat tensor, cast,] buffer, all-gather; per copy-out: one allocation per parameter, the
    # copy.
    sums, before, copied_before = whole.sums(), when.op[when.issued], when.op[when.used]
    cast_bytes = _bytes_cast(whole, casts, group)
    n_casts = 0 if cast_bytes is None else 2
    begin, first = when.starts(whole.count, 2 + n_casts)
    make, allocate, copy = begin + n_casts, whole.places(first), first + whole.count
    ops = [
        *_gather_ops(make, sums, cast_bytes, before, group, stream, prefetch_distance),
        PlacedOps(allocate, "memtune.allocate", NOTHING, anchor=copied_before[whole.part]),
        PlacedOps(copy, "fsdp.split_with_sizes_copy.default", traffic_bytes=2 * sums, anchor=copied_before),
    ]
    rows = edit.add_placed_ops(ops, phase=phase)
    # Storages of a unit: its buffer, the whole parameters.
    buffer = whole.starts + np.arange(len(make))
    inside = whole.places(buffer + 1)
    storages = add_storages(
        edit,
        [
            (buffer, rows[make], sums, Kind.COMMUNICATION),
            (inside, rows[allocate], whole.values, Kind.COMMUNICATION),
        ],
    )
    made = GatheredUnit(storages[buffer], rows[make + 1], rows[copy], storages[inside])
    _add_gather_uses(edit, rows, make, made.buffer, cast_bytes)
    edit.add_uses(made.copy, made.buffer)
    edit.add_uses(made.copy[whole.part], writes=made.whole)
    return made


def _bytes_cast(whole: Ragged, casts: Mask | None, group: int | I64) -> I64 | None:
    """Return (units,) bytes of each unit's shards of the parameters in `casts`; None without casts."""
    return None if casts is None else replace(whole, values=whole.values * casts).sums() // group


def _gather_ops(
    make: I64,
    n_bytes: I64,
    cast_bytes: I64 | None,
    anchor: I32,
    group: int | I64,
    stream: int,
    prefetch_distance: int = 0,
) -> list[PlacedOps]:
    """Return the ops of gathers: [a flat tensor, the cast into it,] the buffer in row `make`, the all-gather.

    Args:
        make: (units,) rows of the buffers.
        n_bytes: (units,) bytes of the gathered parameters.
        cast_bytes: (units,) bytes of the shards that are cast first; None for no casts.
        anchor: (units,) op before which each gather stands.
        group: Ranks that hold a shard each.
        stream: Stream of the gathers.
        prefetch_distance: As in `gather_units`.
    """
    link = Resource.INTRA_LINK, n_bytes, group, stream, prefetch_distance
    ops = [
        PlacedOps(make, _EMPTY, NOTHING, anchor=anchor),
        PlacedOps(make + 1, "memtune.all_gather_into_.default", *link, anchor=anchor),
    ]
    if cast_bytes is None:
        return ops
    return [
        PlacedOps(make - 2, _EMPTY, NOTHING, anchor=anchor),
        # A cast reads shards of float32 and writes half of their bytes.
        PlacedOps(make - 1, _CAST_SHARDS, traffic_bytes=3 * cast_bytes, anchor=anchor),
        *ops,
    ]


def _add_gather_uses(edit: Edit, rows: I32, make: I64, buffer: I32, cast_bytes: I64 | None) -> None:
    """Add the uses of the ops of `_gather_ops`, which are at `rows`."""
    if cast_bytes is not None:
        narrow = edit.add_storages(cast_bytes, producer=rows[make - 2], kind=Kind.COMMUNICATION)
        edit.add_uses(rows[make - 1], writes=narrow)
        edit.add_uses(rows[make + 1], narrow)
    edit.add_uses(rows[make + 1], buffer, writes=buffer)


# FSDP2's reductions of gradients, unit by unit: what is packed, sent and added up, and the buffers it takes.
NOTHING = Resource.NOTHING


@dataclass(frozen=True, eq=False)
class Reductions:
    """The units whose gradients are reduced, in the order in which their backwards end."""

    parameters: Ragged
    after: I32
    """(units,) last op of each unit's backward."""
    raw: I32
    """(parameters,) the storage of this micro-batch's gradient, not of the sum over micro-batches, or -1."""
    sums: Ragged
    """Existing sums of earlier micro-batches: rows of the parameters, by unit."""
    accumulated: bool


@functools.lru_cache(maxsize=8)
def _reductions(step: Step, blocks_per_unit: int, kept: Sums) -> Reductions:
    units, gradient = units_of(step, blocks_per_unit), columns_of(step.parameters).gradient
    raw = gradient if kept == "whole" else raw_gradients(step)
    # A gradient that a hook has replaced is made by an op of no block, after the unit's backward.
    made = np.where(raw >= 0, step.storages.producer[raw], -1)[units.parameters.values]
    after = units.last_backward.copy()
    np.maximum.at(after, units.parameters.part, made)
    order = np.argsort(after, kind="stable")
    # FSDP2 reduces a unit when its last gradient exists, which may not be the order of the blocks.
    parameters = units.parameters.picked(order)
    parameters = parameters.where(raw[parameters.values] >= 0)
    # A unit without a gradient sends nothing.
    used = np.flatnonzero(parameters.count)
    parameters = parameters.picked(used)
    sums = parameters.where((step.storages.producer[gradient[parameters.values]] < 0) & (kept == "shards"))
    accumulated = bool(((raw >= 0) & (raw != gradient)).any())
    return Reductions(parameters, after[order][used], raw, sums, accumulated)


@dataclass(frozen=True, eq=False)
class ReducedUnit:
    """Results of the reductions by unit, and the sharded gradients."""

    of: Reductions
    taken: I32
    last: int
    """Last op of backward, with the reductions that wait for its end."""


@dataclass(frozen=True, eq=False)
class _Messages:
    """Sizes and units of the messages of the reductions."""

    n_bytes: I64
    """(units,) bytes of a shard in the gradients' own dtype."""
    sent: I64
    """(units,) bytes of a shard in the dtype of the message."""
    exchanged: I64
    """(units,) bytes of a shard, or of the sums that it was added to, in the all-reduce between replicas."""
    averaged: I64
    """Units at whose reduction an all-reduce between replicas runs."""
    cast: I64
    """Units whose gradients are cast for the message."""


@dataclass(frozen=True, eq=False)
class _ReductionOps:
    """The ops of the reductions: one per unit, averaged unit, cast unit or sum."""

    make: I32
    pack: I32
    take: I32
    reduce: I32
    exchange: I32
    cast: I32
    add: I32
    last: I32
    """(units,) the last op of each unit."""


def reduce_gradients(edit: Edit, step: Step, sharding: Sharding) -> ReducedUnit:
    """Reduce-scatter each unit after its backward, and add the result to earlier micro-batches' sums."""
    of = _reductions(step, sharding.blocks_per_unit, sharding.sums)
    shards = shards_of(columns_of(step.parameters), sharding.degree)
    if not len(of.after):
        return ReducedUnit(of, np.empty(0, np.int32), step.backward_end)
    mine = of.parameters
    n_bytes = replace(mine, values=shards.n_bytes[mine.values]).sums()
    sent = _in_type(step, mine, n_bytes, sharding)
    # In two hops the all-reduce is over the sums, which are as wide as the parameters.
    exchanged = np.where((of.sums.count > 0) & sharding.two_hop, n_bytes, sent)
    messages = _Messages(
        n_bytes, sent, exchanged, _averaged(sharding, len(of.after)), _cast_units(step, mine, sharding)
    )
    rows = _insert(edit, sharding, of, shards, messages)
    given, taken = _reduction_buffers(edit, sharding, shards, mine, sent, rows)
    raw, averaged = of.raw[mine.values], messages.averaged
    edit.add_uses(rows.pack[mine.part], raw)
    edit.add_uses(rows.pack, writes=given)
    edit.add_uses(rows.reduce, given, writes=taken)
    edit.add_uses(rows.exchange, writes=_averages(step, of, taken, sharding)[averaged - sharding.two_hop])
    if len(rows.cast):
        edit.add_uses(rows.cast, taken[messages.cast])
        taken = taken.copy()
        taken[messages.cast] = edit.add_storages(
            n_bytes[messages.cast], producer=rows.cast, kind=Kind.GRADIENT
        )
    edit.add_uses(
        rows.add,
        taken[of.sums.part],
        writes=columns_of(step.parameters).gradient[mine.values[mine.starts]][of.sums.part],
    )

    # FSDP2's reducing function still references the last gradient of its loop, and its buffers, when it adds
    # to the sums.
    edit.hold_through(
        np.concatenate([raw[mine.starts + mine.count - 1], given]), np.concatenate([rows.last, rows.last])
    )
    # The input of a reduction is held until the next unit's gradients are ready, or until a unit whose
    # gradients are not complete is resharded.
    resharded = np.append(np.sort(backward_visits(step, sharding.blocks_per_unit).last), step.ops.n)
    follows = resharded[np.searchsorted(resharded, of.after[:-1], side="right")]
    edit.hold_through(given[:-1], np.minimum(of.after[1:], follows).astype(np.int32))
    end = step.backward_end
    for op in rows.last[of.after == end].tolist():
        edit.hold_to_the_end_of_backward(op)
    if sharding.replicas > 1 and sharding.two_hop:
        _average_the_last(edit, step, sharding, int(exchanged[-1]), _averages(step, of, taken, sharding)[-1:])
    return ReducedUnit(of, taken, int(rows.last[-1]) if of.after[-1] == end else end)


def _insert(
    edit: Edit, sharding: Sharding, of: Reductions, shards: Shards, messages: _Messages
) -> _ReductionOps:
    """Insert the ops."""
    # Per unit: a buffer, the copy-in, the sharded gradient, the reduce-scatter, the all-reduce between
    # replicas if there are any, a cast if the message had another dtype, an addition for each sum. In
    # two hops the all-reduce is over the sums of the unit before.
    n_bytes, sent, averaged = messages.n_bytes, messages.sent, messages.averaged
    per_unit = of.sums.count + 4
    per_unit[averaged] += 1
    per_unit[messages.cast] += 1
    make = np.cumsum(per_unit) - per_unit
    pack, take, reduce, exchange = make + 1, make + 2, make + 3, make[averaged] + 4
    end = make + per_unit
    cast, add = (end - of.sums.count - 1)[messages.cast], of.sums.places(end - of.sums.count)
    first, second = sharding.reduce_streams
    last = second if sharding.replicas > 1 else first
    inside = Resource.INTRA_LINK, sent * sharding.degree, sharding.degree, first
    between = (
        sharding.between_copies,
        messages.exchanged[averaged - sharding.two_hop],
        sharding.replicas,
        second,
    )
    added = 3 * shards.n_bytes[of.sums.values]
    ops = [
        PlacedOps(make, _EMPTY, NOTHING),
        PlacedOps(pack, "fsdp.chunk_cat.default", traffic_bytes=(n_bytes + sent) * sharding.degree),
        PlacedOps(take, _EMPTY, NOTHING),
        PlacedOps(reduce, "memtune.reduce_scatter_into_.default", *inside),
        PlacedOps(exchange, "memtune.all_reduce_.default", *between, phase=sharding.average_phase),
        PlacedOps(cast, _CAST, traffic_bytes=(n_bytes + sent)[messages.cast], stream=last),
        PlacedOps(add, "aten.add_.Tensor", traffic_bytes=added, stream=last),
    ]
    rows = edit.add_placed_ops(ops, after=np.repeat(of.after, per_unit), phase=sharding.reduce_phase)
    return _ReductionOps(*(rows[place] for place in (make, pack, take, reduce, exchange, cast, add, end - 1)))


def _cast_units(step: Step, parameters: Ragged, sharding: Sharding) -> I64:
    """Return the units whose gradients are cast for the message."""
    itemsize = columns_of(step.parameters).itemsize[parameters.values[parameters.starts]]
    return np.flatnonzero(itemsize != (sharding.message_itemsize or itemsize))


def _in_type(step: Step, parameters: Ragged, n_bytes: I64, sharding: Sharding) -> I64:
    """Return (units,) `n_bytes` of gradients in the dtype of the message."""
    itemsize = columns_of(step.parameters).itemsize[parameters.values[parameters.starts]].astype(np.int64)
    travelling: I64 = n_bytes // itemsize * (sharding.message_itemsize or itemsize)
    return travelling


def _averaged(sharding: Sharding, units: int) -> I64:
    """Return the units at whose reduction an all-reduce between replicas runs: in two hops the one before."""
    return np.arange(int(sharding.two_hop), units) if sharding.replicas > 1 else np.arange(0)


def _averages(step: Step, of: Reductions, taken: I32, sharding: Sharding) -> I32:
    """Return (units,) the storage that is averaged: the shard, or in two hops the sums with the shard."""
    sums = columns_of(step.parameters).gradient[of.parameters.values[of.parameters.starts]]
    return np.where(of.sums.count > 0, sums, taken) if sharding.two_hop else taken


def _average_the_last(edit: Edit, step: Step, sharding: Sharding, n_bytes: int, sums: I32) -> None:
    """In two hops, average the last unit, which no other follows, when backward ends."""
    row = edit.add_ops(
        "memtune.all_reduce_.default",
        after=np.asarray([step.backward_end], np.int32),
        phase=sharding.average_phase,
        resource=sharding.between_copies,
        traffic_bytes=n_bytes,
        group=sharding.replicas,
        stream=sharding.reduce_streams[1],
        writes=sums,
    )
    edit.hold_to_the_end_of_backward(int(row[0]))


def _reduction_buffers(
    edit: Edit, sharding: Sharding, shards: Shards, parameters: Ragged, sent: I64, rows: _ReductionOps
) -> tuple[I32, I32]:
    """Return the buffers of each unit's reduction; `sent`: (units,) bytes of a shard in the message."""
    bytes_of = shards.n_bytes[parameters.values]
    place = (4 if sharding.stages_messages else 2) * np.arange(len(rows.make))
    parts = [
        (place, rows.make, sent * sharding.degree, Kind.COMMUNICATION),
        (place + 1, rows.take, sent, Kind.GRADIENT),
    ]
    if sharding.stages_messages:
        # On CPU the packing kernel pads what the ranks do not divide, in a copy of its own.
        # gloo's reduce-scatter copies its message, see `seam._reduce_scatter_on_gloo`.
        uneven = replace(parameters, values=bytes_of * shards.uneven[parameters.values]).sums()
        parts += [
            (place + 2, rows.pack, uneven * sharding.degree, Kind.WORKSPACE),
            (place + 3, rows.reduce, sent * sharding.degree, Kind.WORKSPACE),
        ]
    storages = add_storages(edit, parts)
    return storages[place], storages[place + 1]


# How the model state is divided: what the passes of FSDP2's gathers and reductions go by.
_COMPUTE_STREAM, _REDUCE_STREAM, _REPLICA_STREAM = 1, 2, 3

Sums = Literal["shards", "whole", "further"]


@dataclass(frozen=True)
class Sharding:
    """Settings of the sharding: `degree` ranks share a copy of the model, `replicas` copies exist."""

    degree: int
    replicas: int = 1
    reshard_after_forward: bool | int = True
    """True frees a unit's parameters between forward and backward; a number keeps them sharded over groups of
    that many ranks.
    """
    blocks_per_unit: int = 1
    keeps_root: bool = True
    """True keeps the root unit (parameters in no block) gathered between forward and backward."""
    prefetch: int | None = None
    """Units prefetched; None: FSDP2's default, none in forward and one in backward."""
    param_itemsize: int | None = None
    """Bytes per element of gathered parameters and of their gradients; None: as in the shards."""
    reduce_itemsize: int | None = None
    """Bytes per gradient element in a message; None: as in the gradient."""
    replicas_across_nodes: bool = False
    """True if the ranks that hold the same shard are on different nodes with a network card each."""
    stages_messages: bool = False
    """True if reductions first copy their message and compute waits for collectives (gloo on CPU)."""
    two_hop: bool = False
    """True if gradients are averaged between replicas once per step, not in every micro-batch."""
    sums: Sums = "shards"
    """Sums that micro-batches accumulate: shards; unsharded gradients, reduced in the last micro-batch; or
    none, if shards are divided further in every micro-batch.
    """
    micro_batches: int = 1
    """Micro-batches per step."""

    @property
    def message_itemsize(self) -> int | None:
        """Bytes per gradient element in a message; None: as in the shards."""
        return self.reduce_itemsize or self.param_itemsize

    @property
    def between_copies(self) -> Resource:
        """Link between ranks that hold the same shard."""
        return Resource.INTER_LINK if self.replicas_across_nodes else Resource.INTRA_LINK

    @property
    def average_phase(self) -> Phase:
        """Phase of the averages."""
        # Ops that run once per step belong to the boundary, although they are issued inside backward.
        return Phase.BOUNDARY if self.two_hop else self.reduce_phase

    @property
    def reduce_phase(self) -> Phase:
        """Phase of the reductions; unsharded sums are reduced once per step."""
        return Phase.BOUNDARY if self.sums == "whole" and self.micro_batches > 1 else Phase.BACKWARD

    @property
    def reduce_streams(self) -> tuple[int, int]:
        """Streams of the reductions inside a group and between replicas."""
        return (
            (_COMPUTE_STREAM, _COMPUTE_STREAM) if self.stages_messages else (_REDUCE_STREAM, _REPLICA_STREAM)
        )

    @property
    def gather_stream(self) -> int:
        """Stream of the gathers: they wait only for the link, or compute waits for them."""
        return _COMPUTE_STREAM if self.stages_messages else 0

    @property
    def group_after_forward(self) -> int:
        """Ranks over which a unit is sharded between its forward and its backward."""
        return self.degree if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward

    def prefetch_distance(self, phase: Phase) -> int:
        """Return how many units a gather on the link's own stream is issued early (`Ops.prefetch`)."""
        if self.stages_messages:
            return 0
        return 1 if phase == Phase.BACKWARD else 2 if self.prefetch else 3
