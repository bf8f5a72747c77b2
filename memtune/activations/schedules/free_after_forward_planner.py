"""Planner that frees saved values after forward and recomputes each once, just before backward first reads
it.

It does what a compiler's partitioner does (torch's `activation_memory_budget`), over the ops of a whole
region. Freed values are recomputed one by one, so that a block's second run is never resident as a whole.
Values are selected in the order of seconds per byte, which include the ops that must run again for them and
do not run again already.

If a whole block is recomputed, freeing its output costs no additional time. But without that output the next
block's recomputation waits for this block's, and all blocks are resident at once. So there is a second order,
which never frees what a block passes to another.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Set

from memtune.program import F64, I32, I64, OpGraph, Schedule, build_schedule


class FreeAfterForwardPlanner:
    """Values of one region that may be freed, and the schedules that free them.

    Args:
        graph: Ops of the region.
        n_bytes: (m,) bytes of each value.
        op_s: (n,) seconds of each op.
        outside_until: (m,) op during which a value is still held outside, -1 for never.
        op_block: (n,) block of each op, -1 for none.
    """

    def __init__(self, graph: OpGraph, n_bytes: I64, op_s: F64, outside_until: I32, op_block: I32) -> None:
        self._graph, self._op_s = graph, op_s.tolist()
        self._bytes: list[int] = n_bytes.tolist()
        # Not recomputed: outputs of ops that write in place, run once, or read a value that is written later.
        fixed = [
            op in graph.once
            or bool(graph.writes[op])
            or any(value in graph.writers for value in graph.makes[op])
            or any(graph.writers.get(value, (-1,))[-1] > op for value in graph.reads[op])
            for op in range(graph.n_ops)
        ]
        self._again = [not fixed[maker] and maker < graph.n_forward for maker in graph.maker]
        # Values that backward does not read end in forward anyway.
        asked = {value for op in range(graph.n_forward, graph.n_ops) for value in graph.reads[op]}
        self._saved = frozenset(value for value in asked if self._again[value])
        held = (outside_until >= graph.n_forward).tolist()
        self.candidates = [value for value in sorted(self._saved) if not held[value] and self._bytes[value]]
        block = op_block.tolist()
        forward = range(graph.n_forward)
        self.block_outputs = frozenset(
            v for op in forward for v in graph.reads[op] if block[graph.maker[v]] != block[op]
        )

    def order(self, but: Set[int] = frozenset()) -> list[int]:
        """Return the candidates not in `but`, the cheapest per byte first, then the one read last."""
        kept, found = set(self._saved), list[int]()
        running: set[int] = set()  # ops that run again for freed values
        priced_with: defaultdict[int, set[int]] = defaultdict(set)  # op → candidates whose price includes it
        heap: list[tuple[float, int]] = []
        price: dict[int, float] = {}

        def put(value: int) -> None:
            ops = self._chain(value, kept) - running
            for op in ops:
                priced_with[op].add(value)
            price[value] = sum(self._op_s[op] for op in ops) / self._bytes[value]
            heapq.heappush(heap, (price[value], value))

        for value in self.candidates:
            if value not in but:
                put(value)
        while heap:
            cost, value = heapq.heappop(heap)
            if value not in kept or cost != price[value]:
                continue  # an outdated entry: the value has a lower price by now
            new = self._chain(value, kept) - running
            found.append(value)
            kept.remove(value)
            running |= new
            # Their price falls: they share the ops that run again by now.
            for other in {other for op in new for other in priced_with[op]} & kept:
                put(other)
        return found

    def _chain(self, value: int, kept: Set[int]) -> set[int]:
        """Return the ops that run again for `value` if only `kept` of the recomputable ones are resident."""
        found: set[int] = set()
        stack = [value]
        while stack:
            op = self._graph.maker[stack.pop()]
            if op not in found:
                found.add(op)
                stack += [read for read in self._graph.reads[op] if self._again[read] and read not in kept]
        return found

    def schedule(self, gone: Set[int]) -> Schedule:
        """Return the schedule that frees `gone` after forward and recomputes them in backward."""
        graph = self._graph
        there = set(self._saved - gone)
        backward: list[int] = []
        for op in range(graph.n_forward, graph.n_ops):
            for value in graph.reads[op]:
                if self._again[value]:
                    self._recompute(value, there, backward)
            backward.append(op)
        return build_schedule(graph, range(graph.n_forward), backward, made_by="planned")

    def _recompute(self, value: int, there: set[int], order: list[int]) -> None:
        stack = [value]
        while stack:
            # An explicit stack: a chain may be as long as the model is deep.
            at = stack[-1]
            missing = [
                read
                for read in self._graph.reads[self._graph.maker[at]]
                if self._again[read] and read not in there
            ]
            if at in there:
                stack.pop()
            elif missing:
                stack += missing
            else:
                order.append(self._graph.maker[at])
                there.update(made for made in self._graph.makes[self._graph.maker[at]] if self._again[made])
                stack.pop()
