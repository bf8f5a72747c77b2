"""DistFlashAttn's regions, from one attention to the next, as a frozen schedule: attention's outputs stay,
the rest runs again.

Rule 1. Region r is what forward runs in the blocks between its r-th attention and the one after; region 0
leads to the first one.
        Attention, and what no block runs, runs once; so do ops that must not run twice and what is held
        anyway.
Rule 2. A region runs again when backward first reads a value of it, from attention's output and the residual
stream entering it. Rule 3. Of the residual stream, what enters every k-th region is kept. When backward comes
to the k regions behind it, what enters
        each of them is rebuilt first: their output projections and MLPs run, attention does not, and nothing
        else is held.

With k near the square root of the number of attentions, L, that is L + 2 √L hidden states at most, where
keeping what enters every region takes 2 L. It costs the projections and MLPs of k - 1 out of k regions once
more.

Rule 4. Where parameters are there for a block's own calls alone, each block has a schedule of its own, by the
same rules: its
        edges cut the region that crosses them, and the residual stream entering a block stays, since the
        projections and MLPs that made it need the parameters of the block before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memtune.activations.schedules import BlockRegions, Region, block_regions_of, region_of, wrong_with_block
from memtune.program import I32, OpGraph, Schedule, Step, scheduled, wrong_with
from memtune.search_spaces.recompute._block_planner import is_attention
from memtune.search_spaces.recompute._schedule_planner.block_options import local_region
from memtune.technique import Reason

INSTEAD = "recompute: {kind: attention_output}"
"""What to choose where regions cannot be cut at attention."""
_MADE_BY = "attention_boundary"
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Boundaries:
    """The schedule, and what it keeps."""

    schedule: Schedule
    every: int
    """Regions whose residual stream is rebuilt together."""
    kept: tuple[int, ...]
    """Values of the blocks that stay from forward to backward."""


@lru_cache(maxsize=8)
def boundaries_of(step: Step, every: int | None) -> Boundaries | str:
    """Regions from attention to attention for `step`, or why they cannot be run again.

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
    schedule = scheduled(region.graph, range(region.graph.n_forward), regions.backward(), made_by=_MADE_BY)
    wrong = wrong_with(region.graph, schedule)
    if wrong:
        return f"regions between attentions cannot be repeated: {wrong}"
    return Boundaries(schedule, every, kept_values(region.graph, inside & ~regions.again, regions.again))


@dataclass(frozen=True)
class BlockBoundaries:
    """A schedule for each block (Rule 4), and what they keep."""

    schedules: tuple[Schedule, ...]
    """In the order in which the blocks' forward runs."""
    kept_bytes: int
    """Of the blocks' values that stay from forward to backward."""


@lru_cache(maxsize=8)
def boundaries_in_blocks(step: Step, every: int | None) -> BlockBoundaries | Reason:
    """Regions from attention to attention within each block of `step`, or why they cannot be run again.

    Args:
        step: The step without recompute.
        every: k of Rule 3, for blocks with several attentions; None: the square root of their number.
    """
    regions = block_regions_of(step)
    if isinstance(regions, str):
        return Reason(regions, INSTEAD)
    most = max(len(_attentions(graph)) for graph in regions.graphs)
    if (every or 1) > most:
        why = (
            f"what enters a block is made by another one, so the residual stream stays at every {most}"
            " attentions at least"
        )
        return Reason(why, f"residual_every: {most}, or leave it out")
    found: list[tuple[Schedule, _Mask]] = []
    for sort, graph in enumerate(regions.graphs):
        local, attentions = local_region(step, regions, sort), _attentions(graph)
        inside = np.ones(graph.n_forward, bool)
        mine = _Regions(local, inside, attentions, every or max(math.isqrt(len(attentions)), 1))
        schedule = scheduled(graph, range(graph.n_forward), mine.backward(), made_by=_MADE_BY)
        wrong = wrong_with_block(graph, schedule)
        if wrong:
            return Reason(f"regions between attentions cannot be repeated: {wrong}", INSTEAD)
        found.append((schedule, mine.again))
    of_block = [found[sort] for sort in regions.sort.tolist()]
    return BlockBoundaries(
        tuple(each for each, _ in of_block), _kept_bytes(regions, [again for _, again in of_block])
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
    """Values of the forward ops `once` that backward reads, or the ops that run `again`."""
    read = {value for reads in graph.reads[graph.n_forward :] for value in reads}
    for op in np.flatnonzero(again).tolist():
        read.update(graph.reads[op])
    return tuple(value for op in np.flatnonzero(once).tolist() for value in graph.makes[op] if value in read)


class _Regions:
    """What runs again of a region, and when.

    Args:
        region: The model's, or a block's own.
        inside: (forward ops,) what may run again.
        attentions: Ops, ascending.
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
        self.again[[*attentions, *held, *(op for op in graph.once if op < n)]] = False
        self._keep_written_together()
        kept = {
            graph.maker[v] for r in range(1 + every, len(attentions) + 1, every) for v in self._entering(r)
        }
        self.again[sorted(kept)] = False
        self._keep_written_together()

    def _keep_written_together(self) -> None:
        """What is changed in place runs again with all that changes it, or not at all."""
        graph, changed = self._graph, True
        while changed:
            changed = False
            for value, writers in graph.writers.items():
                together = [op for op in (graph.maker[value], *writers) if op < graph.n_forward]
                if self.again[together].any() and not self.again[together].all():
                    self.again[together] = False
                    changed = True

    def backward(self) -> list[int]:
        """Ops of backward, and before each what it reads and is not there."""
        graph = self._graph
        wanted = self._wanted()
        there: set[int] = set()
        order: list[int] = []
        rebuilt: set[int] = set()
        for op in range(graph.n_forward, graph.n_ops):
            for value in graph.reads[op]:
                if value in there or not self._runs_again(value):
                    continue
                region = int(self._number[graph.maker[value]])
                part = (max(region, 1) - 1) // self._every
                if part not in rebuilt:  # Rule 3
                    rebuilt.add(part)
                    first = part * self._every + 1
                    last = min(first + self._every - 1, int(self._number[-1]))
                    order += self._run_for(
                        {v for r in range(first + 1, last + 1) for v in self._entering(r)}, there
                    )
                if value not in there:
                    order += self._run_for(wanted[region], there)
            order.append(op)
        return order

    def _wanted(self) -> dict[int, set[int]]:
        """Region → its values that backward reads."""
        graph = self._graph
        found: dict[int, set[int]] = {}
        for reads in graph.reads[graph.n_forward :]:
            for value in filter(self._runs_again, reads):
                found.setdefault(int(self._number[graph.maker[value]]), set()).add(value)
        return found

    def _entering(self, region: int) -> set[int]:
        """The residual stream at the start of `region`: made before it, read in it or later by what runs
        again.
        """
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

    def _run_for(self, values: Iterable[int], there: set[int]) -> list[int]:
        """Ops, in forward's order, after which `values` are there; they are put into `there`."""
        graph: OpGraph = self._graph
        ops: set[int] = set()
        waiting = [value for value in values if value not in there]
        while waiting:
            value = waiting.pop()
            for op in (graph.maker[value], *graph.writers.get(value, ())):
                if op in ops or op >= graph.n_forward:
                    continue
                ops.add(op)
                waiting += [each for each in graph.reads[op] if self._runs_again(each) and each not in there]
        there.update(values)
        return sorted(ops)
