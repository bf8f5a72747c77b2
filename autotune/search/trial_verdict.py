"""Decide the winner, and whether a trial's result is valid.

Rules:

1. A trial is invalid if its losses differ from those of the first feasible baseline by more than its
  exactness class allows.
2. A difference below the spread is a tie; the simpler choice wins it: fewer slots in use, then fewer changed
  knobs.
3. A choice must beat every feasible baseline by more than the spread, otherwise the best baseline wins.
4. Measurements from different times are not compared: once the finalists have run again in alternation, only
  those rounds count, and choices are compared round by round, so that a machine that slowed down meanwhile
  has slowed all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memtune.autotune.space import Choice, Goal
from memtune.executors import TrialResult
from memtune.technique import Exactness

_OTHER_RANDOM_NUMBERS = 0.2
"""Dropout draws other numbers when the batch is split differently; only divergence is detectable then."""


@dataclass(frozen=True)
class Measured:
    """A choice and all its finished trials that fit."""

    choice: Choice
    results: tuple[TrialResult, ...]
    baseline: str = ""
    rounds: tuple[TrialResult, ...] = ()
    """Those of `results` that ran in alternation with the other finalists; times come from them if there are
    any.
    """

    @property
    def number(self) -> int:
        """Return the number of its first trial."""
        return self.results[0].number

    @property
    def step_s(self) -> float:
        """Return the median over trials of each one's median step time."""
        return statistics.median(_middle(each) for each in self._timed())

    @property
    def spread_s(self) -> float:
        """Return the median over trials of half the interquartile range of steps, robust to one hiccup."""
        return statistics.median(_spread(each) for each in self._timed())

    @property
    def peak_bytes(self) -> int:
        """Return the largest peak of allocated bytes over its trials."""
        return max(each.peak_allocated_bytes or 0 for each in self.results)

    @property
    def samples_per_step(self) -> float:
        """Return samples of one optimizer step over all ranks, as counted by the trials."""
        first = self.results[0]
        return first.samples_per_s * first.step_s if first.samples_per_s and first.step_s else 1.0

    def value(self, goal: Goal) -> float:
        """Return the value to minimise: seconds per sample, peak bytes, or the negated micro-batch."""
        if goal == "memory":
            return float(self.peak_bytes)
        if goal == "batch":
            return -float(self.choice.execution.micro_batch or 0)
        return self.step_s / self.samples_per_step

    def spread(self, goal: Goal) -> float:
        """Return the spread of `value`; bytes and micro-batches repeat exactly."""
        return self.spread_s / self.samples_per_step if goal == "throughput" else 0.0

    def per_round(self, goal: Goal) -> list[tuple[float, float]]:
        """Return value and spread in each round; empty without rounds, or if rounds make no difference."""
        if goal != "throughput":
            return []
        return [
            (_middle(each) / self.samples_per_step, _spread(each) / self.samples_per_step)
            for each in self.rounds
        ]

    def _timed(self) -> tuple[TrialResult, ...]:
        return self.rounds or self.results


def _steps(result: TrialResult) -> list[float]:
    return result.step_s_all or [result.step_s or math.inf]


def _middle(result: TrialResult) -> float:
    return statistics.median(_steps(result))


def _spread(result: TrialResult) -> float:
    steps = _steps(result)
    if len(steps) < 2:
        return 0.0
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    return (high - low) / 2


class Verdict(NamedTuple):
    """The winning choice, with the reason in one sentence."""

    winner: Measured
    beats_baselines: bool
    text: str


def judge(measured: Sequence[Measured], goal: Goal) -> Verdict | None:
    """Return the winner among measured choices that fit, by rules 2 to 4; None if nothing fits."""
    if not measured:
        return None
    measured = [each for each in measured if each.rounds] or measured
    winner = _simplest_of_the_best(measured, goal)
    baselines = [each for each in measured if each.baseline]
    if winner.baseline:
        return Verdict(
            winner,
            False,
            f"{_name(winner)} is the best: nothing that was measured beats it by more than the spread",
        )
    unbeaten = [each for each in baselines if not beats(winner, each, goal)]
    if unbeaten:
        best = _simplest_of_the_best(baselines, goal)
        return Verdict(
            best,
            False,
            f"{_name(best)} is the best: {winner.choice.summary} is no better by more than the spread",
        )
    gains = ", ".join(f"{_gain(winner, each, goal)} {_name(each)}" for each in baselines)
    return Verdict(winner, True, gains or "the settings that need no search do not fit")


def beats(one: Measured, other: Measured, goal: Goal) -> bool:
    """Return whether `one` is better than `other` by more than the larger spread.

    Round by round if both have rounds.
    """
    mine, others = one.per_round(goal), other.per_round(goal)
    if mine and len(mine) == len(others):
        gain = statistics.median(b - a for (a, _), (b, _) in zip(mine, others, strict=True))
        return gain > statistics.median(max(a, b) for (_, a), (_, b) in zip(mine, others, strict=True))
    return other.value(goal) - one.value(goal) > max(one.spread(goal), other.spread(goal))


def rounds_disagree(finalists: Sequence[Measured], goal: Goal) -> bool:
    """Return whether another round is worthwhile.

    Rounds differ in the best choice, and each judged alone in the winner.
    """
    rounds = [each.per_round(goal) for each in finalists]
    if len(rounds) < 2 or not all(rounds):
        return False
    best = {min(range(len(rounds)), key=lambda i: values[i][0]) for values in zip(*rounds, strict=False)}
    turns = range(min(map(len, rounds)))
    alone = [
        judge([replace(each, rounds=(each.rounds[turn],)) for each in finalists], goal) for turn in turns
    ]
    return len(best) > 1 and len({verdict.winner.number for verdict in alone if verdict is not None}) > 1


def contenders(measured: Sequence[Measured], goal: Goal, count: int = 3) -> list[Measured]:
    """Return the finalists, to be measured again in alternation: a slow machine then affects all."""
    return sorted(measured, key=lambda each: (each.value(goal), each.choice.complexity))[:count]


def _simplest_of_the_best(measured: Sequence[Measured], goal: Goal) -> Measured:
    best = min(measured, key=lambda each: each.value(goal))
    # A setting may tie with the best only because the best one's times spread widely; another may beat it.
    ties = [
        each for each in measured if each is best or not any(beats(other, each, goal) for other in measured)
    ]
    return min(ties, key=lambda each: (each.choice.complexity, each.value(goal)))


def _name(measured: Measured) -> str:
    return (
        f"your own setting ({measured.baseline})"
        if measured.baseline == "plain"
        else measured.baseline or measured.choice.summary
    )


def _gain(winner: Measured, baseline: Measured, goal: Goal) -> str:
    ratio = baseline.value(goal) / winner.value(goal) if winner.value(goal) else math.inf
    if goal == "memory":
        return f"{1 - 1 / ratio:.0%} less memory than"
    if goal == "batch":
        return f"{1 / ratio:.3g}× the micro-batch of"
    return f"{ratio - 1:.0%} faster than" if ratio < 2 else f"{ratio:.3g}× as fast as"


def losses_disagree(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str | None:
    """Return where two runs of the same steps first differ by more than `tolerance` (relative), or None."""
    for step, (mine, other) in enumerate(zip(losses, reference, strict=False)):
        if math.isnan(mine) and math.isnan(other):
            continue
        allowed = tolerance * max(abs(other), 1e-8)
        if not abs(mine - other) <= allowed:
            return (
                f"loss {mine:.6g} at step {step + 1}, {other:.6g} without these settings (tolerance"
                f" {allowed:.2g})"
            )
    return None


def loss_tolerance(choice: Choice, reference: Choice, *, unit: float, draws_random: bool) -> float | None:
    """Return the relative tolerance between losses of two choices.

    None if a lossy technique makes them incomparable.

    Args:
        choice: The trial's.
        reference: The baseline's.
        unit: One rounding of the dtype that the model computes in, 2^-24 for float32.
        draws_random: Whether the step draws random numbers.

    Bitwise: kernels may sum in another order (atomics), a few dozen roundings. Reordered: half of the digits,
    which is √n roundings of a sum of n = 1/unit terms.
    """
    classes = {each.exactly() for each in (*choice.techniques, *reference.techniques)}
    if Exactness.LOSSY in classes:
        return None
    if draws_random and choice.execution != reference.execution:
        return _OTHER_RANDOM_NUMBERS
    if Exactness.REORDERED in classes or choice.execution != reference.execution:
        return math.sqrt(unit)
    return min(64 * unit, math.sqrt(unit))
