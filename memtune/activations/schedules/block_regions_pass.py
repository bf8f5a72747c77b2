"""Regions of single blocks, for schedules where a block's parameters are resident only during its own calls.

A block's region is its forward and its backward, up to the accumulation of its input's gradient. Its inputs,
which include other blocks' values and gradients, come from outside and are never recomputed here. Blocks with
equal ops, values and bytes are of one kind and share a schedule. A block's value that is read or held outside
the block (its output, its input's gradient) lives as long as in the plain step; all others live as the
block's schedule determines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.activations.schedules.region_pass import Region, added_gradients, region_with
from memtune.activations.schedules.schedule_pass import run_schedule
from memtune.program import (
    I32,
    WRITES,
    Action,
    Kind,
    OpGraph,
    Phase,
    Schedule,
    ScheduleStep,
    Step,
    Tier,
    build_schedule,
    find_schedule_error,
    plain_schedule,
)


@dataclass(frozen=True, eq=False)
class BlockRegions:
    """Regions of all blocks of one step."""

    together: Region
    """All their ops: forward of all blocks, then backward, in the order in which they run."""
    blocks: tuple[int, ...]
    """Rows of `step.blocks` in the order in which their forward runs."""
    ops: tuple[I32, ...]
    """By block: numbers of its ops in `together`, forward first."""
    values: tuple[I32, ...]
    """By block: numbers of its values in `together`."""
    graph_index: I32
    """(blocks,) row of each block's graph in `graphs`."""
    graphs: tuple[OpGraph, ...]

    @property
    def plain(self) -> tuple[Schedule, ...]:
        """By graph: the schedule that runs every op once."""
        return tuple(plain_schedule(graph) for graph in self.graphs)


@lru_cache(maxsize=4)
def block_regions_of(step: Step) -> BlockRegions | str:
    """Return the regions of the blocks of `step`, or the reason why they cannot run by schedules."""
    why = _no_regions(step)
    if why:
        return why
    order = np.argsort(step.forward_starts[:-1], kind="stable").astype(np.int32)
    inside = (step.ops.block >= 0) & ~added_gradients(step)
    forward = np.flatnonzero(inside & (step.ops.phase == Phase.FORWARD)).astype(np.int32)
    backward = np.flatnonzero(inside & (step.ops.phase == Phase.BACKWARD)).astype(np.int32)
    for rows, expected in ((forward, order), (backward, order[::-1])):
        # Each block must be one contiguous run, so that its parameters are loaded once per direction.
        runs = step.ops.block[rows][np.flatnonzero(np.diff(step.ops.block[rows], prepend=-1))]
        if not np.array_equal(runs, expected):
            return "blocks do not run one after the other, forward and then backward"
    rows = np.concatenate([forward, backward])
    talks = step.ops.group[rows] > 0
    if talks.any():
        return f"{step.names[step.ops.name[rows[int(talks.argmax())]]]}: ranks exchange data in a block"
    together = region_with(
        step.without_donations(rows), rows, len(forward), _rows_behind_ops(rows, len(forward))
    )
    block_of = step.ops.block[rows]
    return _outside_dependence(step, together, block_of) or _split(
        step, together, block_of, tuple(order.tolist())
    )


def _no_regions(step: Step) -> str:
    if not step.blocks:
        return "the model has no blocks"
    if len(step.calls.block) != len(step.blocks) or not step.calls.grad_enabled.all():
        return "a block runs several times in a step, without gradients, or inside the model's own checkpoint"
    if ((step.ops.phase == Phase.RECOMPUTE) & (step.ops.block >= 0)).any():
        return "the model recomputes parts of a block already"
    if (step.forward_starts[:-1] < 0).any():
        return "a block's forward was not recorded"
    return ""


def _rows_behind_ops(rows: I32, n_forward: int) -> dict[int, list[int]]:
    """Return the rows that follow each op before the next op: added gradients, and ops between the blocks."""
    found: dict[int, list[int]] = {}
    for first, end in ((0, n_forward), (n_forward, len(rows))):
        mine = rows[first:end]
        between = np.setdiff1d(np.arange(mine[0], mine[-1]), mine)
        for row, op in zip(
            between.tolist(), (np.searchsorted(mine, between) - 1 + first).tolist(), strict=True
        ):
            found.setdefault(op, []).append(row)
    return found


def _outside_dependence(step: Step, together: Region, block_of: I32) -> str:
    """Return why a block's ops depend on another block beyond inputs and outputs, '' if they do not."""
    # Reasons are writes into outside values and sums of several blocks' gradients.
    graph = together.graph
    writes = np.flatnonzero((step.uses.mode == WRITES) & np.isin(step.uses.op, together.rows))
    abroad = ~np.isin(step.uses.storage[writes], together.storages) & (
        step.storages.kind[step.uses.storage[writes]] != Kind.BUFFER
    )
    if abroad.any():
        row = step.uses.op[writes[int(abroad.argmax())]]
        return f"{step.names[step.ops.name[row]]} in a block writes into a tensor from outside"
    maker = np.asarray(graph.maker, np.int32)
    for op, written in enumerate(graph.writes):
        if any(block_of[maker[value]] != block_of[op] for value in written):
            return f"{graph.names[op]} in a block writes into a tensor of another block"
    readers: dict[tuple[int, int], list[int]] = {}
    for op in range(graph.n_forward, graph.n_ops):
        for value in graph.reads[op]:
            # A gradient from another block; one such reader is the plain chain, a sum of several is not.
            if maker[value] >= graph.n_forward and block_of[maker[value]] != block_of[op]:
                readers.setdefault((value, int(block_of[op])), []).append(op)
    for ops in readers.values():
        if all(graph.names[op].startswith("aten.add.") for op in ops):
            return "gradients of several blocks are summed inside these blocks"
    return ""


def _split(step: Step, together: Region, block_of: I32, order: tuple[int, ...]) -> BlockRegions:
    """Return the region of all blocks as one region for each; equal blocks share a graph."""
    graph = together.graph
    maker = np.asarray(graph.maker, np.int32)
    crossing = _crossing(step, together, block_of)
    ops = tuple(np.flatnonzero(block_of == block).astype(np.int32) for block in order)
    values = tuple(np.flatnonzero(block_of[maker] == block).astype(np.int32) for block in order)
    graphs: dict[object, int] = {}
    found: list[OpGraph] = []
    graph_index = []
    for mine, made in zip(ops, values, strict=True):
        local = _local(graph, mine, made)
        # Equal ops are not enough: a last block whose output the loss holds has other lifetimes.
        outside = tuple(crossing[made].tolist())
        key = (
            local,
            tuple(together.bytes[made].tolist()),
            tuple(together.scratch_bytes[mine].tolist()),
            outside,
        )
        if key not in graphs:
            graphs[key] = len(found)
            found.append(local)
        graph_index.append(graphs[key])
    # Only whether it lives outside counts here: `by_readers` takes its end from the plain step.
    until = np.where(crossing, graph.n_ops, -1).astype(np.int32)
    together = replace(together, outside_until=until)
    return BlockRegions(together, order, ops, values, np.asarray(graph_index, np.int32), tuple(found))


def _crossing(step: Step, together: Region, block_of: I32) -> npt.NDArray[np.bool_]:
    """Return (m,) values that are read outside their block, or held after its forward or backward."""
    storages, maker = together.storages, np.asarray(together.graph.maker, np.int32)
    value_of = np.full(step.storages.n, -1, np.int32)
    value_of[storages] = np.arange(len(storages), dtype=np.int32)
    op_at = np.full(step.ops.n, -1, np.int32)
    op_at[together.rows] = np.arange(len(together.rows), dtype=np.int32)
    value, op = value_of[step.uses.storage], op_at[step.uses.op]
    used = value >= 0
    reader = np.where(op[used] >= 0, block_of[op[used]], -1)
    found = np.zeros(len(storages), bool)
    found[value[used][reader != block_of[maker[value[used]]]]] = True
    last_backward = np.full(len(step.blocks), -1, np.int32)
    backward = together.rows[together.graph.n_forward :]
    last_backward[block_of[together.graph.n_forward :]] = backward
    until = np.where(
        maker < together.graph.n_forward, step.forward_ends[block_of[maker]], last_backward[block_of[maker]]
    )
    found |= step.storages.held_until[storages] > until
    # The loss, which is in no block, reads the model's outputs.
    found[value_of[step.returned[value_of[step.returned] >= 0]]] = True
    return found


def _local(graph: OpGraph, ops: I32, values: I32) -> OpGraph:
    """Return the part of `graph` with these ops, renumbered."""
    number = {value: at for at, value in enumerate(values.tolist())}
    mine = ops.tolist()

    def own(of: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(number[value] for value in of[op] if value in number) for op in mine)

    n_forward = sum(op < graph.n_forward for op in mine)
    random = frozenset(at for at, op in enumerate(mine) if op in graph.random)
    once = frozenset(at for at, op in enumerate(mine) if op in graph.once)
    names = tuple(graph.names[op] for op in mine)
    return OpGraph(names, n_forward, own(graph.makes), own(graph.reads), own(graph.writes), random, once)


def run_blocks(step: Step, regions: BlockRegions, schedules: Sequence[Schedule]) -> Step:
    """Return the plain `step` with each block run by its schedule, in the order of `regions.blocks`."""
    return _kept_by_schedules(
        run_schedule(step, regions.together, _joined(regions, schedules), by_readers=True)
    )


def _kept_by_schedules(new: Step) -> Step:
    """Return `new` with the values that a block's schedule keeps for backward as saves of the block."""
    # Those are the values of forward that the block's backward, or its recomputation, reads. As saves they
    # are treated like autograd's by passes that offload blocks or their saves. Lifetimes do not change.
    later = (new.use_phase == Phase.BACKWARD) | (new.use_phase == Phase.RECOMPUTE)
    block = new.ops.block[new.uses.op]
    producer = new.storages.producer[new.uses.storage]
    kept = later & (block >= 0) & (producer >= 0) & (new.ops.phase[producer] == Phase.FORWARD)
    kept &= new.storages.tier[new.uses.storage] == Tier.DEVICE
    rows = np.flatnonzero(kept)
    pairs, first, of = np.unique(
        block[rows].astype(np.int64) * new.storages.n + new.uses.storage[rows],
        return_index=True,
        return_inverse=True,
    )
    of_block, storage = (each.astype(np.int32) for each in np.divmod(pairs, new.storages.n))
    until = np.zeros(len(pairs), np.int32)
    np.maximum.at(until, of, new.uses.op[rows])
    before = _after_last_use(new, storage, of_block)
    asked = new.uses.op[rows[first]]
    entered = _argument_of(new, of_block, storage)
    # Ties in the runtime's order: arguments first, then values by producer.
    alike = (storage, np.where(entered < 0, new.storages.producer[storage], entered), entered < 0)
    order, by_asked = np.lexsort((*alike, before)), np.lexsort((*alike, asked))
    rank = np.argsort(by_asked)
    columns: dict[str, Any] = {
        "storage": storage,
        "packed_before": before,
        "held_until": until,
        "used_until": until,
        "unpacked_before": asked,
        "unpack_order": rank,
        "is_output": np.zeros(len(pairs)),
        "call": of_block,
    }
    there = new.saves.columns()
    saves: dict[str, Any] = {
        name: np.concatenate([there[name], np.asarray(columns[name])[order].astype(there[name].dtype)])
        for name in columns
    }
    return replace(new, saves=replace(new.saves, **saves), runs_schedules=True)


def _argument_of(step: Step, block: I32, storage: I32) -> I32:
    """Return (n,) the position among a block's arguments of each storage, -1 for none."""
    found = {
        # Reversed below, so that of a storage that is passed twice the first position counts.
        pair: at
        for at, pair in reversed(
            [
                *enumerate(
                    zip(step.calls.input_block.tolist(), step.calls.inputs.storage.tolist(), strict=True)
                )
            ]
        )
    }
    return np.array(
        [found.get(pair, -1) for pair in zip(block.tolist(), storage.tolist(), strict=True)], np.int32
    )


def _after_last_use(step: Step, storage: I32, block: I32) -> I32:
    """Return the op before which each block's forward has finished with each storage."""
    forward = (step.use_phase == Phase.FORWARD) & (step.ops.block[step.uses.op] >= 0)
    key = (
        step.ops.block[step.uses.op[forward]].astype(np.int64) * step.storages.n + step.uses.storage[forward]
    )
    mine = block.astype(np.int64) * step.storages.n + storage
    last = np.where(
        step.ops.block[step.storages.producer[storage]] == block,
        step.storages.producer[storage],
        step.forward_starts[block] - 1,
    )
    found = np.full(len(mine), -1, np.int64)
    # `mine` is sorted: the pairs come from `np.unique`.
    at = np.searchsorted(mine, key)
    hit = (at < len(mine)) & (mine[np.minimum(at, len(mine) - 1)] == key)
    np.maximum.at(found, at[hit], step.uses.op[forward][hit])
    result: I32 = (np.maximum(found, last) + 1).astype(np.int32)
    return result


def _joined(regions: BlockRegions, schedules: Sequence[Schedule]) -> Schedule:
    """Return the schedules of all blocks as one schedule of their joint region."""
    graph = regions.together.graph
    backward: list[ScheduleStep] = []
    # Backward runs the blocks in reverse, while the forward rows keep their order.
    for ops, schedule in zip(reversed(regions.ops), reversed(schedules), strict=True):
        number = ops.tolist()
        for each in schedule.backward:
            if each.action == Action.COMPUTE:
                backward.append(
                    each._replace(target=number[each.target], along=tuple(number[op] for op in each.along))
                )
    return build_schedule(graph, range(graph.n_forward), backward, made_by="blocks")


def find_block_schedule_error(graph: OpGraph, schedule: Schedule) -> str:
    """Return why `schedule` cannot run a block, '' if it can: also a forward not in plain order."""
    forward = [
        op for each in schedule.forward if each.action == Action.COMPUTE for op in (*each.along, each.target)
    ]
    if forward != list(range(graph.n_forward)):
        return "its forward is not in plain order"
    return find_schedule_error(graph, schedule)
