"""How much of each block moves: the first ones whole, since backward asks for them last."""

from __future__ import annotations

from collections.abc import Callable

from memtune.program import Program


def leading(ratio: float, n_blocks: int) -> list[float]:
    """Share of each of `n_blocks` blocks: 1 for the first `ratio` of them, the rest of it for the next, 0 for the last."""
    return [min(max(ratio * n_blocks - i, 0.0), 1.0) for i in range(n_blocks)]


def spread(ratio: float, n_blocks: int) -> list[float]:
    """As much as `leading` moves, in equal shares of all blocks but the last, so that each block's copies have a block's time.

    What is over where that is not enough is the last block's: it has nothing behind it to copy beside.
    """
    total, before = ratio * n_blocks, max(n_blocks - 1, 1)
    each = min(total / before, 1.0)
    return [each] * before + [max(total - before, 0.0)] * (n_blocks - before)


def shares_of(program: Program, of_rank: Callable[[int], list[float]]) -> list[float]:
    """Share of each block of `program`, where `of_rank` says those of as many blocks as one rank has, in their order."""
    stages, n_blocks = program.stages, len(program.step.blocks)
    if stages is None:
        return of_rank(n_blocks)
    shares = [0.0] * n_blocks
    for rank in range(stages.ranks):
        mine = [block for stage in stages.of_rank(rank) for block in stages.blocks(stage, n_blocks)]
        for block, share in zip(mine, of_rank(len(mine)), strict=True):
            shares[block] = share
    return shares
