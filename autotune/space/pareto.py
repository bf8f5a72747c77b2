"""The Pareto front of candidates in time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.scoring import Scored, Scorer
from memtune.technique import Reason

_MOST_SAMPLES = 2**16
_NOTICEABLE = 0.005
"""Relative saving of memory below which a slower candidate is not worth a row, and of time below which one
that needs more memory is not.
"""
_TELLABLE = 0.03
"""Relative gain of time below which a candidate is not worth retries of the allocator: half of the median
error of predicted steps (docs/measurements.md, published GPUs).
"""


_EQUAL = 0.01
"""Relative gain of time for which no further technique is recommended."""


def pareto_front(scored: Iterable[Scored]) -> list[Scored]:
    """Return the candidates that none beats in both time and memory, fastest first.

    Ties go to the simpler one.
    """
    front: list[Scored] = []
    for each in sorted(
        scored,
        key=lambda each: (_sample_s(each), each.prediction.peak_allocated_bytes, each.choice.complexity),
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
    """Return the front among candidates simulated op by op: those that were, and about `most` others.

    One that PyTorch's allocator holds within `budget_bytes` by retries alone must gain more than others.
    The coarse level is a lower bound of the step time, so a candidate of the coarse front may be beaten once
    it is simulated; the ones that it had beaten are then simulated in turn, until the fastest `top` of the
    front are known (all by default).
    """
    best = {each.key: each for each in scored}
    while True:
        front = pareto_front(best.values())
        known = list(takewhile(lambda each: each.prediction.level == "events", front))
        kept = _simplest_first(_worth_their_memory(known, budget_bytes), best.values(), budget_bytes)
        if len(known) == len(front) or (top is not None and len(kept) >= top):
            return kept
        if most <= 0:
            break
        after = None if top is None else len(known) + top
        coarse = [each for each in front[:after] if each.prediction.level != "events"]
        most -= len(coarse)
        best.update({each.key: each for each in refine(coarse)})
    simulated = [each for each in best.values() if each.prediction.level == "events"]
    kept = _worth_their_memory(pareto_front(simulated), budget_bytes)
    return _simplest_first(kept, simulated, budget_bytes)


def _simplest_first(front: list[Scored], scored: Iterable[Scored], budget_bytes: int | None) -> list[Scored]:
    """Return `front` behind a candidate with fewer techniques than its fastest, if one is about as fast."""
    if not front:
        return front
    limit_s = _sample_s(front[0]) * (1 + _EQUAL)
    equal = [
        each
        for each in scored
        if each.prediction.level == "events"
        and _sample_s(each) <= limit_s
        and not _is_tight(each, budget_bytes)
    ]
    simplest = min([front[0], *equal], key=lambda each: (each.choice.complexity[0], _sample_s(each)))
    if simplest.choice.complexity[0] == front[0].choice.complexity[0]:
        return front
    least_bytes = simplest.prediction.peak_allocated_bytes
    return [simplest, *(each for each in front if each.prediction.peak_allocated_bytes < least_bytes)]


def _is_tight(scored: Scored, budget_bytes: int | None) -> bool:
    return budget_bytes is not None and scored.prediction.peak_reserved_bytes > budget_bytes


def _worth_their_memory(front: list[Scored], budget_bytes: int | None) -> list[Scored]:
    """Return `front` without candidates to which one as simple and as fast, but for a part that no prediction
    can tell, needs less memory; where the allocator would retry, one that is about as fast will do.
    """
    kept: list[Scored] = []
    for each in reversed(front):  # from the least memory
        least = kept[-1] if kept else None
        about_as_fast = least is not None and _sample_s(least) <= _sample_s(each) * (1 + _TELLABLE)
        if about_as_fast and _is_tight(each, budget_bytes):
            continue
        if least is None or not (
            _sample_s(least) <= _sample_s(each) * (1 + _NOTICEABLE)
            and least.choice.complexity <= each.choice.complexity
        ):
            kept.append(each)
    return kept[::-1]


def largest_micro_batch(scorer: Scorer, choice: Choice, pruner: Pruner) -> int | None:
    """Return the largest micro-batch at which `choice` is predicted to fit, to one part in 16.

    None without a budget.

    Peaks grow with the micro-batch, so doubling and bisection find it.
    """
    budget = pruner.budget_bytes
    if budget is None:
        return None

    def fits(size: int) -> bool:
        scored = scorer.score(Choice(choice.execution.of_size(size), choice.techniques))
        return not isinstance(scored, Reason) and scored.prediction.peak_allocated_bytes <= budget

    low, high = 0, max(choice.execution.micro_batch or 1, 1)
    while high <= _MOST_SAMPLES and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _sample_s(scored: Scored) -> float:
    rate = scored.prediction.samples_per_s
    return 1 / rate if rate else float("inf")
