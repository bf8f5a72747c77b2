"""The candidates worth choosing from: none of them is beaten in time and in memory by another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memtune.autotune.candidates import Choice
from memtune.autotune.pruning import Pruner
from memtune.autotune.scoring import Scored, Scorer
from memtune.search_spaces.execution import Execution
from memtune.technique import Reason

_MOST_SAMPLES = 2**16
_NOTICEABLE = 0.005
"""Relative: a candidate that saves less memory than this for its extra time is not worth a row."""


def pareto_front(scored: Iterable[Scored]) -> list[Scored]:
    """Those for which nothing is both as fast and as small, fastest first; ties go to the simpler choice."""
    front: list[Scored] = []
    for each in sorted(scored, key=lambda each: (_sample_s(each), each.prediction.peak_allocated_bytes, each.choice.complexity)):
        if not front or each.prediction.peak_allocated_bytes < front[-1].prediction.peak_allocated_bytes * (1 - _NOTICEABLE):
            front.append(each)
    return front


def refined_front(scored: Iterable[Scored], refine: Callable[[list[Scored]], list[Scored]], most: int) -> list[Scored]:
    """The front of what is simulated op by op: what was before, and about `most` others.

    The coarse level says what a step takes at the least, so a row of a front by it may be beaten once it is simulated, and
    those that it had beaten are looked at then.
    """
    best = {each.key: each for each in scored}
    while most > 0:
        coarse = [each for each in pareto_front(best.values()) if each.prediction.level != "events"]
        if not coarse:
            break
        most -= len(coarse)
        best.update({each.key: each for each in refine(coarse)})
    return pareto_front(each for each in best.values() if each.prediction.level == "events")


def largest_micro_batch(scorer: Scorer, choice: Choice, pruner: Pruner) -> int | None:
    """The largest micro-batch at which the techniques of `choice` are predicted to fit, to one part in 16; None without a limit.

    Peaks grow with the micro-batch, so the end is found by doubling and halving.
    """
    budget = pruner.budget_bytes
    if budget is None:
        return None

    def fits(size: int) -> bool:
        scored = scorer.score(Choice(Execution(micro_batch=size), choice.techniques))
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
