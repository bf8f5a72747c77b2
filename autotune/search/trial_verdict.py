"""Decide the winner, and whether a trial's result is valid.

Rules:

1. A trial is invalid if its losses differ from those of the first feasible baseline by more than its
  exactness class allows.
2. Once the finalists have run again in alternating rounds, only those rounds count: each round measures every
  finalist, so a machine that slowed down meanwhile has slowed all of them. The time of a finalist in a round
  is the lower quartile of its steps; rounds in which others used the machine do not count if enough are left.
  The logarithms of the times are modelled as finalist + round + noise (least squares), and a finalist beats
  another if the interval of the difference excludes 0. The comparisons with the best finalist together are
  wrong with a probability of at most `ERROR_RATE` (Student's t, Bonferroni over the comparisons). A finalist
  that the best one beats leaves the rounds, so that later rounds cost less. A time that is far longer than
  its finalist's and round's other times explain (deletion residual; Cook, Weisberg 1982, section 2.2) was
  slowed down by other work and does not count, so that no finalist is lost by a single measurement.
3. Without rounds a difference below the spread of the steps, plus the change of the machine that a reference
  op shows between the trials, is a tie.
4. Of settings that cannot be distinguished the simplest wins: fewer slots in use, then less memory, then
  fewer changed knobs, all of which repeat from search to search. It was measured at most `WORTH_SIMPLICITY`
  slower, however large the noise.
5. A choice must beat every feasible baseline, or be more than `WORTH_SIMPLICITY` faster in the median round,
  otherwise the best baseline wins. A gain is stated with its interval; if noise may explain it, that is
  stated too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from memtune.autotune.space import Choice, Goal
from memtune.executors import TrialResult
from memtune.technique import Exactness

ERROR_RATE = 0.05
"""Probability that any of the comparisons of a verdict is wrong."""
_LEAST_NOISE = 0.002
"""Relative noise of a round that is always assumed: two rounds may agree by chance."""
_USUAL_NOISE, _USUAL_FREEDOM = 0.02, 1
"""Noise that is expected of a round where slowed times are looked for, and the measurements that is worth."""
_SLOWED_RATE = 0.05
"""Probability that any time of a set of rounds is left out although nothing slowed it down."""
_CLOSE_ENOUGH = 0.01
"""Half-width of an interval below which further rounds are not worthwhile."""
_TWO_SIDED_90 = 1.645
_CONTENDS = 0.05
"""Relative distance from the best measured value within which a setting runs again."""
WORTH_SIMPLICITY = 0.05
"""Largest measured relative difference that a simpler setting, or a baseline, may cost."""
_ABOUT_THE_SAME_PEAK = 0.05
"""Relative difference of two peaks below which neither setting is preferred for it."""
WORTH_A_ROUND = 0.003
"""Expected relative gain from which on a setting runs again whose trial may have been slowed down."""
_OTHER_RANDOM_NUMBERS = 0.2
"""Dropout draws other numbers when the batch is split differently; only divergence is detectable then."""


@dataclass(frozen=True)
class Measured:
    """A choice and all its finished trials that fit."""

    choice: Choice
    results: tuple[TrialResult, ...]
    baseline: str = ""
    rounds: tuple[TrialResult | None, ...] = ()
    """Those of `results` that ran in alternation with the other finalists, by round: None where it had left.
    Times come from them if there are any.
    """

    @property
    def number(self) -> int:
        """Return the number of its first trial."""
        return self.results[0].number

    @property
    def step_s(self) -> float:
        """Return the step time that comparisons use: of rounds the mean of their logarithms (rule 2)."""
        # Without rounds the median over trials of each one's median, of two the lower one: other
        # load only makes steps longer.
        if len(self.rounds) >= 2:
            return statistics.geometric_mean(_undisturbed_s(each) for each in self._timed())
        return statistics.median_low(_middle(each) for each in self._timed())

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

    @property
    def samples_per_s(self) -> float:
        """Return samples a second over all ranks, at the step time that comparisons use."""
        return self.samples_per_step / self.step_s

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

    def per_round(self, goal: Goal) -> list[float]:
        """Return the value in each round, NaN where it had left; empty if rounds make no difference."""
        if goal != "throughput":
            return []
        return [
            math.nan if each is None else _undisturbed_s(each) / self.samples_per_step for each in self.rounds
        ]

    def _timed(self) -> tuple[TrialResult, ...]:
        return tuple(each for each in self.rounds if each is not None) or self.results


def _steps(result: TrialResult) -> list[float]:
    return result.step_s_all or [result.step_s or math.inf]


def _middle(result: TrialResult) -> float:
    return statistics.median(_steps(result))


def _undisturbed_s(result: TrialResult) -> float:
    """Return the lower quartile of the step times: other load only makes steps longer."""
    steps = _steps(result)
    return statistics.quantiles(steps, n=4, method="inclusive")[0] if len(steps) > 1 else steps[0]


def relative_spread(result: TrialResult) -> float:
    """Return half of the interquartile range of the steps, relative to their median."""
    middle = _middle(result)
    return _spread(result) / middle if middle and math.isfinite(middle) else 0.0


def _spread(result: TrialResult) -> float:
    steps = _steps(result)
    if len(steps) < 2:
        return 0.0
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    return (high - low) / 2


class Verdict(NamedTuple):
    """The winning choice, with the reason in one sentence."""

    winner: Measured
    text: str


class Gain(NamedTuple):
    """Logarithm of one's value over another's, > 0 if it is better, with the bounds of its interval."""

    log: float
    low: float
    high: float
    usual: float
    """The logarithm in the median round: one lucky round does not decide where the interval does not."""

    @property
    def half_width(self) -> float:
        """Return half the width of the interval."""
        return (self.high - self.low) / 2


def judge(measured: Sequence[Measured], goal: Goal) -> Verdict | None:
    """Return the winner among measured choices that fit, by rules 2 to 5; None if nothing fits."""
    if not measured:
        return None
    # Finalists alone: times from outside of the rounds belong to another state of the machine.
    measured = [each for each in measured if each.rounds] or measured
    winner, best = _simplest_of_the_best(measured, goal), _best(measured, goal)
    baselines = [each for each in measured if each.baseline]
    equal = "" if winner is best else f"; {_equal(winner, best, goal, measured)}"
    if winner.baseline:
        return Verdict(
            winner,
            f"{_name(winner)} is the best: nothing that was measured beats it by more than the spread{equal}",
        )
    # A small gain within the noise is no reason to change the user's setting. A large one is: it is what the
    # user may expect, however noisy the machine.
    unbeaten = [
        each
        for each in baselines
        if not (_left_rounds(each) or beats(winner, each, goal, measured))
        and gain(winner, each, goal).usual <= WORTH_SIMPLICITY
    ]
    if unbeaten:
        simplest = _simplest_of_the_best(baselines, goal)
        return Verdict(
            simplest,
            f"{_name(simplest)} is the best: {winner.choice.summary} is no better by more than the spread",
        )
    gains = ", ".join(f"{_gain_text(winner, each, goal, measured)} {_name(each)}" for each in baselines)
    return Verdict(winner, (gains or "neither your own setting nor another baseline fits") + equal)


def gain(one: Measured, other: Measured, goal: Goal, among: Sequence[Measured] = ()) -> Gain:
    """Return by how much `one` is better than `other`.

    Args:
        one: A measured choice.
        other: Another one.
        goal: The value to compare.
        among: All finalists, whose rounds tell the noise; the two alone by default.
    """
    finalists = list(among or (one, other))
    fit = _fit([each.per_round(goal) for each in finalists])
    if fit is not None and one in finalists and other in finalists:
        return fit.gain(finalists.index(one), finalists.index(other))
    a, b = one.value(goal), other.value(goal)
    log = math.log(b / a) if a > 0 and b > 0 else float(b - a)
    # A negated micro-batch has no logarithm: its difference decides.
    half = max(one.spread(goal) / abs(a), other.spread(goal) / abs(b)) if a and b else 0.0
    if goal == "throughput":
        half += _change(one, other)
    return Gain(log, log - half, log + half, log)


def _change(one: Measured, other: Measured) -> float:
    """Return by how much the logarithm of the reference op's time differs between two choices' trials."""
    mine, others = (
        [result.reference_s for result in each.results if result.reference_s] for each in (one, other)
    )
    if not mine or not others:
        return 0.0
    return abs(math.log(statistics.median(mine) / statistics.median(others)))


class _Fit(NamedTuple):
    """Least squares of log time = finalist + round + noise, over the rounds that each finalist ran in."""

    log_s: npt.NDArray[np.float64]
    """(finalists,) estimates."""
    covariance: npt.NDArray[np.float64]
    """(finalists, finalists), in units of the variance of one measurement."""
    noise: float
    """Standard deviation of one measurement."""
    freedom: int
    times: npt.NDArray[np.float64]
    """(finalists, rounds) logarithms of the times, NaN where a finalist did not run."""

    def gain(self, one: int, other: int) -> Gain:
        """Return the difference of two finalists."""
        log = float(self.log_s[other] - self.log_s[one])
        share = self.covariance[one, one] + self.covariance[other, other] - 2 * self.covariance[one, other]
        half = self.quantile(self.freedom) * self.noise * math.sqrt(max(float(share), 0.0))
        usual = float(np.nanmedian(self.times[other] - self.times[one]))
        return Gain(log, log - half, log + half, usual)

    def quantile(self, freedom: int) -> float:
        """Return the half-width of an interval in standard errors."""
        return float(stdtrit(freedom, 1 - ERROR_RATE / (2 * (len(self.log_s) - 1))))


def _fit(values: Sequence[Sequence[float]]) -> _Fit | None:
    """Return the fit of (finalists, rounds) values, NaN where a finalist did not run; None if too few ran."""
    n = len(values)
    if n < 2 or len({len(each) for each in values}) != 1:
        return None
    table = np.log(np.array(values, np.float64))
    row, column = np.nonzero(np.isfinite(table))
    rounds = np.unique(column)
    freedom = len(row) - n - len(rounds) + 1
    if freedom < 1 or len(np.unique(row)) < n:
        return None
    design = np.zeros((len(row), n + len(rounds)))
    cells = np.arange(len(row))
    design[cells, row] = 1.0
    design[cells, n + np.searchsorted(rounds, column)] = 1.0
    times, usual = table[row, column], np.nanmedian(table, axis=1)[row]
    while True:
        # A constant may move from all finalists to all rounds: the pseudo-inverse leaves differences
        # unaffected.
        inverse = np.linalg.pinv(design.T @ design).astype(np.float64)
        found = inverse @ design.T @ times
        # The part that neither the finalist nor the round explains: two-way layout, no interaction.
        residual = times - design @ found
        unexplained = 1 - np.einsum("ij,jk,ik->i", design, inverse, design)
        slowed = _slowed(residual, unexplained, times - usual, freedom)
        if slowed is None:
            noise = max(math.sqrt(float(residual @ residual) / freedom), _LEAST_NOISE)
            return _Fit(found[:n], inverse[:n, :n], noise, freedom, table)
        # One at a time: a long time makes others of its round look short.
        design, times, usual = (np.delete(each, slowed, 0) for each in (design, times, usual))
        freedom -= 1


def _slowed(
    residual: npt.NDArray[np.float64],
    unexplained: npt.NDArray[np.float64],
    longer: npt.NDArray[np.float64],
    freedom: int,
) -> int | None:
    """Return the time that other work slowed down most evidently, or None.

    Args:
        residual: (times,) of the fit.
        unexplained: (times,) fraction of an error in each time that its residual shows.
        longer: (times,) than the median of its finalist.
        freedom: Degrees of freedom of the residuals.
    """
    # A time that alone shows its finalist or its round has no residual, and two cannot outvote each other.
    alone = unexplained < 1e-9
    if freedom < 2:
        return None
    share = np.where(alone, 1.0, unexplained)
    others = (residual @ residual - residual**2 / share).clip(0.0)
    expected = _USUAL_FREEDOM * _USUAL_NOISE**2
    noise = np.sqrt((expected + others) / (_USUAL_FREEDOM + freedom - 1))
    # Between two finalists a short time of one looks like a long time of the other.
    evident = ~alone & (longer > residual / share / 2)
    excess = np.where(evident, residual / (noise * np.sqrt(share)), 0.0)
    most = int(np.argmax(excess))
    limit = stdtrit(_USUAL_FREEDOM + freedom - 1, 1 - _SLOWED_RATE / len(residual))
    return most if excess[most] > limit else None


def _best(measured: Sequence[Measured], goal: Goal) -> Measured:
    """Return the best of `measured`: of finalists by their rounds together."""
    fit = _fit([each.per_round(goal) for each in measured])
    if fit is None:
        return min(measured, key=lambda each: each.value(goal))
    return measured[int(np.argmin(fit.log_s))]


def beats(one: Measured, other: Measured, goal: Goal, among: Sequence[Measured] = ()) -> bool:
    """Return whether the interval of `gain` excludes that `one` is no better than `other`."""
    return gain(one, other, goal, among).low > 0


def finalists_to_repeat(finalists: Sequence[Measured], goal: Goal, rounds_left: int) -> list[Measured]:
    """Return the finalists that run in another round; none if it is not worthwhile."""
    # A finalist that the best one beats leaves. Another round is worthwhile while the interval of one
    # of the others is wide, unless the noise is so large that no number of the remaining rounds would
    # tell it from the best.
    fit = _fit([each.per_round(goal) for each in finalists])
    if fit is None or rounds_left < 1:
        return []
    best = int(np.argmin(fit.log_s))
    gains = {i: fit.gain(best, i) for i in range(len(finalists)) if i != best}
    undecided = [i for i, each in gains.items() if each.low <= 0]
    rounds = len(finalists[0].rounds)
    # The interval narrows with the rounds. Two rounds alone tell too little of the noise.
    later = fit.freedom + rounds_left * len(undecided)
    shrinks = fit.quantile(later) / fit.quantile(fit.freedom) * math.sqrt(rounds / (rounds + rounds_left))
    shrinks = shrinks if rounds > 2 else 0.0
    if not any(
        each.half_width > _CLOSE_ENOUGH
        and (each.log > shrinks * each.half_width or shrinks * each.half_width <= _CLOSE_ENOUGH)
        for each in (gains[i] for i in undecided)
    ):
        return []
    return [finalists[best], *(finalists[i] for i in undecided)]


def contenders(
    measured: Sequence[Measured],
    goal: Goal,
    count: int = 3,
    expected: Mapping[Choice, tuple[float, float]] | None = None,
) -> list[Measured]:
    """Return the finalists, to be measured again in alternation: the best, and those close to it.

    Args:
        measured: Choices that fit.
        goal: The value to compare.
        count: Number of finalists at most.
        expected: By choice, mean and standard deviation of the logarithm of the value by all trials together.
            A trial that other load made slow says little, so its choice may be the best nevertheless.
    """
    if not measured:
        return []  # no baseline fitted
    if not expected:
        ranked = sorted(measured, key=lambda each: (each.value(goal), each.choice.complexity))
        return [each for each in ranked if gain(ranked[0], each, goal).low <= _CONTENDS][:count]
    ranked = sorted(measured, key=lambda each: (expected[each.choice][0], each.choice.complexity))
    best, best_sd = expected[ranked[0].choice]
    return [
        each
        for each in ranked
        for mean, sd in [expected[each.choice]]
        if mean - best - _TWO_SIDED_90 * math.hypot(sd, best_sd) <= _CONTENDS
    ][:count]


def finalists(
    measured: Sequence[Measured],
    goal: Goal,
    expected: Mapping[Choice, tuple[float, float]] | None = None,
    doubtful: Collection[Choice] = (),
) -> list[Measured]:
    """Return the contenders, those of `doubtful`, and the best baseline, which a winner has to beat."""
    best = contenders(measured, goal, expected=expected)
    baselines = contenders([each for each in measured if each.baseline], goal, 1, expected)
    others = [each for each in measured if each in baselines or each.choice in doubtful]
    return best + [each for each in others if each not in best]


def _simplest_of_the_best(measured: Sequence[Measured], goal: Goal) -> Measured:
    best = _best(measured, goal)
    # A setting may tie with the best only because the best one's times spread widely; another may beat it.
    ties = [
        each
        for each in measured
        if each is best
        or (
            not _left_rounds(each)
            and gain(best, each, goal, measured).log <= WORTH_SIMPLICITY
            and not any(beats(other, each, goal, measured) for other in measured)
        )
    ]
    return min(ties, key=lambda each: _order_of_equals(each, goal))


def _left_rounds(measured: Measured) -> bool:
    """Return whether a finalist was beaten before the last round: noise does not bring it back."""
    return bool(measured.rounds) and measured.rounds[-1] is None


def _order_of_equals(measured: Measured, goal: Goal) -> tuple[float, ...]:
    slots, knobs = measured.choice.complexity
    peak = round(math.log(max(measured.peak_bytes, 1)) / _ABOUT_THE_SAME_PEAK)
    return slots, peak, knobs, measured.value(goal)


def _name(measured: Measured) -> str:
    return (
        f"your own setting ({measured.baseline})"
        if measured.baseline == "plain"
        else measured.baseline or measured.choice.summary
    )


def _equal(winner: Measured, best: Measured, goal: Goal, among: Sequence[Measured]) -> str:
    """Return why a setting wins although another one was measured faster."""
    found = gain(best, winner, goal, among)
    needs_less = winner.choice.complexity[0] == best.choice.complexity[0] and (
        _order_of_equals(winner, goal)[1] < _order_of_equals(best, goal)[1]
    )
    why = "the lower peak" if needs_less else "fewer settings"
    return (
        f"{best.choice.summary} cannot be distinguished from it ({math.expm1(found.low):+.1%} to"
        f" {math.expm1(found.high):+.1%}), and the one with {why} is taken"
    )


def _gain_text(winner: Measured, baseline: Measured, goal: Goal, among: Sequence[Measured]) -> str:
    ratio = baseline.value(goal) / winner.value(goal) if winner.value(goal) else math.inf
    if goal == "memory":
        return f"{1 - 1 / ratio:.0%} less memory than"
    if goal == "batch":
        return f"{1 / ratio:.3g}× the micro-batch of"
    found = gain(winner, baseline, goal, among)
    ratio, low, high, _ = (math.exp(each) for each in found)
    if low <= 1:
        interval = f"{low - 1:+.1%} to {high - 1:+.1%}"
        return f"measured {ratio - 1:.0%} faster ({interval}: noise may explain it) than"
    if ratio >= 2:
        return f"{ratio:.3g}× ({low:.3g} to {high:.3g}) as fast as"
    return f"{ratio - 1:.0%} ({low - 1:.1%} to {high - 1:.1%}) faster than"


def losses_disagree(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str | None:
    """Return where two runs of the same steps first differ by more than `tolerance` (relative), or None."""
    for step, (mine, other) in enumerate(zip(losses, reference, strict=False)):
        if math.isnan(mine) and math.isnan(other):
            continue
        allowed = tolerance * max(abs(other), 1e-8)
        # Negated, so that a NaN on one side alone counts as a difference.
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
    """
    # Bitwise: kernels may sum in another order (atomics), a few dozen roundings. Reordered: half of the
    # digits, which is √n roundings of a sum of n = 1/unit terms.
    classes = {each.exactly() for each in (*choice.techniques, *reference.techniques)}
    if Exactness.LOSSY in classes:
        return None
    if draws_random and choice.execution != reference.execution:
        return _OTHER_RANDOM_NUMBERS
    if Exactness.REORDERED in classes or choice.execution != reference.execution:
        return math.sqrt(unit)
    return min(64 * unit, math.sqrt(unit))
