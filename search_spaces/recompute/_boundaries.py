"""DistFlashAttn's regions, from one attention to the next, as a frozen schedule: attention's outputs stay, the rest runs again.

Rule 1. Region r is what forward runs in the blocks between its r-th attention and the one after; region 0 leads to the first one.
        Attention, and what no block runs, runs once; so do ops that must not run twice and what is held anyway.
Rule 2. A region runs again when backward first reads a value of it, from attention's output and the residual stream entering it.
Rule 3. Of the residual stream, what enters every k-th region is kept. When backward comes to the k regions behind it, what enters
        each of them is rebuilt first: their output projections and MLPs run, attention does not, and nothing else is held.

With k near the square root of the number of attentions, L, that is L + 2 √L hidden states at most, where keeping what enters
every region takes 2 L. It costs the projections and MLPs of k - 1 out of k regions once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memtune.passes.region import Region, region_of
from memtune.program import Step
from memtune.schedule import OpGraph, Schedule, scheduled, wrong_with
from memtune.search_spaces.recompute._keeps import is_attention


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
    attentions = [op for op in range(region.graph.n_forward) if is_attention(region.graph.names[op])]
    every = every or max(math.isqrt(len(attentions)), 1)
    regions = _Regions(region, step, attentions, every)
    schedule = scheduled(region.graph, range(region.graph.n_forward), regions.backward(), made_by="attention_boundary")
    wrong = wrong_with(region.graph, schedule)
    return f"regions between attentions cannot be repeated: {wrong}" if wrong else Boundaries(schedule, every, regions.kept())


class _Regions:
    def __init__(self, region: Region, step: Step, attentions: list[int], every: int) -> None:
        self._graph, self._every = region.graph, every
        graph, n = region.graph, region.graph.n_forward
        self._number = np.searchsorted(attentions, np.arange(n), side="right")
        inside = step.op_block[region.rows[:n]] >= 0
        self._inside = inside.copy()
        held = [graph.maker[value] for value in np.flatnonzero(region.outside_until >= 0).tolist() if graph.maker[value] < n]
        self._again = inside
        self._again[[*attentions, *held, *(op for op in graph.once if op < n)]] = False
        self._keep_written_together()
        kept = {graph.maker[v] for r in range(1 + every, len(attentions) + 1, every) for v in self._entering(r)}
        self._again[sorted(kept)] = False
        self._keep_written_together()

    def _keep_written_together(self) -> None:
        """What is changed in place runs again with all that changes it, or not at all."""
        graph, changed = self._graph, True
        while changed:
            changed = False
            for value, writers in graph.writers.items():
                together = [op for op in (graph.maker[value], *writers) if op < graph.n_forward]
                if self._again[together].any() and not self._again[together].all():
                    self._again[together] = False
                    changed = True

    def kept(self) -> tuple[int, ...]:
        """Values of the blocks' ops that run once, read in backward."""
        graph, n = self._graph, self._graph.n_forward
        makers = np.flatnonzero(self._inside & ~self._again).tolist()
        read = {value for reads in graph.reads[n:] for value in reads}
        for op in range(n):
            if self._again[op]:
                read.update(graph.reads[op])
        return tuple(value for op in makers for value in graph.makes[op] if value in read)

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
                    order += self._run_for({v for r in range(first + 1, last + 1) for v in self._entering(r)}, there)
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
        """The residual stream at the start of `region`: made before it, read in it or later by what runs again."""
        graph = self._graph
        return {
            value
            for op in range(graph.n_forward)
            if self._again[op] and self._number[op] >= region
            for value in graph.reads[op]
            if self._runs_again(value) and self._number[graph.maker[value]] < region
        }

    def _runs_again(self, value: int) -> bool:
        maker = self._graph.maker[value]
        return maker < self._graph.n_forward and bool(self._again[maker])

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
