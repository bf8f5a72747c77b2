"""The smallest offload ratio under which each rank of a pipeline, or the only rank, stays within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from memtune.activations.offload import OffloadClaim, move_activations
from memtune.hardware import Hardware
from memtune.program import Phase, Program, RankClass, Resource, Stages, Step, slots_between, stage_actions
from memtune.search_spaces._stage_steps import steps_of_stages
from memtune.search_spaces.offload.activations._block_shares import leading_bytes, shares_of, spread_bytes
from memtune.search_spaces.recompute._block_planner.budget import apply_later_passes
from memtune.search_spaces.recompute._block_planner.measured_options import live_bytes
from memtune.technique import Target, Technique

GRAIN = 8
"""Ratios are multiples of an eighth, as in the paper."""


@dataclass(frozen=True)
class Ratios:
    """The solved ratios and peaks of each rank of a pipeline, or of the only rank."""

    eighths: tuple[int, ...]
    """(ranks,) ratio in eighths."""
    peak_bytes: tuple[int, ...]
    """(ranks,) peak with these ratios."""
    plain_bytes: tuple[int, ...]
    """(ranks,) peak without offload."""


def stages_with_slots(stages: Stages, micro_batches: int) -> list[bool]:
    """Return for each stage whether its micro-batches wait long enough to be offloaded and reloaded."""
    # That takes two slots between forward and backward (`activations.offload.pipeline_slots`).
    found = [False] * len(stages.starts)
    for rank in range(stages.ranks):
        actions = stage_actions(stages.schedule, rank, stages.ranks, stages.per_rank, micro_batches)
        for stage, between in slots_between(actions).items():
            found[stage] = between >= 2
    return found


def ratios_by_stage(program: Program, ratios: Sequence[float]) -> list[float]:
    """Return the ratio of each stage from that of its rank, one ratio without a pipeline."""
    # A stage without two slots between forward and backward keeps everything resident.
    if program.stages is None:
        return list(ratios)
    waits = stages_with_slots(program.stages, program.accumulate)
    return [ratios[stage % program.stages.ranks] if each else 0.0 for stage, each in enumerate(waits)]


def shares(program: Program, ratios: Sequence[float], min_bytes: int) -> list[float]:
    """Return each block's share to offload: its stage's ratio to the byte, equal ones without a pipeline."""
    stages, n_blocks = program.stages, len(program.step.blocks)
    if stages is None:
        return shares_of(
            program, min_bytes, [range(n_blocks)], lambda _, sizes: spread_bytes(ratios[0], sizes)
        )
    of = [stages.blocks(stage, n_blocks) for stage in range(len(stages.starts))]
    return shares_of(program, min_bytes, of, lambda stage, sizes: leading_bytes(ratios[stage], sizes))


def offloaded(program: Program, shares: Sequence[float], min_bytes: int, prefetch: int) -> Program:
    """Return `program` with a share of each block's activations on the host.

    Without a pipeline `prefetch` tensors are prefetched; in a pipeline the slots of the schedule decide.
    """
    stages = None if program.stages is None else replace(program.stages, in_slots=True)
    claims = [OffloadClaim(block, share, min_bytes) for block, share in enumerate(shares) if share > 0]
    step = move_activations(program.step, claims, prefetch=prefetch, stages=stages)
    return replace(program.with_step(step), stages=stages)


def most_tensors_of_a_block(step: Step, min_bytes: int) -> int:
    """Return the most tensors that a block saves: prefetched while the block after it runs backward."""
    rows = (step.saves.block >= 0) & (step.storages.bytes[step.saves.storage] >= max(min_bytes, 1))
    pairs = set(zip(step.saves.block[rows].tolist(), step.saves.storage[rows].tolist(), strict=True))
    return max(Counter(block for block, _ in pairs).values(), default=0)


def _peaks(
    program: Program,
    ratios: Sequence[float],
    copies: tuple[int, int],
    later: tuple[Technique, ...],
    hardware: Hardware,
) -> list[int]:
    """Return the peak of each rank of a pipeline, or of the rank that represents all."""
    new = program
    if any(ratios):
        new = offloaded(program, shares(program, ratios_by_stage(program, ratios), copies[0]), *copies)
    if new.stages is None:
        steps = [apply_later_passes(new, later, hardware).step]
    else:
        steps = steps_of_stages(new, Target(hardware, new.ranks, chosen={each.slot: each for each in later}))
    return [int(live_bytes(each, hardware).max(initial=0)) for each in steps]


@lru_cache(maxsize=64)
def solve_ratios(
    step: Step,
    stages: Stages | None,
    run: tuple[int, int, int],
    copies: tuple[int, int],
    budget_bytes: int,
    later: tuple[Technique, ...],
    hardware: Hardware,
) -> Ratios:
    """Return the smallest ratios that stay within the budget, 1 for a rank that never does; by bisection of
    all ranks at once.

    Args:
        step: Step of all stages.
        stages: Stages of the pipeline, if there is one.
        run: Ranks, micro-batch, and number of micro-batches per step.
        copies: Bytes below which a tensor is resident, and number of prefetched tensors without a pipeline.
        budget_bytes: Budget of each rank.
        later: Techniques whose passes come later.
        hardware: Hardware that trains.
    """
    program = Program((RankClass(run[0], step),), run[1], run[2], stages=stages)
    plain = found = _peaks(program, [0.0] * (stages.ranks if stages else 1), copies, later, hardware)
    low = [0 if peak <= budget_bytes else 1 for peak in plain]
    high = [0 if peak <= budget_bytes else GRAIN for peak in plain]
    # A rank's peak depends on its own ratio alone, so each round bisects all ranks with one rewrite.
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        peaks = _peaks(program, [each / GRAIN for each in middle], copies, later, hardware)
        for rank, peak in enumerate(peaks):
            if low[rank] < high[rank]:
                low[rank], high[rank] = (
                    (low[rank], middle[rank]) if peak <= budget_bytes else (middle[rank] + 1, high[rank])
                )
    found = _peaks(program, [each / GRAIN for each in low], copies, later, hardware) if any(low) else plain
    return Ratios(tuple(low), tuple(found), tuple(plain))


def bytes_by_stage(program: Program, shares: Sequence[float], min_bytes: int) -> list[int]:
    """Return the bytes that each stage offloads for one micro-batch."""
    step, stages = offloaded(program, shares, min_bytes, 0).step, program.stages
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
