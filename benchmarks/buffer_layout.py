"""Dynamic storage allocation: offsets for buffers with known lifetimes in one contiguous arena, on a line or
on a circle.

A step's allocations repeat, so a lifetime may begin in one step and end in the next: then time is a circle.
Two native tiers (`csrc/layout`): orders, first fit and local search for any number of buffers; an exact
search for up to 8192.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memtune import _native
from memtune.program import I64

__all__ = ["Buffers", "Layout", "fault", "lay_out"]


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers to place, one row each, r of them; sizes are rounded up to the alignment."""

    start: I64  # (r,) alive from here on; any unit of time
    end: I64  # (r,) up to here, excluded; on a circle up to `start + period`, which wraps
    size_bytes: I64  # (r,) positive
    alignment_bytes: I64  # (r,) offsets are multiples of it
    period: int = 0  # length of the circle; 0: a line

    @classmethod
    def of(
        cls, rows: Iterable[tuple[int, int, int]], *, alignment_bytes: int = 1, period: int = 0
    ) -> Buffers:
        """Return buffers from (start, end, bytes), all with one alignment."""
        table = np.array(list(rows), np.int64).reshape(-1, 3)
        start, end, size = (np.ascontiguousarray(column) for column in table.T)
        return cls(start, end, size, np.full(len(table), alignment_bytes, np.int64), period)

    def __len__(self) -> int:
        """Return the number of buffers."""
        return len(self.start)


@dataclass(frozen=True, eq=False)
class Layout:
    """Offsets for buffers, with bounds and costs of the search."""

    offset_bytes: I64  # (r,)
    height_bytes: int
    """End of the highest buffer."""
    lower_bound_bytes: int
    """No layout is lower: the largest number of live bytes, or more if the exact tier has proven more."""
    nodes: int
    """Placements that the exact tier tried."""
    heuristic_s: float
    exact_s: float
    """CPU seconds of each tier."""

    @property
    def optimal(self) -> bool:
        """True if no layout can be lower."""
        return self.height_bytes == self.lower_bound_bytes


def lay_out(
    buffers: Buffers, *, goal_bytes: int = 0, heuristic_s: float = 1.0, exact_s: float = 0.0, seed: int = 0
) -> Layout:
    """Return offsets of low height such that no two live buffers overlap.

    Ends early if the height is within the goal or proven optimal. Limits are CPU seconds of this thread, so a
    busy machine changes the result little; two runs under a limit may still differ.

    Args:
        buffers: Buffers to place.
        goal_bytes: A height that is low enough, such as a capacity; 0 asks for the lowest.
        heuristic_s: Limit of the heuristic tier. One best fit over time always runs, and is quick.
        exact_s: Limit of the exact tier, which starts from the heuristic result; 0 skips it. If its search
            ends neither with a proof nor at the goal, the last quarter is the heuristic tier's.
        seed: Seed of the local search.

    Raises:
        ValueError: A buffer is invalid: empty lifetime or size, or a lifetime longer than the period.

    Source: local search after Imanishi and Xu, ISMM 2024; exact tier after Moffitt, MiniMalloc, ASPLOS 2023.
    """
    alignment = buffers.alignment_bytes
    columns = (buffers.start, buffers.end, buffers.size_bytes, alignment, buffers.period)
    offset, lower, nodes, packed_s, searched_s = _native.lay_out(
        *columns, goal_bytes, heuristic_s, exact_s, seed
    )
    rounded = (buffers.size_bytes + alignment - 1) // alignment * alignment
    height = int((offset + rounded).max(initial=0))
    return Layout(offset, height, lower, nodes, packed_s, searched_s)


def fault(buffers: Buffers, layout: Layout) -> str:
    """Return the first error of `layout` for `buffers`, '' if it is valid; shares no code with the
    solvers.
    """
    columns = (buffers.start, buffers.end, buffers.size_bytes, buffers.alignment_bytes, buffers.period)
    return _native.layout_fault(*columns, layout.offset_bytes, layout.height_bytes)
