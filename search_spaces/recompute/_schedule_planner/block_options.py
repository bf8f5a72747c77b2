"""Schedules for one block, from those that hold much and recompute nothing to those that hold little.

Other blocks' bytes are modelled as memory that is occupied between this block's forward and its backward.
Policies and planners are therefore asked for the block alone, with more and more memory occupied there; what
they then keep is what the block holds. Equal blocks share their options.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from memtune.activations.eviction import Policy, freeze_between, region_trace
from memtune.activations.schedules import (
    BlockRegions,
    FreeAfterForwardPlanner,
    Region,
    Solution,
    elements_of,
    find_block_schedule_error,
    solve_exactly,
    solve_rounded,
)
from memtune.hardware import Hardware, op_class, op_costs
from memtune.program import F64, I32, I64, Action, OpGraph, Schedule, Step
from memtune.search_spaces.recompute._schedule_planner.coarse_graph import stages_of

_LEVELS = 8
"""Levels of kept bytes, as fractions of what the block keeps without recompute, that policies are asked for.
"""
_LEVELS_EXACT = 4
"""The same for the integer program."""


@dataclass(frozen=True)
class ExactSource:
    """Checkmate's integer program as a source of options."""

    nodes: int
    exact_s: float = 0.0


FREE_AFTER_FORWARD = "free_after_forward"
"""The free-after-forward planner of `activations.schedules` as a source of options."""
Source = Policy | tuple[Policy, ...] | ExactSource | str


@dataclass(frozen=True, eq=False)
class BlockOption:
    """A schedule of a block with its bytes and seconds; bytes are those of values that only the
    block holds.
    """

    schedule: Schedule
    seconds: float
    """Seconds of recomputation."""
    held_bytes: int
    """Bytes held between forward and backward."""
    anchor: I32
    """(steps,) for each op that runs: its own number on its first run, else that of the next op that runs
    first.
    """
    bytes: I64
    """(steps,) live bytes while it runs, scratch included."""
    left_bytes: I64
    """(steps,) live bytes once it has run and values are freed; 0 where the op runs again."""

    @property
    def peak_bytes(self) -> int:
        """Largest live bytes while the block runs."""
        return int(self.bytes.max(initial=0))


def local_region(regions: BlockRegions, graph_index: int) -> Region:
    """Return the region of one block of graph `graph_index`; values that others hold as well have 0 bytes."""
    together, graph = regions.together, regions.graphs[graph_index]
    block = int(np.flatnonzero(regions.graph_index == graph_index)[-1])
    ops, values = regions.ops[block], regions.values[block]
    # Neighbours hold them too, so this block's schedule cannot free their bytes.
    others = together.outside_until[values] >= 0
    nothing = np.zeros(len(ops), np.int64)
    return replace(
        together,
        graph=graph,
        rows=together.rows[ops],
        carried=((),) * len(ops),
        storages=together.storages[values],
        outside_until=np.where(others, graph.n_ops, -1).astype(np.int32),
        scratch_bytes=together.scratch_bytes[ops],
        background_bytes=nothing,
        between_bytes=0,
        after_bytes=0,
        bytes=np.where(others, 0, together.bytes[values]),
    )


@lru_cache(maxsize=64)
def options_of(
    step: Step, regions: BlockRegions, graph_index: int, hardware: Hardware, sources: tuple[Source, ...]
) -> tuple[BlockOption, ...]:
    """Return the undominated options of a block of graph `graph_index`; the first one runs every op once.

    Args:
        step: The plain step.
        regions: Regions of its blocks.
        graph_index: Row of the block's graph in `regions.graphs`.
        hardware: For the time of ops.
        sources: Policies and planners that propose schedules.
    """
    region = local_region(regions, graph_index)
    costs = op_costs(step, hardware)
    op_s = costs.op_s.clip(min=costs.issue_s)[region.rows]
    plain = _option(region, op_s, regions.plain[graph_index])
    found = {plain.schedule: plain}
    for source in sources:
        for schedule in _schedules_from(source, step, region, op_s, plain):
            if schedule not in found and not find_block_schedule_error(region.graph, schedule):
                found[schedule] = _option(region, op_s, schedule)
    return (plain, *_undominated([each for each in found.values() if each.held_bytes < plain.held_bytes]))


def _undominated(options: Iterable[BlockOption]) -> Iterator[BlockOption]:
    kept: list[BlockOption] = []
    for each in sorted(options, key=lambda option: (option.seconds, option.held_bytes, option.peak_bytes)):
        # Sorted by seconds: an option is dominated if an earlier, faster one holds no more and peaks no
        # higher.
        if not any(
            other.held_bytes <= each.held_bytes and other.peak_bytes <= each.peak_bytes for other in kept
        ):
            kept.append(each)
            yield each


def _schedules_from(
    source: Source, step: Step, region: Region, op_s: F64, plain: BlockOption
) -> Iterator[Schedule]:
    if isinstance(source, Policy | tuple):
        options = source if isinstance(source, tuple) else (source,)
        yield from _by_policies(options, step, region, op_s, plain)
    elif isinstance(source, ExactSource):
        yield from _by_program(source, region, op_s, plain)
    else:
        planner = FreeAfterForwardPlanner(
            region.graph, region.bytes, op_s, region.outside_until, np.zeros(len(op_s), np.int32)
        )
        order = planner.order()
        # Values in the order in which their bytes cost least time: each prefix is an option.
        for freed in range(1, len(order) + 1):
            yield planner.schedule(frozenset(order[:freed]))


def _by_policies(
    options: tuple[Policy, ...], step: Step, region: Region, op_s: F64, plain: BlockOption
) -> Iterator[Schedule]:
    elements = elements_of(step, region)
    holes = (0, plain.peak_bytes // 4) if options[0].addressed else (0,)  # fragmentation costs no held bytes
    for level, more in product(range(_LEVELS), holes):
        # Occupying memory between forward and backward forces the policy to keep less of the block.
        between = max(plain.peak_bytes - plain.held_bytes * level // _LEVELS, 1)
        traces = [
            partial(region_trace, region, op_s, is_cheap, elements, keep_written=keep, between_bytes=between)
            for keep in (False, True)
        ]
        found = freeze_between(region, traces, options, plain.peak_bytes + more)
        if found is not None:
            yield found


def _by_program(source: ExactSource, region: Region, op_s: F64, plain: BlockOption) -> Iterator[Schedule]:
    stages = stages_of(region, op_s, source.nodes)
    for level in range(_LEVELS_EXACT):
        between = plain.peak_bytes - plain.held_bytes * level // _LEVELS_EXACT
        background = tuple(
            between if node == stages.loss else each for node, each in enumerate(stages.background_bytes)
        )
        problem = replace(stages, background_bytes=background).problem(plain.peak_bytes)
        solution: Solution = solve_rounded(problem)
        if source.exact_s and not solution.proven:
            exact = solve_exactly(problem, time_limit_s=source.exact_s)
            if exact is not None and (solution.over_bytes > 0 or exact.cost_s < solution.cost_s):
                solution = exact
        yield stages.schedule(solution)


def is_cheap(name: str) -> bool:
    """Return True if ops of this name take little time to recompute."""
    return op_class(name) not in _EXPENSIVE


_EXPENSIVE = frozenset({"attention", "convolution", "recurrent", "matmul"})


def _option(region: Region, op_s: F64, schedule: Schedule) -> BlockOption:
    graph: OpGraph = region.graph
    n_bytes, scratch = region.bytes.tolist(), region.scratch_bytes.tolist()
    ran = [False] * graph.n_ops
    live = held = 0
    first: list[bool] = []
    anchor: list[int] = []
    at: list[int] = []
    left: list[int] = []
    for number, each in enumerate(schedule.steps):
        if number == len(schedule.forward):
            held = live
        if each.action == Action.COMPUTE:
            live += sum(n_bytes[value] for value in graph.makes[each.of])
            first.append(not ran[each.of])
            ran[each.of] = True
            anchor.append(each.of)
            at.append(live + scratch[each.of])
            left.append(live)
        elif each.action == Action.FREE:
            live -= n_bytes[each.of]
            left[-1] = live
    for place in range(len(anchor) - 2, -1, -1):
        # Scanned backwards, so that a repeated op gets the anchor of the next first run.
        if not first[place]:
            anchor[place] = anchor[place + 1]
    seconds = float(op_s[schedule.computes()].sum() - op_s.sum())
    kept = np.where(first, left, 0).astype(np.int64)
    return BlockOption(schedule, seconds, held, np.asarray(anchor, np.int32), np.asarray(at, np.int64), kept)
