"""The Pareto front of candidates in cost and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import takewhile

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.scoring import Scored, Scorer
from memtune.technique import Reason

_MOST_SAMPLES = 2**16
_NOTICEABLE = 0.005
"""Relative difference in cost or in memory below which two candidates are equal."""
_TECHNIQUE = 0.01
"""Relative gain of time that one more technique has to bring: a sixth of the median error of predicted steps
(docs/measurements.md, published GPUs).
"""
_RETRIES = 0.03
"""Relative gain of time that a setting has to bring if PyTorch's allocator holds it within the budget by
retries alone: half of the median error of predicted steps (docs/measurements.md, published GPUs).
"""


def cost_s(scored: Scored, budget_bytes: int | None) -> float:
    """Return seconds per sample, raised by the gain that techniques and retries have to bring."""
    prediction = scored.prediction
    if not prediction.samples_per_s:
        return math.inf
    n_techniques, _ = scored.choice.complexity
    retries = budget_bytes is not None and prediction.peak_reserved_bytes > budget_bytes
    return (1 + n_techniques * _TECHNIQUE + retries * _RETRIES) / prediction.samples_per_s


def pareto_front(scored: Iterable[Scored], budget_bytes: int | None = None) -> list[Scored]:
    """Return the candidates that none beats in both cost and memory, the cheapest first.

    Ties go to the simpler one.
    """
    front: list[Scored] = []
    for each in sorted(
        scored,
        key=lambda each: (
            cost_s(each, budget_bytes),
            each.prediction.peak_allocated_bytes,
            each.choice.complexity,
        ),
    ):
        if not front or each.prediction.peak_allocated_bytes < front[-1].prediction.peak_allocated_bytes * (
            1 - _NOTICEABLE
        ):
            front.append(each)
    return front


def refined_front(
    scored: Iterable[Scored],
    refine: Callable[[list[Scored]], list[Scored]],
    most: int,
    budget_bytes: int | None = None,
    top: int | None = None,
) -> list[Scored]:
    """Return the front among candidates simulated op by op: those that were, and about `most` others."""
    # The coarse level is a lower bound of the step time, so a candidate of the coarse front may be
    # beaten once it is simulated; the ones that it had beaten are then simulated in turn, until the
    # cheapest `top` of the front are known (all by default).
    best = {each.key: each for each in scored}
    while True:
        front = pareto_front(best.values(), budget_bytes)
        # Simulation only raises costs, so a front is final up to its first candidate of the coarse level.
        known = list(takewhile(_is_simulated, front))
        kept = _least_memory_of_equals(known, budget_bytes)
        if len(known) == len(front) or (top is not None and len(kept) >= top):
            return kept
        if most <= 0:
            simulated = filter(_is_simulated, best.values())
            return _least_memory_of_equals(pareto_front(simulated, budget_bytes), budget_bytes)
        after = None if top is None else len(known) + top
        coarse = [each for each in front[:after] if not _is_simulated(each)]
        most -= len(coarse)
        best.update({each.key: each for each in refine(coarse)})


def _is_simulated(scored: Scored) -> bool:
    return scored.prediction.level == "events"


def _least_memory_of_equals(front: list[Scored], budget_bytes: int | None) -> list[Scored]:
    """Return `front` without candidates that need more memory than another one of about the same cost."""
    kept: list[Scored] = []
    # From the least memory, and against what was kept: small differences of many rows do not add up.
    for each in reversed(front):
        if not kept or cost_s(kept[-1], budget_bytes) > cost_s(each, budget_bytes) * (1 + _NOTICEABLE):
            kept.append(each)
    return kept[::-1]


def largest_micro_batch(scorer: Scorer, choice: Choice, pruner: Pruner) -> int | None:
    """Return the largest micro-batch at which `choice` is predicted to fit, to one part in 16.

    None without a budget.
    """
    # Peaks grow with the micro-batch, so doubling and bisection find it.
    budget = pruner.budget_bytes
    if budget is None:
        return None

    def fits(size: int) -> bool:
        scored = scorer.score(Choice(choice.execution.of_size(size), choice.techniques))
        return not isinstance(scored, Reason) and scored.prediction.is_within(budget)

    low, high = 0, max(choice.execution.micro_batch or 1, 1)
    while high <= _MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
