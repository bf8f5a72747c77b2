"""The smallest ratio under which each rank of a pipeline, or the one rank there is, stays within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from memtune.activations.offload import OffloadClaim, move_activations
from memtune.hardware import Hardware
from memtune.program import Phase, Program, RankClass, Resource, Stages, Step, order, slots_between
from memtune.search_spaces._pass_pipeline import steps_of_stages
from memtune.search_spaces.offload.activations._block_shares import leading, shares_of, spread
from memtune.search_spaces.recompute._block_planner import after_later, live_bytes
from memtune.technique import Target, Technique

GRAIN = 8
"""Ratios are eighths, as in the paper."""


@dataclass(frozen=True)
class Ratios:
    """What was found: how much moves on each rank of a pipeline (or the one there is), and the peaks
    of each.
    """

    eighths: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    plain_bytes: tuple[int, ...]


def waiting(stages: Stages, micro_batches: int) -> list[bool]:
    """Of each stage, whether a micro-batch waits there long enough to leave and to come back
    (`activations.offload.pipeline_slots`).
    """
    found = [False] * len(stages.starts)
    for rank in range(stages.ranks):
        actions = order(stages.schedule, rank, stages.ranks, stages.per_rank, micro_batches)
        for stage, between in slots_between(actions).items():
            found[stage] = between >= 2
    return found


def by_stage(program: Program, ratios: Sequence[float]) -> list[float]:
    """The ratio of each stage from that of its rank; a stage on which nothing waits keeps all. One number
    without a pipeline.
    """
    if program.stages is None:
        return list(ratios)
    waits = waiting(program.stages, program.accumulate)
    return [ratios[stage % program.stages.ranks] if each else 0.0 for stage, each in enumerate(waits)]


def shares(program: Program, ratios: Sequence[float], min_bytes: int) -> list[float]:
    """Share of each block that moves: of a stage's bytes its ratio, to the byte; without a pipeline all
    blocks share alike.
    """
    stages, n_blocks = program.stages, len(program.step.blocks)
    if stages is None:
        return shares_of(program, min_bytes, [range(n_blocks)], lambda _, sizes: spread(ratios[0], sizes))
    of = [stages.blocks(stage, n_blocks) for stage in range(len(stages.starts))]
    return shares_of(program, min_bytes, of, lambda stage, sizes: leading(ratios[stage], sizes))


def moved(program: Program, shares: Sequence[float], min_bytes: int, ahead: int) -> Program:
    """`program` with as much of each block's activations on the host; without a pipeline `ahead` tensors come
    back early.
    """
    stages = None if program.stages is None else replace(program.stages, in_slots=True)
    claims = [OffloadClaim(block, share, min_bytes) for block, share in enumerate(shares) if share > 0]
    step = move_activations(program.step, claims, ahead=ahead, stages=stages)
    return replace(program.with_step(step), stages=stages)


def of_a_block(step: Step, min_bytes: int) -> int:
    """Tensors of a block that come back while the block after it runs backward: as many as one block saves at
    most.
    """
    rows = (step.saves.block >= 0) & (step.storages.bytes[step.saves.storage] >= max(min_bytes, 1))
    pairs = set(zip(step.saves.block[rows].tolist(), step.saves.storage[rows].tolist(), strict=True))
    return max(Counter(block for block, _ in pairs).values(), default=0)


def _peaks(
    program: Program,
    ratios: Sequence[float],
    how: tuple[int, int],
    later: tuple[Technique, ...],
    hardware: Hardware,
) -> list[int]:
    """Of each rank of a pipeline, or of the rank that stands for all."""
    new = program
    if any(ratios):
        new = moved(program, shares(program, by_stage(program, ratios), how[0]), *how)
    if new.stages is None:
        steps = [after_later(new, later, hardware).step]
    else:
        steps = steps_of_stages(new, Target(hardware, new.ranks, chosen={each.slot: each for each in later}))
    return [int(live_bytes(each, hardware).max(initial=0)) for each in steps]


@lru_cache(maxsize=64)
def smallest(
    step: Step,
    stages: Stages | None,
    run: tuple[int, int, int],
    how: tuple[int, int],
    budget_bytes: int,
    later: tuple[Technique, ...],
    hardware: Hardware,
) -> Ratios:
    """The smallest eighths that stay within the budget, all of them where none does; by bisection, all ranks
    at once.

    Args:
        step: That of all stages.
        stages: Of a pipeline.
        run: Ranks, micro-batch, and how many of them a step has.
        how: Smaller tensors stay, and so many come back early where there is no pipeline.
        budget_bytes: Of each rank.
        later: Techniques whose passes come later.
        hardware: What it runs on.
    """
    program = Program((RankClass(run[0], step),), run[1], run[2], stages=stages)
    plain = found = _peaks(program, [0.0] * (stages.ranks if stages else 1), how, later, hardware)
    low, high = (
        [0 if peak <= budget_bytes else 1 for peak in plain],
        [0 if peak <= budget_bytes else GRAIN for peak in plain],
    )
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        peaks = _peaks(program, [each / GRAIN for each in middle], how, later, hardware)
        for rank, peak in enumerate(peaks):
            if low[rank] < high[rank]:
                low[rank], high[rank] = (
                    (low[rank], middle[rank]) if peak <= budget_bytes else (middle[rank] + 1, high[rank])
                )
    found = _peaks(program, [each / GRAIN for each in low], how, later, hardware) if any(low) else plain
    return Ratios(tuple(low), tuple(found), tuple(plain))


def bytes_by_stage(program: Program, shares: Sequence[float], min_bytes: int) -> list[int]:
    """What each stage sends to the host for one micro-batch."""
    step, stages = moved(program, shares, min_bytes, 0).step, program.stages
    rows = (
        (step.ops.resource == Resource.DEVICE_TO_HOST)
        & (step.ops.phase == Phase.FORWARD)
        & (step.ops.block >= 0)
    )
    if stages is None:
        return [int(step.ops.traffic_bytes[rows].sum())]
    of = [stages.blocks(stage, len(step.blocks)) for stage in range(len(stages.starts))]
    blocks, n_bytes = step.ops.block[rows], step.ops.traffic_bytes[rows]
    return [int(n_bytes[(blocks >= each.start) & (blocks < each.stop)].sum()) for each in of]
