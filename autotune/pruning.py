"""Which candidates are not run, and the proof: even the lower end of the predicted peak exceeds the budget.

The proof is as good as its interval, so each search runs the pruned candidate that came closest to the budget all the same
(the audit). If it fits, the interval was too narrow: it is widened by what the audit showed, and what it pruned is reconsidered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memtune.autotune.scoring import Scored
from memtune.autotune.simulate import Calibration, Prediction
from memtune.units import format_bytes


@dataclass(frozen=True)
class Pruner:
    """Decides by the interval that the trials so far allow.

    Attributes:
        budget_bytes: Device bytes per rank; None prunes nothing.
        calibration: What trials said of the predictions.
        widest: Smallest measured over predicted peak of an audit that fitted; the interval reaches at least that low.
    """

    budget_bytes: int | None
    calibration: Calibration = field(default_factory=Calibration)
    widest: float = 1.0

    def peak_low_bytes(self, prediction: Prediction) -> int:
        """Lower end of the peak of allocated bytes."""
        return math.floor(prediction.peak_allocated_bytes * min(self.calibration.peak_range()[0], self.widest))

    def reason(self, prediction: Prediction) -> str | None:
        """Why a candidate is pruned, or None if it may fit."""
        low = self.peak_low_bytes(prediction)
        if self.budget_bytes is None or low <= self.budget_bytes:
            return None
        over = format_bytes(low - self.budget_bytes)
        where = f" at {prediction.peak_op}" if prediction.peak_op else ""
        return (
            f"needs at least {format_bytes(low)} (predicted {format_bytes(prediction.peak_allocated_bytes)}{where}), "
            f"{over} over the budget of {format_bytes(self.budget_bytes)}"
        )

    def borderline(self, candidates: Iterable[Scored]) -> Scored | None:
        """The pruned candidate whose lower end is closest to the budget: the one to audit."""
        pruned = [each for each in candidates if self.reason(each.prediction) is not None]
        return min(pruned, key=lambda each: (self.peak_low_bytes(each.prediction), *each.choice.complexity), default=None)

    def calibrated(self, calibration: Calibration) -> Pruner:
        """This pruner with more trials behind its interval."""
        return replace(self, calibration=calibration)

    def after_audit(self, prediction: Prediction, measured_peak_bytes: int) -> Pruner:
        """This pruner with an interval that would not have pruned what the audit found to fit."""
        ratio = measured_peak_bytes / prediction.peak_allocated_bytes
        return replace(self, widest=min(self.widest, ratio))
