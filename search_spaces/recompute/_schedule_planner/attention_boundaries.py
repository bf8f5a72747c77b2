"""DistFlashAttn's regions, each from one attention to the next, as a schedule: attention's outputs are kept,
the rest is recomputed.

1. Region r is what forward runs in the blocks between its r-th attention and the one after; region 0 ends at
  the first attention. Attention and all ops outside the blocks run once; so do ops that must not run twice
  and ops whose outputs are held anyway.
2. A region runs again when backward first reads one of its values, from attention's output and the residual
  stream that enters the region.
3. The residual stream is kept where it enters every k-th region. When backward reaches the k regions behind
  it, the residual stream entering each of them is recomputed first: their output projections and MLPs run,
  attention does not, and nothing else is held.
4. If parameters are available for a block's own calls only, each block has a schedule of its own by the same
  rules. Its edges cut the region that crosses them, and the residual stream entering a block is kept, since
  the projections and MLPs that made it need the parameters of the block before.

With k near the square root of the number of attentions, L, that is at most L + 2 √L hidden states, where
keeping the residual stream at every region takes 2 L. It costs the projections and MLPs of k - 1 out of k
regions a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memtune.activations.schedules import (
    BlockRegions,
    Region,
    block_regions_of,
    find_block_schedule_error,
    region_of,
)
from memtune.program import I32, OpGraph, Schedule, Step, build_schedule, find_schedule_error
from memtune.search_spaces.recompute._block_planner.fits import is_attention
from memtune.technique import Reason

ALTERNATIVE = "recompute: {kind: attention_output}"
"""The technique to choose if regions cannot be cut at attention."""
_MADE_BY = "attention_boundary"
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Boundaries:
    """The schedule and the values that it keeps."""

    schedule: Schedule
    every: int
    """Number of regions whose residual stream is recomputed together (k of Rule 3)."""
    kept: tuple[int, ...]
    """Values of the blocks that are kept from forward to backward."""


@lru_cache(maxsize=8)
def boundary_schedule(step: Step, every: int | None) -> Boundaries | str:
    """Return the schedule of `step` by regions of `every` attentions (Rule 3), or why there is none.

    Args:
        step: The step without recompute.
        every: k of Rule 3; None: the square root of the number of attentions.
    """
    region = region_of(step)
    if isinstance(region, str):
        return region
    attentions = _attentions(region.graph)
    every = every or max(math.isqrt(len(attentions)), 1)
    inside = step.ops.block[region.rows[: region.graph.n_forward]] >= 0
    regions = _Regions(region, inside, attentions, every)
    schedule = build_schedule(
        region.graph, range(region.graph.n_forward), regions.backward(), made_by=_MADE_BY
    )
    wrong = find_schedule_error(region.graph, schedule)
    if wrong:
        return f"regions between attentions cannot be repeated: {wrong}"
    return Boundaries(schedule, every, kept_values(region.graph, inside & ~regions.again, regions.again))


@dataclass(frozen=True)
class BlockBoundaries:
    """A schedule for each block (Rule 4), with the bytes that they keep."""

    schedules: tuple[Schedule, ...]
    """In the order in which the blocks run forward."""
    kept_bytes: int
    """Bytes of the blocks' values that are kept from forward to backward."""


@lru_cache(maxsize=8)
def block_boundary_schedules(step: Step, every: int | None) -> BlockBoundaries | Reason:
    """Return a schedule by regions within each block of `step`, or why they cannot run again.

    Args:
        step: The step without recompute.
        every: k of Rule 3, for blocks with several attentions; None: the square root of their number.
    """
    regions = block_regions_of(step)
    if isinstance(regions, str):
        return Reason(regions, ALTERNATIVE)
    most = max(len(_attentions(graph)) for graph in regions.graphs)
    if (every or 1) > most:
        why = (
            f"another block makes a block's input, so the residual stream is kept at every {most}"
            " attentions at least"
        )
        return Reason(why, f"residual_every: {most}, or omit it")
    found: list[tuple[Schedule, _Mask]] = []
    for graph_index, graph in enumerate(regions.graphs):
        local, attentions = _local_region(regions, graph_index), _attentions(graph)
        inside = np.ones(graph.n_forward, bool)
        mine = _Regions(local, inside, attentions, every or max(math.isqrt(len(attentions)), 1))
        schedule = build_schedule(graph, range(graph.n_forward), mine.backward(), made_by=_MADE_BY)
        wrong = find_block_schedule_error(graph, schedule)
        if wrong:
            return Reason(f"regions between attentions cannot be repeated: {wrong}", ALTERNATIVE)
        found.append((schedule, mine.again))
    of_block = [found[graph_index] for graph_index in regions.graph_index.tolist()]
    return BlockBoundaries(
        tuple(each for each, _ in of_block), _kept_bytes(regions, [again for _, again in of_block])
    )


def _local_region(regions: BlockRegions, graph_index: int) -> Region:
    """Return the region of one block of graph `graph_index`; values that others hold as well have 0 bytes."""
    together, graph = regions.together, regions.graphs[graph_index]
    # Any block of the graph will do, since equal blocks share it.
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


def _kept_bytes(regions: BlockRegions, again: list[_Mask]) -> int:
    together = regions.together
    runs_again = np.zeros(together.graph.n_forward, bool)
    for ops, mine in zip(regions.ops, again, strict=True):
        runs_again[ops[: len(mine)][mine]] = True
    kept = kept_values(together.graph, ~runs_again, runs_again)
    return int(together.bytes[list(kept)].sum())


def _attentions(graph: OpGraph) -> list[int]:
    return [op for op in range(graph.n_forward) if is_attention(graph.names[op])]


def kept_values(graph: OpGraph, once: _Mask, again: _Mask) -> tuple[int, ...]:
    """Return the values of the forward ops `once` that backward, or the ops that run `again`, read."""
    read = {value for reads in graph.reads[graph.n_forward :] for value in reads}
    for op in np.flatnonzero(again).tolist():
        read.update(graph.reads[op])
    return tuple(value for op in np.flatnonzero(once).tolist() for value in graph.makes[op] if value in read)


class _Regions:
    """Ops of each region that run again, and the point in backward at which they do.

    Args:
        region: The model's region, or that of one block.
        inside: (forward ops,) ops that may run again.
        attentions: Attention ops, ascending.
        every: k of Rule 3.
    """

    def __init__(self, region: Region, inside: _Mask, attentions: list[int], every: int) -> None:
        self._graph, self._every = region.graph, every
        graph, n = region.graph, region.graph.n_forward
        self._number: I32 = np.searchsorted(attentions, np.arange(n), side="right").astype(np.int32)
        held = [
            graph.maker[value]
            for value in np.flatnonzero(region.outside_until >= 0).tolist()
            if graph.maker[value] < n
        ]
        self.again = inside.copy()
        """(forward ops,) what runs again where backward reads it."""
        # Rule 1.
        self.again[[*attentions, *held, *(op for op in graph.once if op < n)]] = False
        self._keep_written_together()
        kept = {
            graph.maker[v] for r in range(1 + every, len(attentions) + 1, every) for v in self._entering(r)
        }
        self.again[sorted(kept)] = False
        self._keep_written_together()

    def _keep_written_together(self) -> None:
        """Recompute values that are changed in place with all ops that change them, or not at all."""
        graph, changed = self._graph, True
        while changed:
            changed = False
            for value, writers in graph.writers.items():
                together = [op for op in (graph.maker[value], *writers) if op < graph.n_forward]
                if self.again[together].any() and not self.again[together].all():
                    self.again[together] = False
                    changed = True

    def backward(self) -> list[int]:
        """Return backward's ops, each preceded by the recomputation of freed values that it reads."""
        graph = self._graph
        wanted = self._wanted()
        available: set[int] = set()
        order: list[int] = []
        rebuilt: set[int] = set()
        for op in range(graph.n_forward, graph.n_ops):
            for value in graph.reads[op]:
                if value in available or not self._runs_again(value):
                    continue
                region = int(self._number[graph.maker[value]])
                # Regions 1 to k are the first part; region 0 shares it, since nothing enters it.
                part = (max(region, 1) - 1) // self._every
                if part not in rebuilt:  # Rule 3
                    rebuilt.add(part)
                    first = part * self._every + 1
                    last = min(first + self._every - 1, int(self._number[-1]))
                    order += self._run_for(
                        {v for r in range(first + 1, last + 1) for v in self._entering(r)}, available
                    )
                if value not in available:
                    order += self._run_for(wanted[region], available)
            order.append(op)
        return order

    def _wanted(self) -> dict[int, set[int]]:
        """Return region → its values that backward reads."""
        graph = self._graph
        found: dict[int, set[int]] = {}
        for reads in graph.reads[graph.n_forward :]:
            for value in filter(self._runs_again, reads):
                found.setdefault(int(self._number[graph.maker[value]]), set()).add(value)
        return found

    def _entering(self, region: int) -> set[int]:
        """Return the residual stream at the start of `region`: earlier values that recomputed ops read."""
        graph = self._graph
        return {
            value
            for op in range(graph.n_forward)
            if self.again[op] and self._number[op] >= region
            for value in graph.reads[op]
            if self._runs_again(value) and self._number[graph.maker[value]] < region
        }

    def _runs_again(self, value: int) -> bool:
        maker = self._graph.maker[value]
        return maker < self._graph.n_forward and bool(self.again[maker])

    def _run_for(self, values: Iterable[int], available: set[int]) -> list[int]:
        """Return the ops, in forward order, that make `values` available, and add these to `available`."""
        graph: OpGraph = self._graph
        ops: set[int] = set()
        waiting = [value for value in values if value not in available]
        while waiting:
            value = waiting.pop()
            # A value made again must also be changed again, or backward would read the unchanged one.
            for op in (graph.maker[value], *graph.writers.get(value, ())):
                if op in ops or op >= graph.n_forward:
                    continue
                ops.add(op)
                waiting += [
                    each for each in graph.reads[op] if self._runs_again(each) and each not in available
                ]
        available.update(values)
        return sorted(ops)
