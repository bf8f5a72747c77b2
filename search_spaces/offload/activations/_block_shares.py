"""Shares of each block's bytes to offload, so that all blocks together give a ratio to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated

from pydantic import Field

from memtune.activations.offload import claimable_bytes
from memtune.program import Program

Runs = tuple[tuple[tuple[Annotated[float, Field(ge=0, le=1)], Annotated[int, Field(ge=1)]], ...], ...]
"""Shares of the blocks by stage (one stage without a pipeline), each with its number of consecutive blocks.
"""


def leading_bytes(ratio: float, sizes: Sequence[int]) -> list[int]:
    """Return the bytes to offload of each block: all of the first blocks, part of the one at the boundary."""
    # The last blocks are resident, because backward needs them first.
    left, found = round(ratio * sum(sizes)), list[int]()
    for size in sizes:
        found.append(min(size, left))
        left -= found[-1]
    return found


def spread_bytes(ratio: float, sizes: Sequence[int]) -> list[int]:
    """Return as many bytes as `leading_bytes`, in equal shares of all blocks but the last."""
    # With equal shares the copies of a block have the time of the next block. The last block offloads
    # only the rest that the others cannot hold, since no block after it overlaps with its copies.
    total, before = round(ratio * sum(sizes)), sum(sizes[:-1])
    if total >= before:
        return [*sizes[:-1], total - before]
    found = [total * size // before for size in sizes[:-1]]
    over = total - sum(found)  # lost by rounding down, less than one byte per block
    for n, size in enumerate(sizes[:-1]):
        if over and found[n] < size:
            found[n], over = found[n] + 1, over - 1
    return [*found, 0]


def shares_by_count(ratio: float, n_blocks: int) -> list[float]:
    """Return the share of each of `n_blocks` blocks under `leading_bytes`, if all have the same size."""
    return [min(max(ratio * n_blocks - i, 0.0), 1.0) for i in range(n_blocks)]


def shares_of(
    program: Program,
    min_bytes: int,
    groups: Sequence[Sequence[int]],
    part: Callable[[int, Sequence[int]], list[int]],
) -> list[float]:
    """Return the share of each block's bytes to offload: `part` gives the bytes of the blocks of a group."""
    sizes = claimable_bytes(program.step, min_bytes, program.stages)
    shares = [0.0] * len(sizes)
    for number, blocks in enumerate(groups):
        for block, n_bytes in zip(blocks, part(number, [sizes[each] for each in blocks]), strict=True):
            shares[block] = n_bytes / sizes[block] if sizes[block] else 0.0
    return shares


def to_runs(program: Program, shares: Sequence[float]) -> Runs:
    """Return the `shares` of all blocks in the form that a plan stores."""
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


def all_shares(runs: Runs) -> list[float]:
    """Return the shares of all blocks, the inverse of `to_runs`."""
    return [share for stage in runs for share, count in stage for _ in range(count)]


def shares_of_blocks(runs: Runs, stages: Sequence[int]) -> list[float]:
    """Return the shares of blocks of these stages in a plan's `runs`; ValueError: it has others."""
    counts = [sum(count for _, count in each) for each in runs]
    if max(stages, default=-1) >= len(runs) or any(counts[stage] != stages.count(stage) for stage in stages):
        raise ValueError(f"shares of {', '.join(map(str, counts))} blocks")
    of = [[share for share, count in each for _ in range(count)] for each in runs]
    return [of[stage][list(stages[:n]).count(stage)] for n, stage in enumerate(stages)]
