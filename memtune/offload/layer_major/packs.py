"""Packs of blocks and stages on ranks: plain data that planner, pass and runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Span = tuple[int, int]
"""Half-open range of blocks: first, and the one after the last."""
BoundaryTier = Literal["device", "host"]
"""Tier of saved boundary activations."""


@dataclass(frozen=True)
class Packs:
    """Layer-major order of a step: each pack runs all micro-batches of a group before the next pack begins.

    The *turnaround* is the last pack of backward, where forward turns to backward. No other pack runs between
    its forward and its backward, so it runs both at once, together with the prologue and epilogue (the user's
    code before and after the blocks), and is not recomputed.

    Raises:
        ValueError: The packs do not form one chain over all blocks.
    """

    forward: tuple[Span, ...]
    """Packs of all blocks before the turnaround; empty if there is only one pack."""
    backward: tuple[Span, ...]
    """Packs of all blocks, in forward order."""
    prefetch: bool = False
    """Prefetch the next pack's weights while one computes."""
    group: int = 0
    """Micro-batches that a pack runs before it is freed; 0: all of a step."""
    deferred: tuple[int, ...] = ()
    """Blocks with deferred updates, which overlap with the next step's forward."""
    joined: int = 1
    """Micro-batches that a forward pack runs as one batch (u_F / u_B of Harmony)."""

    def __post_init__(self) -> None:
        """Check that each block is in one pack of each direction."""
        if (
            not self.backward
            or not _is_chain(self.backward, self.blocks)
            or not _is_chain(self.forward, self.turnaround[0])
        ):
            raise ValueError(f"packs {self.forward} and {self.backward} do not follow one another")
        _require_blocks(self.deferred, self.blocks)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.backward[-1][1]

    @property
    def turnaround(self) -> Span:
        """The last pack, which runs forward and backward at once."""
        return self.backward[-1]

    @property
    def uses(self) -> tuple[Span, ...]:
        """The packs in the order in which a group of micro-batches uses them."""
        return (*self.forward, self.turnaround, *reversed(self.backward[:-1]))

    def groups(self, micro_batches: int) -> tuple[range, ...]:
        """Return the ranges of micro-batches that run through the packs together, in order."""
        size = self.group or micro_batches
        return tuple(
            range(first, min(first + size, micro_batches)) for first in range(0, micro_batches, size)
        )


def joins(group: range, joined: int) -> tuple[range, ...]:
    """Return the micro-batches of `group` by `joined`, in order."""
    return tuple(group[first : first + joined] for first in range(0, len(group), joined))


def spans(sizes: Sequence[int]) -> tuple[Span, ...]:
    """Return consecutive packs of `sizes` blocks each."""
    found: list[Span] = []
    for size in sizes:
        first = found[-1][1] if found else 0
        found.append((first, first + size))
    return tuple(found)


def _is_chain(packs: Sequence[Span], blocks: int) -> bool:
    firsts = [0, *(last for _, last in packs)]
    # One more beginning than packs: that of the pack which would follow the last one.
    return firsts[-1] == blocks and all(
        first == begin < end for first, (begin, end) in zip(firsts, packs, strict=False)
    )


def in_parts(n_bytes: Sequence[int], parts: int) -> list[range]:
    """Split pieces of `n_bytes` each, kept in order, into `parts` ranges of about equal bytes.

    One range is copied with each micro-batch; ranges may be empty.
    """
    left, found, first = sum(n_bytes), list[range](), 0
    for part in range(parts, 0, -1):
        end, share = first, left / part
        # Each part takes its share of the remaining bytes: a fixed share, rounded up in early parts, would
        # give the last ones less.
        while end < len(n_bytes) and share > 0:
            share, left = share - n_bytes[end], left - n_bytes[end]
            end += 1
        found.append(range(first, end))
        first = end
    return found


def _require_blocks(deferred: Sequence[int], blocks: int) -> None:
    if any(not 0 <= each < blocks for each in deferred):
        raise ValueError(f"deferred updates of blocks {list(deferred)}, but there are {blocks} blocks")


class StageUse(NamedTuple):
    """One load of a stage on its rank, for all micro-batches."""

    stage: int
    kind: Literal["forward", "turnaround", "backward"]


@dataclass(frozen=True)
class StageLayout:
    """Pipeline stages on fewer ranks: each rank loads its stages one after the other.

    Each use of a stage covers all micro-batches of all ranks. The last stage is the turnaround: its forward
    and backward are one use. A stage remains resident between two uses that follow each other on a rank (the
    last of forward, the first of backward).

    Raises:
        ValueError: The stages do not form one chain, or neighbours are on one rank.
    """

    stages: tuple[Span, ...]
    ranks: tuple[int, ...]
    """The rank of each stage."""
    prefetch: bool = True
    """Prefetch the next stage's weights while one computes."""
    deferred: tuple[int, ...] = ()
    """Blocks with deferred updates, which overlap with the next step's forward."""

    def __post_init__(self) -> None:
        """Check that stages cover each block once, and that neighbours are on different ranks."""
        if (
            not self.stages
            or not _is_chain(self.stages, self.stages[-1][1])
            or len(self.ranks) != len(self.stages)
        ):
            raise ValueError(f"stages {self.stages} on ranks {self.ranks} do not follow one another")
        if any(one == other for one, other in pairwise(self.ranks)):
            raise ValueError(f"stages that follow one another are on one rank: {self.ranks}")
        _require_blocks(self.deferred, self.stages[-1][1])

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(stage for stage, where in enumerate(self.ranks) if where == rank)

    def uses(self, rank: int) -> tuple[StageUse, ...]:
        """Return the uses of a rank's stages, in order."""
        last, stages = len(self.stages) - 1, self.stages_of(rank)
        forward = [StageUse(stage, "turnaround" if stage == last else "forward") for stage in stages]
        # The last stage has no backward of its own: it is part of its turnaround.
        return (*forward, *(StageUse(stage, "backward") for stage in reversed(stages) if stage != last))

    def resident(self, rank: int, number: int) -> bool:
        """Return whether the stage of use `number` remains resident for the rank's next use."""
        uses = self.uses(rank)
        return number + 1 < len(uses) and uses[number + 1].stage == uses[number].stage

    def blocks(self, stage: int) -> range:
        """Return the blocks of a stage."""
        return range(*self.stages[stage])
