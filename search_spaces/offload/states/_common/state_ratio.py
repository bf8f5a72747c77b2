"""The smallest part of the optimizer's state that must be on the host for a step to stay within a budget
(Twin-Flow's ratio).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from memtune.offload.gradients import parameter_bytes
from memtune.offload.optimizer import Native, OffloadTiming, overlap_optimizer, overlap_optimizer_partly
from memtune.offload.parameters import state_bytes
from memtune.program import Program, Step, columns_of, remembered

_BY_COST = 6
"""Looks where sums of sizes point to; then halves."""


@dataclass(frozen=True)
class Found:
    """What of the state leaves."""

    ratio: float
    """Part of the bytes; 1: all."""
    staying: int
    """Parameters whose state stays on the device, those used first."""
    peak_bytes: int
    least_bytes: int
    """The peak where all of it leaves."""
    trained: int


@remembered
def smallest_ratio(program: Program, native: Native, early: OffloadTiming, budget_bytes: int) -> Found:
    """The smallest ratio under which `program` stays within the budget; where none does, all leaves.

    A parameter more on the device never needs less there, so the largest number that fits is between one that
    does and one that does not. What a parameter's state and gradient take says where to look, and each look
    is the pass itself.
    """
    step, n_bytes = program.step, _trained_bytes(program.step)
    peak = least = overlap_optimizer(step, native, early, program.ranks).peak_bytes()
    low, high, looks = 0, len(n_bytes), 0
    cost = [0, *accumulate(_bytes_there(step))]
    at, there = low, peak
    while least <= budget_bytes and high - low > 1:
        promised = int(np.searchsorted(cost, cost[at] + budget_bytes - there, side="right")) - 1
        at = min(max(promised, low + 1), high - 1) if looks < _BY_COST else (low + high) // 2
        there = overlap_optimizer_partly(
            step, native, early, program.ranks, ratio_of(n_bytes, at)
        ).peak_bytes()
        looks += 1
        if there <= budget_bytes:
            low, peak = at, there
        else:
            high = at
    return Found(ratio_of(n_bytes, low), low, peak, least, len(n_bytes))


def ratio_of(n_bytes: list[int], staying: int) -> float:
    """The ratio under which the first `staying` of the trained parameters, of so many bytes each, stay
    (`staying`).
    """
    if staying == 0:
        return 1.0
    if staying >= len(n_bytes) - 1:
        return 0.0
    return 1.0 - (sum(n_bytes[:staying]) + n_bytes[staying] / 2) / sum(n_bytes)


def _trained_bytes(step: Step) -> list[int]:
    sizes: list[int] = parameter_bytes(step)[columns_of(step.parameters).trainable].tolist()
    return sizes


def _bytes_there(step: Step) -> list[int]:
    """What each trained parameter takes while its state stays: the state, and its gradient until the step."""
    found = state_bytes(step) + parameter_bytes(step)
    sizes: list[int] = found[columns_of(step.parameters).trainable].tolist()
    return sizes
