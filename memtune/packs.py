"""Which blocks are run together over all micro-batches: plain data that the planner, the pass and the runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""First block, and the one after the last."""


@dataclass(frozen=True)
class Packs:
    """Layer-major order of a step: each pack runs all micro-batches of a group before the next one begins.

    The *turn* is the last pack of backward: nothing lies between its forward and its backward, so it runs both, with what comes
    before the blocks and after them, and is not run again.

    Raises:
        ValueError: The packs are not those of one chain.
    """

    forward: tuple[Span, ...]
    """Of all blocks before the turn; none where there is one pack only."""
    backward: tuple[Span, ...]
    """Of all blocks, in forward order."""
    prefetch: bool = False
    """The next pack's weights come in while one computes."""
    group: int = 0
    """Micro-batches that a pack runs before it is let go; 0: all of a step."""

    def __post_init__(self) -> None:
        """Refuse what leaves blocks out or has them twice."""
        if not self.backward or not _is_chain(self.backward, self.blocks) or not _is_chain(self.forward, self.turn[0]):
            raise ValueError(f"packs {self.forward} and {self.backward} do not follow one another")

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.backward[-1][1]

    @property
    def turn(self) -> Span:
        """The pack that runs forward and backward at once."""
        return self.backward[-1]

    @property
    def uses(self) -> tuple[Span, ...]:
        """Packs in the order in which a group of micro-batches uses them."""
        return (*self.forward, self.turn, *reversed(self.backward[:-1]))

    def groups(self, micro_batches: int) -> tuple[range, ...]:
        """Micro-batches that are together in a pack, one range after the other."""
        size = self.group or micro_batches
        return tuple(range(first, min(first + size, micro_batches)) for first in range(0, micro_batches, size))

    def document(self) -> dict[str, list[list[int]]]:
        """The spans as plain data, for a plan."""
        return {"forward": [list(each) for each in self.forward], "backward": [list(each) for each in self.backward]}


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Packs of `sizes` blocks each, one after the other."""
    found: list[Span] = []
    for size in sizes:
        first = found[-1][1] if found else 0
        found.append((first, first + size))
    return tuple(found)


def _is_chain(packs: Sequence[Span], blocks: int) -> bool:
    firsts = [0, *(last for _, last in packs)]
    return firsts[-1] == blocks and all(first == begin < end for first, (begin, end) in zip(firsts, packs, strict=False))
