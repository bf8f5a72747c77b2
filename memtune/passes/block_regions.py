"""Regions of single blocks: what a frozen schedule is for where a block's parameters are there for its own calls alone.

Rule 1. A block's region is its forward and its backward, up to the sum of the gradients of its input. What it is given, other
        blocks' values and gradients that flow in among it, comes from outside and is nobody's to run again here.
Rule 2. Blocks with equal ops, values and bytes are of one sort, and a schedule for one of them is one for all.
Rule 3. What others hold or read of a block's values (its output, the gradient of its input) lives as long as in the plain step;
        all else lives as the block's schedule says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.passes.region import Region, added_gradients, region_with
from memtune.passes.schedule import run_schedule
from memtune.program import I32, Kind, Phase, Step, Tier
from memtune.schedule import Action, Do, OpGraph, Schedule, plain_schedule, scheduled, wrong_with


@dataclass(frozen=True, eq=False)
class BlockRegions:
    """The regions of all blocks of one step."""

    together: Region
    """Their ops: forward of all blocks, then backward of all, in the order in which they run."""
    blocks: tuple[int, ...]
    """Rows of `step.blocks` in the order in which their forward runs."""
    ops: tuple[I32, ...]
    """By block, forward first: numbers of its ops in `together`."""
    values: tuple[I32, ...]
    """By block: numbers of its values in `together`."""
    sort: I32
    """(blocks,) which of `graphs` each block's is."""
    graphs: tuple[OpGraph, ...]

    @property
    def plain(self) -> tuple[Schedule, ...]:
        """By sort, the schedule that runs every op once."""
        return tuple(plain_schedule(graph) for graph in self.graphs)


@lru_cache(maxsize=4)
def block_regions_of(step: Step) -> BlockRegions | str:
    """The regions of the blocks of `step`, or why they could not run by themselves."""
    why = _no_regions(step)
    if why:
        return why
    order = np.argsort(step.enter[:-1], kind="stable").astype(np.int32)
    inside = (step.op_block >= 0) & ~added_gradients(step)
    forward = np.flatnonzero(inside & (step.op_phase == Phase.FORWARD)).astype(np.int32)
    backward = np.flatnonzero(inside & (step.op_phase == Phase.BACKWARD)).astype(np.int32)
    for rows, turn in ((forward, order), (backward, order[::-1])):
        runs = step.op_block[rows][np.flatnonzero(np.diff(step.op_block[rows], prepend=-1))]
        if not np.array_equal(runs, turn):
            return "blocks do not run one after the other, forward and then backward"
    rows = np.concatenate([forward, backward])
    talks = step.op_group[rows] > 0
    if talks.any():
        return f"{step.names[step.op_name[rows[int(talks.argmax())]]]}: ranks exchange data in a block"
    together = region_with(step.without_handing_over(rows), rows, len(forward), _carried(step, rows, len(forward)))
    block_of = step.op_block[rows]
    return _crosses(step, together, block_of) or _split(step, together, block_of, tuple(order.tolist()))


def _no_regions(step: Step) -> str:
    if not step.blocks:
        return "the model has no blocks"
    if len(step.call_block) != len(step.blocks) or not step.call_grad.all():
        return "a block runs several times in a step, without gradients, or inside a checkpoint of the model's own"
    if ((step.op_phase == Phase.RECOMPUTE) & (step.op_block >= 0)).any():
        return "parts of a block run again already"
    if (step.enter[:-1] < 0).any():
        return "a block's forward was not seen"
    return ""


def _carried(step: Step, rows: I32, n_forward: int) -> dict[int, list[int]]:
    """Rows that follow each op before the next one's: gradients that are added up, and what runs between the blocks."""
    found: dict[int, list[int]] = {}
    for first, end in ((0, n_forward), (n_forward, len(rows))):
        mine = rows[first:end]
        between = np.setdiff1d(np.arange(mine[0], mine[-1]), mine)
        for row, op in zip(between.tolist(), (np.searchsorted(mine, between) - 1 + first).tolist(), strict=True):
            found.setdefault(op, []).append(row)
    return found


def _crosses(step: Step, together: Region, block_of: I32) -> str:
    """Why a block is more than its own ops: it writes into what others made, or adds up gradients of several blocks."""
    graph = together.graph
    writes = np.flatnonzero((step.use_mutates == 1) & np.isin(step.use_op, together.rows))
    abroad = ~np.isin(step.use_storage[writes], together.storages) & (step.kind[step.use_storage[writes]] != Kind.BUFFER)
    if abroad.any():
        row = step.use_op[writes[int(abroad.argmax())]]
        return f"{step.names[step.op_name[row]]} in a block writes into what others made"
    maker = np.asarray(graph.maker, np.int32)
    for op, written in enumerate(graph.writes):
        if any(block_of[maker[value]] != block_of[op] for value in written):
            return f"{graph.names[op]} in a block writes into what another block made"
    readers: dict[tuple[int, int], list[int]] = {}
    for op in range(graph.n_forward, graph.n_ops):
        for value in graph.reads[op]:
            if maker[value] >= graph.n_forward and block_of[maker[value]] != block_of[op]:
                readers.setdefault((value, int(block_of[op])), []).append(op)
    for ops in readers.values():
        if all(graph.names[op].startswith("aten.add.") for op in ops):
            return "gradients of several blocks are added up inside of them"
    return ""


def _split(step: Step, together: Region, block_of: I32, order: tuple[int, ...]) -> BlockRegions:
    graph = together.graph
    maker = np.asarray(graph.maker, np.int32)
    crossing = _crossing(step, together, block_of)
    ops = tuple(np.flatnonzero(block_of == block).astype(np.int32) for block in order)
    values = tuple(np.flatnonzero(block_of[maker] == block).astype(np.int32) for block in order)
    graphs: dict[object, int] = {}
    found: list[OpGraph] = []
    sort = []
    for mine, made in zip(ops, values, strict=True):
        local = _local(graph, mine, made)
        outside = tuple(crossing[made].tolist())
        key = (local, tuple(together.bytes[made].tolist()), tuple(together.scratch_bytes[mine].tolist()), outside)
        if key not in graphs:
            graphs[key] = len(found)
            found.append(local)
        sort.append(graphs[key])
    until = np.where(crossing, graph.n_ops, -1).astype(np.int32)
    together = replace(together, outside_until=until)
    return BlockRegions(together, order, ops, values, np.asarray(sort, np.int32), tuple(found))


def _crossing(step: Step, together: Region, block_of: I32) -> npt.NDArray[np.bool_]:
    """(m,) values that something outside of their block reads, or that others hold when its forward or backward has ended."""
    storages, maker = together.storages, np.asarray(together.graph.maker, np.int32)
    value_of = np.full(step.n_storages, -1, np.int32)
    value_of[storages] = np.arange(len(storages), dtype=np.int32)
    op_at = np.full(step.n_ops, -1, np.int32)
    op_at[together.rows] = np.arange(len(together.rows), dtype=np.int32)
    value, op = value_of[step.use_storage], op_at[step.use_op]
    used = value >= 0
    reader = np.where(op[used] >= 0, block_of[op[used]], -1)
    found = np.zeros(len(storages), bool)
    found[value[used][reader != block_of[maker[value[used]]]]] = True
    last_backward = np.full(len(step.blocks), -1, np.int32)
    backward = together.rows[together.graph.n_forward :]
    last_backward[block_of[together.graph.n_forward :]] = backward
    until = np.where(maker < together.graph.n_forward, step.leave[block_of[maker]], last_backward[block_of[maker]])
    found |= step.held_until[storages] > until
    found[value_of[step.returned[value_of[step.returned] >= 0]]] = True
    return found


def _local(graph: OpGraph, ops: I32, values: I32) -> OpGraph:
    """The part of `graph` that is these ops, by their own numbers."""
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
    """`step`, whose regions these are, with each block run by its schedule.

    Args:
        step: The plain step.
        regions: Of its blocks.
        schedules: One for each block in the order of `regions.blocks`, right for its graph; forwards are in plain order.
    """
    return _kept_by_schedules(run_schedule(step, regions.together, _joined(regions, schedules), by_readers=True))


def _kept_by_schedules(new: Step) -> Step:
    """`new`, whose blocks run by schedules, with what a block's schedule keeps for its backward as what it saves.

    That is every value of forward that the block's ops of backward read, or those that run again there; so passes that put
    blocks, or what they keep, elsewhere treat it as they treat what autograd saves. How long values live stays as it was.
    """
    later = (new.use_phase == Phase.BACKWARD) | (new.use_phase == Phase.RECOMPUTE)
    block = new.op_block[new.use_op]
    producer = new.producer[new.use_storage]
    kept = later & (block >= 0) & (producer >= 0) & (new.op_phase[producer] == Phase.FORWARD)
    kept &= new.tier[new.use_storage] == Tier.DEVICE
    rows = np.flatnonzero(kept)
    pairs, first, of = np.unique(
        block[rows].astype(np.int64) * new.n_storages + new.use_storage[rows], return_index=True, return_inverse=True
    )
    of_block, storage = (each.astype(np.int32) for each in np.divmod(pairs, new.n_storages))
    until = np.zeros(len(pairs), np.int32)
    np.maximum.at(until, of, new.use_op[rows])
    before = _after_last_use(new, storage, of_block)
    asked = new.use_op[rows[first]]
    entered = _argument_of(new, of_block, storage)
    alike = storage, np.where(entered < 0, new.producer[storage], entered), entered < 0  # arguments first, as the runtime does
    order, by_asked = np.lexsort((*alike, before)), np.lexsort((*alike, asked))
    turn = np.argsort(by_asked)
    columns: dict[str, Any] = {
        "save_storage": storage, "save_before": before, "save_until": until, "save_used_until": until,
        "save_asked": asked, "save_turn": turn, "save_is_output": np.zeros(len(pairs)),
        "save_call": of_block,
    }  # fmt: skip
    there = new.columns("save_")
    saves: dict[str, Any] = {
        name: np.concatenate([there[name], np.asarray(columns[name])[order].astype(there[name].dtype)]) for name in columns
    }
    return replace(new, **saves, by_schedules=True)


def _argument_of(step: Step, block: I32, storage: I32) -> I32:
    """(n,) which of a block's arguments each storage is, -1 for none."""
    found = {
        pair: at for at, pair in reversed([*enumerate(zip(step.input_block.tolist(), step.input_storage.tolist(), strict=True))])
    }
    return np.array([found.get(pair, -1) for pair in zip(block.tolist(), storage.tolist(), strict=True)], np.int32)


def _after_last_use(step: Step, storage: I32, block: I32) -> I32:
    """The op before which each block has done in forward with each storage."""
    forward = (step.use_phase == Phase.FORWARD) & (step.op_block[step.use_op] >= 0)
    key = step.op_block[step.use_op[forward]].astype(np.int64) * step.n_storages + step.use_storage[forward]
    mine = block.astype(np.int64) * step.n_storages + storage
    last = np.where(step.op_block[step.producer[storage]] == block, step.producer[storage], step.enter[block] - 1)
    found = np.full(len(mine), -1, np.int64)
    at = np.searchsorted(mine, key)
    hit = (at < len(mine)) & (mine[np.minimum(at, len(mine) - 1)] == key)
    np.maximum.at(found, at[hit], step.use_op[forward][hit])
    result: I32 = (np.maximum(found, last) + 1).astype(np.int32)
    return result


def _joined(regions: BlockRegions, schedules: Sequence[Schedule]) -> Schedule:
    """The schedules of all blocks as one of the region of all of them."""
    graph = regions.together.graph
    backward: list[Do] = []
    for ops, schedule in zip(reversed(regions.ops), reversed(schedules), strict=True):
        number = ops.tolist()
        for each in schedule.backward:
            if each.action == Action.COMPUTE:
                backward.append(each._replace(of=number[each.of], along=tuple(number[op] for op in each.along)))
    return scheduled(graph, range(graph.n_forward), backward, made_by="blocks")


def wrong_with_block(graph: OpGraph, schedule: Schedule) -> str:
    """Why `schedule` cannot run a block: `wrong_with`, and no op of forward may run twice before backward."""
    forward = [op for each in schedule.forward if each.action == Action.COMPUTE for op in (*each.along, each.of)]
    if forward != list(range(graph.n_forward)):
        return "its forward is not in plain order"
    return wrong_with(graph, schedule)
