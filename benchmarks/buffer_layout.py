"""Where buffers with known lifetimes go in one piece of memory: dynamic storage allocation on a line and on a
circle.

A step's allocations repeat, so a lifetime may begin in one step and end in the next: on a circle. Two tiers,
native (`csrc/layout`): orders, first fit and local search for any number of buffers; an exact search for up
to 8192.
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
    """What is to be placed; one row a buffer, r of them. Each takes its size rounded up to its alignment."""

    start: I64  # (r,) alive from here on; any unit of time
    end: I64  # (r,) up to here, excluded; on a circle up to `start + period`, which wraps
    size_bytes: I64  # (r,) positive
    alignment_bytes: I64  # (r,) offsets are multiples of it
    period: int = 0  # length of the circle; 0: a line

    @classmethod
    def of(
        cls, rows: Iterable[tuple[int, int, int]], *, alignment_bytes: int = 1, period: int = 0
    ) -> Buffers:
        """Buffers from (start, end, bytes), all aligned alike."""
        table = np.array(list(rows), np.int64).reshape(-1, 3)
        start, end, size = (np.ascontiguousarray(column) for column in table.T)
        return cls(start, end, size, np.full(len(table), alignment_bytes, np.int64), period)

    def __len__(self) -> int:
        """Number of buffers."""
        return len(self.start)


@dataclass(frozen=True, eq=False)
class Layout:
    """Offsets for buffers, and how good they are."""

    offset_bytes: I64  # (r,)
    height_bytes: int
    """End of the highest buffer."""
    lower_bound_bytes: int
    """No layout is lower: the most bytes alive at once, or more where the exact tier has proven more."""
    nodes: int
    """Placements that the exact tier tried."""
    heuristic_s: float
    exact_s: float
    """Seconds on a core that each tier took."""

    @property
    def optimal(self) -> bool:
        """Whether no layout can be lower."""
        return self.height_bytes == self.lower_bound_bytes


def lay_out(
    buffers: Buffers, *, goal_bytes: int = 0, heuristic_s: float = 1.0, exact_s: float = 0.0, seed: int = 0
) -> Layout:
    """Offsets such that no two buffers share a byte at one moment, with a low height.

    Ends early where the height is within the goal or proven optimal. Limits are seconds of this thread on a
    core, so a busy machine does not change what is found by much; two runs under a limit may still differ.

    Args:
        buffers: What to place.
        goal_bytes: A height that is low enough, a capacity say; 0: as low as possible.
        heuristic_s: How long the heuristic tier may take. One best fit over time is always made, and is
            quick.
        exact_s: How long the exact tier may go on from there; 0: not at all.
        seed: Of the local search.

    Raises:
        ValueError: A row is no buffer: empty lifetime or size, or a lifetime longer than the period.

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
    """What is wrong with `layout` as one of `buffers`, empty if nothing is; shares no code with what makes
    layouts.
    """
    columns = (buffers.start, buffers.end, buffers.size_bytes, buffers.alignment_bytes, buffers.period)
    return _native.layout_fault(*columns, layout.offset_bytes, layout.height_bytes)
