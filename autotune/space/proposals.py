"""Propose the next candidate: the one that is expected to improve most on the best measurement."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import ndtr

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.sampler import Sampler
from memtune.autotune.space.scoring import EVENTS_FOR, Goal, Scored, Scorer, Scores, alike, fits_budget
from memtune.autotune.space.step_time_model import F64, Observed, StepTimeModel
from memtune.technique import Reason

_ASKS = 16
"""Suggestions of the sampler that may be pruned before the ranking is used instead."""
_MOST_REFINED = 24
"""Coarse candidates that are simulated op by op for one proposal."""
_SAMPLER_EVERY = 6
"""Every sixth candidate is the sampler's: it leaves the neighbourhoods that were scored."""
_WORTHWHILE = 0.001
"""Expected relative gain below which a further trial is not worthwhile."""
_DECIMALS = 9
"""Of the logarithm of a gain: candidates that differ by rounding errors alone are equal."""
_MOST_COMPARED, _LEAST_COMPARED = 128, 8
"""Refined candidates whose coarse prediction is compared with the refined one, the last ones and at least."""
_BELOW_FAILED = 0.98
"""Fraction of the predicted peak of a trial that ran out of memory which is again as likely to fit as not."""
_UNCALIBRATED_PEAK_SD, _UNCALIBRATED_PEAK_SD_ON_CPU = 0.05, 0.01
"""Standard deviation of the logarithm of measured over predicted peak before there are trials."""


@dataclass(frozen=True)
class Proposal:
    """A candidate to run; `number` is set if the sampler already started a trial of it."""

    scored: Scored
    number: int | None = None


@dataclass
class Proposer:
    """Proposes candidates until none is left that may beat the best measurement.

    For goal throughput by expected improvement times the probability to fit: a candidate is proposed because
    it is predicted to be fast, or because a mechanism of it is uncertain and may be faster than predicted.
    Before anything was measured, the candidate comes first that is fast even if its mechanisms turn out slow.
    For the other goals, whose values are predicted exactly, in the order of the predictions.

    Attributes:
        sampler: Suggests every sixth candidate; None for the scored ones alone.
        on_pruned: Called with number, candidate and reason of each suggestion that is not run.
    """

    scores: Scores
    scorer: Scorer
    sampler: Sampler | None
    goal: Goal
    on_pruned: Callable[[int, Scored, str], None]
    _n_proposed: int = field(default=0)

    def next(
        self, pruner: Pruner, tried: Collection[str], best: float | None, model: StepTimeModel
    ) -> Proposal | None:
        """Return the next candidate, or None if no untried one may improve on `best`."""
        # A trial that other work may have slowed down is proposed again if that is worth more than another.
        self._n_proposed += 1
        ranked = self._by_improvement if self.goal == "throughput" else self._by_prediction
        first = next(ranked(pruner, tried, best, model), None)
        least = _WORTHWHILE
        if first is not None and self.goal == "throughput":
            least = math.exp(self._gains([first], pruner, best, model)[0])
        gains = model.repeat_gains(best) if best is not None and self.goal == "throughput" else {}
        again = max(gains, key=lambda key: gains[key], default="")
        if again in self.scores.by_key and gains[again] > least:
            return Proposal(self.scores.by_key[again])
        if self.sampler is not None and self._n_proposed % _SAMPLER_EVERY == 0:
            found = self._from_sampler(self.sampler, pruner, tried, best, model, least)
            if found is not None:
                return found
        return None if first is None else Proposal(first)

    # -- throughput ------------------------------------------------------------------------------------------

    def _by_improvement(
        self, pruner: Pruner, tried: Collection[str], best: float | None, model: StepTimeModel
    ) -> Iterator[Scored]:
        """Yield candidates in order, all of them simulated op by op."""
        # The coarse level is optimistic, so what comes first by it is simulated op by op and ranked again.
        # Of equals the simplest comes first.
        untried = [
            each
            for each in self.scores.by_key.values()
            if each.key not in tried and pruner.reason(each.prediction) is None
        ]
        gains = self._gains(untried, pruner, best, model)
        queue = [
            (-round(gain, _DECIMALS), each.choice.complexity, i, each)
            for i, (each, gain) in enumerate(zip(untried, gains.tolist(), strict=True))
            if gain > -math.inf
        ]
        heapq.heapify(queue)
        refined_count = 0
        while queue:
            *_, i, each = heapq.heappop(queue)
            refined = self._refined(each)
            # It was refined before, and nothing ahead of it in the queue can still change.
            if refined is each:
                yield each
                continue
            if pruner.reason(refined.prediction) is not None:
                continue
            refined_count += 1
            gain = float(self._gains([refined], pruner, best, model)[0])
            if gain == -math.inf:
                continue
            # Enough simulated for one proposal; what comes now is about as good.
            if refined_count > _MOST_REFINED:
                yield refined
                continue
            heapq.heappush(queue, (-round(gain, _DECIMALS), each.choice.complexity, i, refined))

    def _gains(
        self, candidates: list[Scored], pruner: Pruner, best: float | None, model: StepTimeModel
    ) -> F64:
        """Return the logarithm of expected improvement times the probability to fit.

        -inf if it is not worthwhile; before any trial, the negated logarithm of a step time.
        """
        if not candidates:
            return np.zeros(0)
        more, more_sd = self._refinement(candidates)
        log_s = np.log([_s_per_sample(each) for each in candidates]) + more
        # A candidate that may not fit is worth its gain only as often as it does.
        fits = self._chance_to_fit(candidates, pruner)
        if best is None:
            # Nothing to improve on: first what is expected to fit, then what is fast at its slower end.
            mean, sd = model.posterior(candidates)
            slow_end = log_s + mean + np.hypot(sd, more_sd)
            return np.asarray(-slow_end - np.where(fits >= 0.5, 0.0, 1e6 * (1 - fits)), dtype=np.float64)
        found = fits * model.improvement(candidates, log_s, math.log(best), more_sd)
        # Before any trial the factor that all steps share is unknown, and `best` is no measure.
        least = _WORTHWHILE if model.observed else 0.0
        return np.log(found, where=found > least, out=np.full(len(candidates), -np.inf))

    def _refinement(self, candidates: list[Scored]) -> tuple[F64, F64]:
        """Return by how much the logarithm of a step time changes from the coarse level to that of events."""
        # Coarse predictions are lower bounds and do not know the op times of trials; those that were refined
        # show by how much others would change. Mean and standard deviation, 0 for refined ones.
        coarse = np.array([each.prediction.level == "coarse" for each in candidates])
        mean, sd = np.zeros(len(candidates)), np.zeros(len(candidates))
        refined = [each for each in self.scores.by_key.values() if each.coarse_s][-_MOST_COMPARED:]
        if coarse.any() and len(refined) >= _LEAST_COMPARED:
            pairs = [
                Observed(
                    replace(each, prediction=replace(each.prediction, step_s=each.coarse_s)),
                    each.prediction.step_s,
                )
                for each in refined
            ]
            at = np.flatnonzero(coarse)
            mean[at], sd[at] = StepTimeModel(pairs, are_trials=False).posterior([candidates[i] for i in at])
        return mean, sd

    def _chance_to_fit(self, candidates: list[Scored], pruner: Pruner) -> F64:
        if pruner.budget_bytes is None:
            return np.ones(len(candidates))
        calibration = pruner.calibration
        low, high = calibration.peak_range() if calibration.is_calibrated else (1.0, 1.0)
        on_cpu = self.scorer.rewriter.target.hardware.device == "cpu"
        sd = _UNCALIBRATED_PEAK_SD_ON_CPU if on_cpu else _UNCALIBRATED_PEAK_SD
        if calibration.is_calibrated:
            sd = max(math.log(high / low) / (2 * 1.645), 1e-3)
        peak = np.array([max(each.prediction.peak_allocated_bytes, 1) for each in candidates])
        room = np.log(pruner.budget_bytes / (peak * math.sqrt(low * high)))
        if pruner.failed_peak_bytes is not None:  # what is predicted to need as much will not fit either
            room = np.minimum(room, np.log(_BELOW_FAILED * pruner.failed_peak_bytes / peak))
        found: F64 = ndtr(room / sd)
        return found

    # -- memory, batch ---------------------------------------------------------------------------------------

    def _by_prediction(
        self, pruner: Pruner, tried: Collection[str], best: float | None, model: StepTimeModel
    ) -> Iterator[Scored]:
        """Yield the best few that are not pruned: those expected to fit, then one of each group of equals."""
        # The coarse level is optimistic, so its best are simulated op by op and ranked again.
        seen = {alike(self.scores.by_key[key].prediction) for key in tried if key in self.scores.by_key}

        def order(each: Scored) -> tuple[float, ...]:
            over = not fits_budget(each.prediction, pruner.budget_bytes, pruner.calibration)
            # Over the expected budget the one most likely to fit comes first.
            excess = float(each.prediction.peak_allocated_bytes) if over else 0.0
            return (over, alike(each.prediction) in seen, excess, *each.rank_among_levels(self.goal))

        untried = (
            each
            for each in self.scores.by_key.values()
            if each.key not in tried and pruner.reason(each.prediction) is None
        )
        queue = [
            (order(each), i, each) for i, each in enumerate(heapq.nsmallest(EVENTS_FOR, untried, key=order))
        ]
        refined_count = 0
        while queue:
            _, i, each = heapq.heappop(queue)  # nsmallest gives them in order, which is a heap
            refined = self._refined(each)
            if pruner.reason(refined.prediction) is not None:
                continue
            if refined is not each and refined_count < _MOST_REFINED:
                refined_count += 1
                heapq.heappush(queue, (order(refined), i, refined))
            elif self._may_improve(refined, pruner, best, model):
                yield refined

    def _may_improve(
        self, each: Scored, pruner: Pruner, best: float | None, model: StepTimeModel, least: float = 0.0
    ) -> bool:
        """Return whether the better end of its interval beats `best`; always true before calibration."""
        # For goal throughput whether its gain is worthwhile and at least `least`.
        if best is None or not pruner.calibration.is_calibrated:
            return True
        if self.goal == "memory":
            return pruner.peak_low_bytes(each.prediction) < best
        if self.goal == "batch":
            return -float(each.choice.execution.micro_batch or 0) < best
        gain = float(self._gains([each], pruner, best, model)[0])
        return gain > -math.inf and math.exp(gain) >= least

    # -- both ------------------------------------------------------------------------------------------------

    def _refined(self, each: Scored) -> Scored:
        refined = self.scorer.refined(each)
        self.scores.by_key[each.key] = refined
        return refined

    def _from_sampler(
        self,
        sampler: Sampler,
        pruner: Pruner,
        tried: Collection[str],
        best: float | None,
        model: StepTimeModel,
        least: float,
    ) -> Proposal | None:
        """Return a suggestion that may improve, for goal throughput by at least `least`."""
        for _ in range(_ASKS):
            number, choice = sampler.ask()
            scored = self._known(choice)
            if isinstance(scored, str):
                sampler.prune(number, scored)
                continue
            reason = pruner.reason(scored.prediction)
            if scored.key in tried:
                sampler.prune(number, "equal to a candidate that ran")
            elif reason is not None:
                sampler.prune(number, reason)
                self.on_pruned(number, scored, reason)
            elif not self._may_improve(scored, pruner, best, model, least):
                sampler.prune(number, "predicted to be no better than what was measured")
            else:
                return Proposal(scored, number)
        return None

    def _known(self, choice: Choice | None) -> Scored | str:
        if choice is None:
            return "its knobs exclude each other"
        scored = self.scorer.score(choice)
        if isinstance(scored, Reason):
            return str(scored)
        return self._refined(self.scores.by_key.get(scored.key, scored))


def _s_per_sample(each: Scored) -> float:
    return 1 / each.prediction.samples_per_s if each.prediction.samples_per_s else 1e9
