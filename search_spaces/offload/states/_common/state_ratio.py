"""Smallest part of optimizer state to offload for a step to stay within a budget (Twin-Flow's ratio)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from memtune.offload.optimizer import Native, OffloadTiming, overlap_optimizer, overlap_optimizer_partly
from memtune.offload.parameters import state_bytes
from memtune.program import Program, Step, columns_of, memoized

_BY_COST = 6
"""Rewrites guided by sums of sizes, before bisection takes over."""


@dataclass(frozen=True)
class RatioSolution:
    """Part of the state to offload, and peaks."""

    ratio: float
    """Part of the bytes on the host; 1: all."""
    resident: int
    """Parameters whose state is resident, those used first."""
    peak_bytes: int
    least_bytes: int
    """Peak if all of the state is offloaded."""
    trained: int


@memoized
def smallest_ratio(
    program: Program, native: Native, early: OffloadTiming, budget_bytes: int
) -> RatioSolution:
    """Return the smallest ratio under which `program` stays within the budget; 1 if none does."""
    # A further resident parameter never lowers the peak, so the largest number that fits is found by
    # bisection. Bytes of a parameter's state and gradient guide the first steps, and each step is the
    # pass itself.
    step, n_bytes = program.step, _trained_bytes(program.step)
    peak = least = overlap_optimizer(step, native, early, program.ranks).peak_bytes()
    low, high, tries = 0, len(n_bytes), 0
    cost = [0, *accumulate(_resident_bytes(step))]
    at, peak_at = low, peak
    while least <= budget_bytes and high - low > 1:
        promised = int(np.searchsorted(cost, cost[at] + budget_bytes - peak_at, side="right")) - 1
        at = min(max(promised, low + 1), high - 1) if tries < _BY_COST else (low + high) // 2
        peak_at = overlap_optimizer_partly(
            step, native, early, program.ranks, ratio_of(n_bytes, at)
        ).peak_bytes()
        tries += 1
        if peak_at <= budget_bytes:
            low, peak = at, peak_at
        else:
            high = at
    return RatioSolution(ratio_of(n_bytes, low), low, peak, least, len(n_bytes))


def ratio_of(n_bytes: list[int], count: int) -> float:
    """Return the ratio with which just the first `count` trained parameters, of these bytes, are resident."""
    if count == 0:
        return 1.0
    if count >= len(n_bytes) - 1:
        return 0.0
    # Half of the next parameter's bytes as margin, so that rounding of the ratio selects the same parameters.
    return 1.0 - (sum(n_bytes[:count]) + n_bytes[count] / 2) / sum(n_bytes)


def _trained_bytes(step: Step) -> list[int]:
    columns = columns_of(step.parameters)
    sizes: list[int] = columns.n_bytes[columns.trainable].tolist()
    return sizes


def _resident_bytes(step: Step) -> list[int]:
    """Return the bytes of each trained parameter's resident state, and of its gradient until the step."""
    columns = columns_of(step.parameters)
    sizes: list[int] = (state_bytes(step) + columns.n_bytes)[columns.trainable].tolist()
    return sizes
