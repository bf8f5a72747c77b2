"""How much of each block moves, so that all of them together give a ratio of their bytes, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated

from pydantic import Field

from memtune.activations.offload import claimable_bytes
from memtune.errors import ApplyError
from memtune.program import Program

Runs = tuple[tuple[tuple[Annotated[float, Field(ge=0, le=1)], Annotated[int, Field(ge=1)]], ...], ...]
"""By stage (one where there is no pipeline) the shares of its blocks, each with how many blocks in a row have
it: plain data.
"""


def leading(ratio: float, sizes: Sequence[int]) -> list[int]:
    """Bytes of each block: all of the first ones, part of the one at the boundary, none of the last, needed
    first in backward.

    Args:
        ratio: Of the bytes of all blocks together.
        sizes: Bytes that each block may give away.
    """
    left, found = round(ratio * sum(sizes)), list[int]()
    for size in sizes:
        found.append(min(size, left))
        left -= found[-1]
    return found


def spread(ratio: float, sizes: Sequence[int]) -> list[int]:
    """As much as `leading` moves, in equal shares of all blocks but the last, so that each block's copies
    have a block's time.

    What is over where that is not enough is the last block's: it has nothing behind it to copy beside.
    """
    total, before = round(ratio * sum(sizes)), sum(sizes[:-1])
    if total >= before:
        return [*sizes[:-1], total - before]
    found = [total * size // before for size in sizes[:-1]]
    over = total - sum(found)  # less than a byte of each block
    for n, size in enumerate(sizes[:-1]):
        if over and found[n] < size:
            found[n], over = found[n] + 1, over - 1
    return [*found, 0]


def by_count(ratio: float, n_blocks: int) -> list[float]:
    """Share of each of `n_blocks` blocks under `leading`, where all are as large."""
    return [min(max(ratio * n_blocks - i, 0.0), 1.0) for i in range(n_blocks)]


def shares_of(
    program: Program,
    min_bytes: int,
    groups: Sequence[Sequence[int]],
    part: Callable[[int, Sequence[int]], list[int]],
) -> list[float]:
    """Share of each block's bytes that moves.

    Args:
        program: With recomputation where there is any.
        min_bytes: Smaller tensors stay.
        groups: Blocks that give a ratio together, in their order.
        part: From the number of a group and the bytes of its blocks to how many each gives.
    """
    sizes = claimable_bytes(program.step, min_bytes, program.stages)
    shares = [0.0] * len(sizes)
    for number, blocks in enumerate(groups):
        for block, n_bytes in zip(blocks, part(number, [sizes[each] for each in blocks]), strict=True):
            shares[block] = n_bytes / sizes[block] if sizes[block] else 0.0
    return shares


def to_runs(program: Program, shares: Sequence[float]) -> Runs:
    """`shares` of all blocks, as a plan has them."""
    stages, n_blocks = program.stages, len(shares)
    of = (
        [range(n_blocks)]
        if stages is None
        else [stages.blocks(stage, n_blocks) for stage in range(len(stages.starts))]
    )
    return tuple(
        tuple((share, len(list(same))) for share, same in groupby(shares[block] for block in blocks))
        for blocks in of
    )


def of_all(runs: Runs) -> list[float]:
    """The shares of all blocks, from what `to_runs` made of them."""
    return [share for stage in runs for share, count in stage for _ in range(count)]


def of_runs(runs: Runs, stages: Sequence[int]) -> list[float]:
    """The shares that a plan has for some blocks.

    Args:
        runs: As `to_runs` makes them.
        stages: Of each block, in order; all zero where there is no pipeline.

    Raises:
        ValueError: The plan has other blocks; the message says what it has.
    """
    counts = [sum(count for _, count in each) for each in runs]
    if max(stages, default=-1) >= len(runs) or any(counts[stage] != stages.count(stage) for stage in stages):
        raise ValueError(f"shares of {', '.join(map(str, counts))} blocks")
    of = [[share for share, count in each for _ in range(count)] for each in runs]
    return [of[stage][list(stages[:n]).count(stage)] for n, stage in enumerate(stages)]


def of_another(kind: str, evidence: str) -> ApplyError:
    """Return the error of a plan that is for another model."""
    return ApplyError(
        f"offload.activations: {{kind: {kind}}} needs a plan of how much of each block moves.",
        evidence=evidence,
        fix="memtune search  writes it with the config",
        code="MT316",
    )
