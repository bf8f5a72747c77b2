"""Which blocks are run together over all micro-batches: plain data that the planner, the pass and the runtime
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Span = tuple[int, int]
"""First block, and the one after the last."""


@dataclass(frozen=True)
class Packs:
    """Layer-major order of a step: each pack runs all micro-batches of a group before the next one begins.

    The *turn* is the last pack of backward: nothing lies between its forward and its backward, so it runs
    both, with what comes before the blocks and after them, and is not run again.

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
    late: tuple[int, ...] = ()
    """Blocks that the host updates beside the next step's forward."""

    def __post_init__(self) -> None:
        """Refuse what leaves blocks out or has them twice."""
        if (
            not self.backward
            or not _is_chain(self.backward, self.blocks)
            or not _is_chain(self.forward, self.turn[0])
        ):
            raise ValueError(f"packs {self.forward} and {self.backward} do not follow one another")
        _require_blocks(self.late, self.blocks)

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
        return tuple(
            range(first, min(first + size, micro_batches)) for first in range(0, micro_batches, size)
        )


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Packs of `sizes` blocks each, one after the other."""
    found: list[Span] = []
    for size in sizes:
        first = found[-1][1] if found else 0
        found.append((first, first + size))
    return tuple(found)


def _is_chain(packs: Sequence[Span], blocks: int) -> bool:
    firsts = [0, *(last for _, last in packs)]
    return firsts[-1] == blocks and all(
        first == begin < end for first, (begin, end) in zip(firsts, packs, strict=False)
    )


def in_parts(n_bytes: Sequence[int], parts: int) -> list[range]:
    """What comes in with each of `parts` micro-batches of pieces that come in their order, about as many
    bytes each time.
    """
    left, found, first = sum(n_bytes), list[range](), 0
    for part in range(parts, 0, -1):
        end, share = first, left / part
        while end < len(n_bytes) and share > 0:
            share, left = share - n_bytes[end], left - n_bytes[end]
            end += 1
        found.append(range(first, end))
        first = end
    return found


def _require_blocks(late: Sequence[int], blocks: int) -> None:
    if any(not 0 <= each < blocks for each in late):
        raise ValueError(f"blocks {list(late)} are to be updated late, and there are {blocks}")


class Use(NamedTuple):
    """A stage that a rank brings in, for all micro-batches."""

    stage: int
    kind: Literal["forward", "turn", "backward"]


@dataclass(frozen=True)
class OnRanks:
    """More stages than ranks, of which each rank takes its own in turn, over all micro-batches of all ranks.

    The last stage is the turn: its forward and backward are one use. A rank whose last use of forward is also
    its first one of backward keeps that stage in between.

    Raises:
        ValueError: The stages are not those of one chain, or neighbours are on one rank.
    """

    stages: tuple[Span, ...]
    ranks: tuple[int, ...]
    """Where each stage is."""
    prefetch: bool = True
    """The next stage's weights come in while one computes."""
    late: tuple[int, ...] = ()
    """Blocks that the host updates beside the next step's forward."""

    def __post_init__(self) -> None:
        """Refuse what leaves blocks out, or passes nothing between ranks."""
        if (
            not self.stages
            or not _is_chain(self.stages, self.stages[-1][1])
            or len(self.ranks) != len(self.stages)
        ):
            raise ValueError(f"stages {self.stages} on ranks {self.ranks} do not follow one another")
        if any(one == other for one, other in pairwise(self.ranks)):
            raise ValueError(f"stages that follow one another are on one rank: {self.ranks}")
        _require_blocks(self.late, self.stages[-1][1])

    def mine(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for stage, where in enumerate(self.ranks) if where == rank)

    def uses(self, rank: int) -> tuple[Use, ...]:
        """What a rank brings in, in order."""
        last, mine = len(self.stages) - 1, self.mine(rank)
        forward = [Use(stage, "turn" if stage == last else "forward") for stage in mine]
        return (*forward, *(Use(stage, "backward") for stage in reversed(mine) if stage != last))

    def stays(self, rank: int, number: int) -> bool:
        """Whether the stage of a rank's use stays for its next one."""
        uses = self.uses(rank)
        return number + 1 < len(uses) and uses[number + 1].stage == uses[number].stage

    def blocks(self, stage: int) -> range:
        """The blocks of a stage."""
        return range(*self.stages[stage])
