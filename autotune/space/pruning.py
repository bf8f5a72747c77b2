"""Decide which candidates are not run: those whose predicted peak exceeds the budget even at its lower end,
and those with a technique that refuses the live model.

A prediction is as reliable as its interval, so each search also runs the pruned candidate closest to the
budget (the audit). If it fits, the interval was too narrow: it is widened accordingly, and pruned candidates
are reconsidered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from memtune.autotune.predict import Calibration, Prediction
from memtune.autotune.space.scoring import Scored
from memtune.autotune.space.step_time_model import Kind
from memtune.units import format_bytes

Kinds = frozenset[Kind]


@dataclass(frozen=True)
class Pruner:
    """Prunes by the interval of the trials so far.

    Attributes:
        budget_bytes: Device bytes per rank; None prunes nothing.
        calibration: Corrections of predictions from trials.
        failed_peak_bytes: Smallest predicted peak of a trial that ran out of memory although it was expected
            to fit; None if there is none.
        widest: Smallest measured over predicted peak of an audit that fitted; the interval extends at least
            that low.
    """

    budget_bytes: int | None
    calibration: Calibration = field(default_factory=Calibration)
    widest: float = 1.0
    failed_peak_bytes: int | None = None

    def peak_low_bytes(self, prediction: Prediction) -> int:
        """Return the lower end of the peak of allocated bytes."""
        return math.floor(
            prediction.peak_allocated_bytes * min(self.calibration.peak_range()[0], self.widest)
        )

    def reason(self, prediction: Prediction) -> str | None:
        """Return why a candidate is pruned, or None if it may fit."""
        low = self.peak_low_bytes(prediction)
        if self.budget_bytes is None or low <= self.budget_bytes:
            return None
        over = format_bytes(low - self.budget_bytes)
        where = f" at {prediction.peak_op}" if prediction.peak_op else ""
        return (
            f"needs at least {format_bytes(low)} (predicted"
            f" {format_bytes(prediction.peak_allocated_bytes)}{where}), {over} over the budget of"
            f" {format_bytes(self.budget_bytes)}"
        )

    def borderline(self, candidates: Iterable[Scored]) -> Scored | None:
        """Return the pruned candidate whose lower end is closest to the budget, for the audit."""
        pruned = [each for each in candidates if self.reason(each.prediction) is not None]
        return min(
            pruned,
            key=lambda each: (self.peak_low_bytes(each.prediction), *each.choice.complexity),
            default=None,
        )

    def calibrated(self, calibration: Calibration) -> Pruner:
        """Return this pruner with the interval of more trials."""
        return replace(self, calibration=calibration)

    def after_failure(self, prediction: Prediction) -> Pruner:
        """Return this pruner after a trial that was expected to fit and ran out of memory."""
        # A failure above the budget was expected, and says nothing about smaller peaks.
        if self.budget_bytes is None or prediction.peak_allocated_bytes > self.budget_bytes:
            return self
        known = self.failed_peak_bytes or prediction.peak_allocated_bytes
        return replace(self, failed_peak_bytes=min(known, prediction.peak_allocated_bytes))

    def after_audit(self, prediction: Prediction, measured_peak_bytes: int) -> Pruner:
        """Return this pruner with an interval that would not have pruned the audited candidate."""
        ratio = measured_peak_bytes / prediction.peak_allocated_bytes
        return replace(self, widest=min(self.widest, ratio))


def refusing_techniques(refused: Sequence[Kinds], worked: Iterable[Kinds]) -> list[Kinds]:
    """Return the techniques common to at least two trials with one refusal, and to no trial that worked.

    Args:
        refused: Techniques of each trial with that refusal, in order.
        worked: Those of each trial that ran to its end.
    """
    # The set that explains most trials comes first, of equals the one seen first; the next one must
    # explain two of the remaining trials. So a technique that occurs together with two culprits is not
    # blamed for them once each has been seen twice more.
    known, left, found = set(worked), list(refused), list[Kinds]()
    while True:
        shared = dict.fromkeys(one & other for one, other in combinations(left, 2))
        candidates = [each for each in shared if each and not any(each <= those for those in known)]
        if not candidates:
            return found
        best = max(candidates, key=lambda each: sum(each <= trial for trial in left))
        found.append(best)
        left = [trial for trial in left if not best <= trial]
