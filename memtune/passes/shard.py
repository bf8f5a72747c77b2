"""The pass of `runtime.sharding`: what FSDP2 does to one rank's step, buffer by buffer.

Seen by recording FSDP2 (torch 2.13) on fake tensors: a unit's shards are gathered into one buffer, which is copied out
into the parameters and held until the *next* unit has copied out; backward gathers one unit ahead; the buffer that is
reduce-scattered is held until the next unit's gradients are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memtune.edit import Edit
from memtune.program import I32, I64, Kind, Parameter, Phase, Resource, Step


@dataclass(frozen=True)
class Sharding:
    """How the model state is divided: `degree` ranks share a copy, `replicas` copies exist."""

    degree: int
    replicas: int = 1
    reshard_after_forward: bool = True
    blocks_per_unit: int = 1
    replicas_across_nodes: bool = False
    """Whether the ranks that hold the same shard sit on different nodes, each with a network card of its own."""
    stages_messages: bool = False
    """Whether collectives copy their whole message first, as gloo does on CPU (measured; NCCL does not)."""


@dataclass(frozen=True)
class _Unit:
    """Parameters that are gathered together, and where in the step that happens."""

    parameters: list[int]
    blocks: list[int]  # empty for the root
    first_forward: int  # gathered before this op …
    last_forward: int  # … and freed after this one
    first_backward: int
    last_backward: int


def shard_states(step: Step, how: Sharding) -> Step:
    """`step` as one rank runs it under FSDP2."""
    units = _units(step, how)
    edit = Edit(step)
    shard_bytes = np.asarray([_shard_numel(p, how.degree) * p.itemsize for p in step.parameters], np.int64)
    gradient_of = _raw_gradients(step)
    uses = _Redirect(step)
    forward = _forward(edit, step, how, units, shard_bytes, uses)
    _backward(edit, step, how, units, shard_bytes, uses, forward)
    sharded = _gradients(edit, step, how, units, shard_bytes, gradient_of)
    edit.use_storage = uses.apply(edit.use_storage)
    return _resized(edit, step, how, shard_bytes, gradient_of, sharded)


def _units(step: Step, how: Sharding) -> list[_Unit]:
    """In forward order: the root first (its forward starts first), then the blocks."""
    by_block: dict[int, list[int]] = {}
    for index in _gathering_order([p.name for p in step.parameters]):
        by_block.setdefault(step.parameters[index].block, []).append(index)
    after = step.op_phase[: step.n_ops]
    backward = np.flatnonzero((after == Phase.BACKWARD) | (after == Phase.RECOMPUTE))
    end = int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    units = []
    n_blocks = len(step.blocks)
    if -1 in by_block:
        inside = backward[step.op_module[backward] != 0]
        start = int(inside[0]) if len(inside) else end
        units.append(_Unit(by_block[-1], [], int(step.enter[n_blocks]), int(step.leave[n_blocks]), start, end))
    for start in range(0, n_blocks, how.blocks_per_unit):
        blocks = list(range(start, min(start + how.blocks_per_unit, n_blocks)))
        mine = backward[np.isin(step.op_block[backward], blocks)]
        parameters = [index for block in blocks for index in by_block.get(block, [])]
        if parameters and len(mine):
            # What an earlier pass put around a block's forward (copies to the host) runs inside FSDP2's hooks.
            forward = np.flatnonzero((step.op_phase == Phase.FORWARD) & np.isin(step.op_block, blocks))
            first, last = min(int(step.enter[blocks[0]]), int(forward[0])), max(int(step.leave[blocks[-1]]), int(forward[-1]))
            units.append(_Unit(parameters, blocks, first, last, int(mine[0]), int(mine[-1])))
    return units


def _gathering_order(names: list[str]) -> list[int]:
    """Rows of `names` in FSDP2's order: a module's own parameters after those of its children (post-order)."""
    tree: dict[str, Any] = {}
    for index, name in enumerate(names):
        *modules, own = name.split(".")
        node = tree
        for module in modules:
            node = node.setdefault(module + ".", {})
        node[own] = index

    def visit(node: dict[str, Any]) -> list[int]:
        children = [row for name, child in node.items() if name[-1:] == "." for row in visit(child)]
        return children + [row for name, row in node.items() if name[-1:] != "."]

    return visit(tree)


class _Redirect:
    """Which uses of a whole parameter now go to which gathered copy: by op range, before the optimizer."""

    def __init__(self, step: Step) -> None:
        self._parameter = np.where(step.op_phase[step.use_op] < Phase.BOUNDARY, step.parameter_of[step.use_storage], -1)
        self._forward = step.op_phase[step.use_op] == Phase.FORWARD
        # (parameters + 1,) the copies that forward and that backward use; the last entry serves "no parameter".
        self._in_forward = np.full(len(step.parameters) + 1, -1, np.int32)
        self._in_backward = self._in_forward.copy()

    def to(self, parameters: list[int], storages: I32, *, forward: bool | None) -> None:
        if forward is not False:
            self._in_forward[parameters] = storages
        if forward is not True:
            self._in_backward[parameters] = storages

    def apply(self, use_storage: I32) -> I32:
        new = np.where(self._forward, self._in_forward[self._parameter], self._in_backward[self._parameter])
        return np.where(new >= 0, new, use_storage).astype(np.int32)


@dataclass(frozen=True)
class _Gathered:
    buffer: int
    copied_out: int
    whole: I32


def _gather(edit: Edit, how: Sharding, n_bytes: int, before: int, phase: Phase) -> int:
    """The buffer of an all-gather that starts before op `before`; returns its storage."""
    at = np.asarray([before], np.int32)
    make = edit.add_ops("aten.empty.memory_format", before=at, phase=phase, resource=Resource.NOTHING)
    buffer = edit.add_storages(np.asarray([n_bytes], np.int64), producer=make, kind=Kind.COMMUNICATION)
    gather = edit.add_ops(
        "memtune.all_gather_into_.default",
        before=at,
        phase=phase,
        resource=Resource.INTRA_LINK,
        traffic_bytes=n_bytes,
        group=how.degree,
    )
    edit.add_uses(gather, buffer)
    edit.add_uses(gather, buffer, mutates=True)
    if how.stages_messages:
        _scratch(edit, n_bytes, gather)
    return int(buffer[0])


def _copy_out(edit: Edit, buffer: int, whole_bytes: I64, before: int, phase: Phase) -> tuple[I32, int]:
    """Allocate the whole parameters and copy the buffer into them; returns their storages and the copying op."""
    count = len(whole_bytes)
    makes = edit.add_ops("memtune.allocate", before=np.full(count, before, np.int32), phase=phase, resource=Resource.NOTHING)
    whole = edit.add_storages(whole_bytes, producer=makes, kind=Kind.COMMUNICATION)
    n_bytes = int(whole_bytes.sum())
    copy = edit.add_ops(
        "fsdp.split_with_sizes_copy.default", before=np.asarray([before], np.int32), phase=phase, traffic_bytes=2 * n_bytes
    )
    edit.add_uses(copy, np.asarray([buffer], np.int32))
    edit.add_uses(np.full(count, copy[0], np.int32), whole, mutates=True)
    return whole, int(copy[0])


def _forward(
    edit: Edit, step: Step, how: Sharding, units: list[_Unit], shard_bytes: I64, uses: _Redirect
) -> dict[int, _Gathered]:
    """Gather each unit when its forward starts; its buffer stays until the next unit has copied out, the last to the end."""
    made: dict[int, _Gathered] = {}
    for number, unit in enumerate(units):
        whole_bytes = shard_bytes[unit.parameters] * how.degree
        buffer = _gather(edit, how, int(whole_bytes.sum()), unit.first_forward, Phase.FORWARD)
        whole, copied = _copy_out(edit, buffer, whole_bytes, unit.first_forward, Phase.FORWARD)
        _hold(edit, _waiting_source(step, unit.first_forward), copied)
        made[number] = _Gathered(buffer, copied, whole)
        kept = not how.reshard_after_forward or not unit.blocks
        _hold(edit, whole, unit.last_backward if kept else unit.last_forward)
        uses.to(unit.parameters, whole, forward=None if kept else True)
        if number:
            _hold(edit, np.asarray([made[number - 1].buffer], np.int32), copied)
    if units:
        _hold(edit, np.asarray([made[len(units) - 1].buffer], np.int32), int(step.leave[-1]))
    return made


def _waiting_source(step: Step, op: int) -> I32:
    """What the last copy to the host holds until the copy `op` starts: whatever is put before `op` still sees it."""
    if "memtune.to_host.default" not in step.names:
        return np.empty(0, np.int32)
    copies = np.flatnonzero(step.op_name[: op + 1] == step.names.index("memtune.to_host.default"))
    if len(copies) < 2 or copies[-1] != op:
        return np.empty(0, np.int32)
    sources = step.use_storage[step.use_op == copies[-2]]
    waiting: I32 = sources[step.held_until[sources] == op - 1]
    return waiting


def _backward(
    edit: Edit, step: Step, how: Sharding, units: list[_Unit], shard_bytes: I64, uses: _Redirect, made: dict[int, _Gathered]
) -> None:
    """Gather again, one unit ahead: a unit's buffer is filled when the one after it (in forward order) starts its backward."""
    if not how.reshard_after_forward:
        return
    buffers: dict[int, int] = {}
    order = [number for number in reversed(range(len(units))) if units[number].blocks]
    root = next((number for number, unit in enumerate(units) if not unit.blocks), None)
    sizes = {number: shard_bytes[units[number].parameters] * how.degree for number in order}
    if root is not None and order:
        buffers[order[0]] = _gather(edit, how, int(sizes[order[0]].sum()), units[root].first_backward, Phase.BACKWARD)
    for place, number in enumerate(order):
        unit = units[number]
        if number not in buffers:
            buffers[number] = _gather(edit, how, int(sizes[number].sum()), unit.first_backward, Phase.BACKWARD)
        whole, _ = _copy_out(edit, buffers[number], sizes[number], unit.first_backward, Phase.BACKWARD)
        _hold(edit, whole, unit.last_backward)
        uses.to(unit.parameters, whole, forward=False)
        if place + 1 < len(order):
            ahead = order[place + 1]
            buffers[ahead] = _gather(edit, how, int(sizes[ahead].sum()), unit.first_backward, Phase.BACKWARD)


def _gradients(
    edit: Edit, step: Step, how: Sharding, units: list[_Unit], shard_bytes: I64, gradient_of: dict[int, int]
) -> dict[int, int]:
    """Reduce-scatter each unit after its backward; returns the storage of each parameter's sharded gradient."""
    sharded: dict[int, int] = {}
    end = int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    last_input: I32 | None = None
    last = np.empty(0, np.int32)
    for unit in sorted(units, key=lambda unit: unit.last_backward):
        mine = [index for index in unit.parameters if index in gradient_of]
        if not mine:
            continue
        after = np.asarray([unit.last_backward], np.int32)
        shards = shard_bytes[mine]
        n_bytes = int(shards.sum())
        raw = np.asarray([gradient_of[index] for index in mine], np.int32)
        make = edit.add_ops("aten.empty.memory_format", after=after, phase=Phase.BACKWARD, resource=Resource.NOTHING)
        given = edit.add_storages(np.asarray([n_bytes * how.degree]), producer=make, kind=Kind.COMMUNICATION)
        pack = edit.add_ops("fsdp.chunk_cat.default", after=after, phase=Phase.BACKWARD, traffic_bytes=2 * n_bytes * how.degree)
        edit.add_uses(np.full(len(raw), pack[0], np.int32), raw)
        edit.add_uses(pack, given, mutates=True)
        make = edit.add_ops("aten.empty.memory_format", after=after, phase=Phase.BACKWARD, resource=Resource.NOTHING)
        taken = edit.add_storages(np.asarray([n_bytes]), producer=make, kind=Kind.GRADIENT)
        reduce = edit.add_ops(
            "memtune.reduce_scatter_into_.default",
            after=after,
            phase=Phase.BACKWARD,
            resource=Resource.INTRA_LINK,
            traffic_bytes=n_bytes * how.degree,
            group=how.degree,
        )
        if how.stages_messages:
            # On CPU the packing kernel pads what the ranks do not divide, in a copy of its own.
            uneven = [index for index in mine if step.parameters[index].shape[0] % how.degree]
            _scratch(edit, int(shard_bytes[uneven].sum()) * how.degree, pack)
            _scratch(edit, n_bytes * how.degree, reduce)
        edit.add_uses(reduce, given)
        edit.add_uses(reduce, taken, mutates=True)
        last = reduce
        if how.replicas > 1:
            last = edit.add_ops(
                "c10d.allreduce_.default",
                after=after,
                phase=Phase.BACKWARD,
                resource=Resource.INTER_LINK if how.replicas_across_nodes else Resource.INTRA_LINK,
                traffic_bytes=n_bytes,
                group=how.replicas,
            )
            edit.add_uses(last, taken, mutates=True)
        if last_input is not None:
            edit.hold_through(last_input, after)
        last_input = given
        for index in mine:
            sharded[index] = int(taken[0])
        adds = _add_to_sums(edit, step, mine, int(taken[0]), after, shards)
        # The function that reduces still names the last gradient of its loop, and its buffers, when it has added to the sums.
        last = adds[-1:] if len(adds) else last
        edit.hold_through(np.concatenate([raw[-1:], given]), np.repeat(last, 2))
        if unit.last_backward == end:
            edit.hold_to_the_end_of_backward(int(last[0]))
    if how.replicas > 1 and sharded:  # what was all-reduced is let go when backward ends, summed up or not
        _hold(edit, np.asarray(list(dict.fromkeys(sharded.values())), np.int32), int(last[0]))
    return sharded


def _raw_gradients(step: Step) -> dict[int, int]:
    """Parameter → the storage that this micro-batch's gradient is made in (not the sum over micro-batches)."""
    raw: dict[int, int] = {}
    sums = {parameter.gradient: index for index, parameter in enumerate(step.parameters) if parameter.gradient >= 0}
    for storage, index in sums.items():
        if step.producer[storage] >= 0:
            raw[index] = storage
    adds = (step.use_mutates == 1) & (step.producer[step.use_storage] < 0) & np.isin(step.use_storage, list(sums))
    adds &= step.op_phase[step.use_op] < Phase.BOUNDARY
    is_sum = np.zeros(step.n_storages, bool)
    is_sum[step.use_storage[adds]] = True
    added = np.full(step.n_ops, -1, np.int32)  # what each of these ops adds
    others = ~is_sum[step.use_storage]
    added[step.use_op[others][::-1]] = step.use_storage[others][::-1]
    for op, storage in zip(step.use_op[adds].tolist(), step.use_storage[adds].tolist(), strict=True):
        raw[sums[storage]] = int(added[op])
    return raw


def _resized(
    edit: Edit, step: Step, how: Sharding, shard_bytes: I64, gradient_of: dict[int, int], sharded: dict[int, int]
) -> Step:
    """Parameters, state and the optimizer's temporaries at shard size; the optimizer reads the sharded gradients."""
    accumulated = any(gradient_of[i] != step.parameters[i].gradient for i in gradient_of)
    raw = np.asarray(sorted(set(gradient_of.values())), np.int32)
    edit.held_until[raw] = -1
    new_gradient = np.full(step.n_storages, -1, np.int32)
    for index, storage in sharded.items():
        new_gradient[step.parameters[index].gradient] = storage
    by_optimizer = step.op_phase[step.use_op] >= Phase.BOUNDARY
    target = new_gradient[step.use_storage]
    if accumulated:
        _drop_whole_sums(edit, step, gradient_of)
        joined = _sums_by_unit(step, sharded)
        known = edit.use_storage < step.n_storages
        edit.use_storage[known] = joined[edit.use_storage[known]]
    else:
        edit.use_storage = np.where(by_optimizer & (target >= 0), target, edit.use_storage).astype(np.int32)
        taken = np.asarray(sorted(set(sharded.values())), np.int32)
        edit.hold_through(taken, np.full(len(taken), step.n_ops - 1, np.int32))
    new = edit.done()
    n_bytes, kind = new.bytes.copy(), new.kind.copy()
    ratio = np.asarray([_shard_numel(p, how.degree) / max(_numel(p), 1) for p in step.parameters])
    numel = np.asarray([_numel(p) for p in step.parameters])
    mine = np.flatnonzero((new.owner >= 0) & (np.arange(new.n_storages) < step.n_storages))
    owner = new.owner[mine]
    whole = (n_bytes[mine] % numel[owner] == 0) & (n_bytes[mine] >= numel[owner]) & ~np.isin(mine, raw)
    n_bytes[mine[whole]] = np.round(n_bytes[mine[whole]] * ratio[owner[whole]]).astype(np.int64)
    if accumulated:
        gone = np.flatnonzero(joined != np.arange(step.n_storages))
        np.add.at(n_bytes, joined[gone], n_bytes[gone])
        n_bytes[gone] = 0
    kind[raw] = Kind.TEMPORARY
    parameters = tuple(
        p._replace(
            gradient=int(joined[p.gradient]) if accumulated and p.gradient >= 0 else sharded.get(i, -1),
            shape=_shard_shape(p, how.degree),
        )
        for i, p in enumerate(new.parameters)
    )
    landing = new.landing if accumulated else np.asarray(list(dict.fromkeys(sharded.values())), np.int32)
    return replace(new, bytes=n_bytes, kind=kind, parameters=parameters, landing=landing)


def _sums_by_unit(step: Step, sharded: dict[int, int]) -> I32:
    """(m,) the storage that holds each one's bytes: the gradients of a unit are parts of one storage, also when summed."""
    first: dict[int, int] = {}
    joined = np.arange(step.n_storages, dtype=np.int32)
    for index, taken in sharded.items():
        own = step.parameters[index].gradient
        joined[own] = first.setdefault(taken, own)
    return joined


def _drop_whole_sums(edit: Edit, step: Step, gradient_of: dict[int, int]) -> None:
    """Later micro-batches: sums are kept sharded and added to after the reduction, not before."""
    adds = (step.use_mutates == 1) & np.isin(step.use_storage, [step.parameters[i].gradient for i in gradient_of])
    adds &= (step.op_phase[step.use_op] < Phase.BOUNDARY) & (step.producer[step.use_storage] < 0)
    dropped = np.zeros(step.n_ops, bool)
    dropped[step.use_op[adds]] = True
    edit.drop_ops(dropped)


def _add_to_sums(edit: Edit, step: Step, parameters: list[int], taken: int, after: I32, shard_bytes: I64) -> I32:
    """Add a unit's reduced gradient to the sums of the earlier micro-batches; the ops that do, none with one micro-batch."""
    sums = np.asarray([step.parameters[index].gradient for index in parameters], np.int32)
    there = step.producer[sums] < 0
    ops = np.empty(0, np.int32)
    if there.any():
        count = int(there.sum())
        ops = edit.add_ops(
            "aten.add_.Tensor", after=np.repeat(after, count), phase=Phase.BACKWARD, traffic_bytes=3 * shard_bytes[there]
        )
        edit.add_uses(ops, np.full(count, taken, np.int32))
        edit.add_uses(ops, np.full(count, sums[0], np.int32), mutates=True)
    return ops


def _scratch(edit: Edit, n_bytes: int, op: I32) -> None:
    edit.add_storages(np.asarray([n_bytes], np.int64), producer=op, kind=Kind.WORKSPACE)


def _hold(edit: Edit, storages: I32, op: int) -> None:
    edit.hold_through(storages, np.full(len(storages), op, np.int32))


def _numel(parameter: Parameter) -> int:
    return math.prod(parameter.shape)


def _shard_shape(parameter: Parameter, degree: int) -> tuple[int, ...]:
    return (-(-parameter.shape[0] // degree), *parameter.shape[1:]) if parameter.shape else parameter.shape


def _shard_numel(parameter: Parameter, degree: int) -> int:
    """Elements of the largest shard (rank 0's), which is also what the others are padded to."""
    return math.prod(_shard_shape(parameter, degree))
