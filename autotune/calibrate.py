"""How far a prediction can be trusted: the chance of running out of memory, from how the trials so far came out.

Conformal prediction (Vovk, Gammerman, Shafer 2005, section 2.2): a new trial's measured-over-predicted ratio is as likely to fall
into any of the gaps that the ratios so far leave. Nothing is assumed of how they are distributed.
"""

from __future__ import annotations

from memtune.autotune.simulate import Calibration


def oom_probability(calibration: Calibration, peak_bytes: int, budget_bytes: int | None) -> float | None:
    """Chance that a candidate with the predicted peak `peak_bytes` needs more than `budget_bytes`.

    Of n ratios so far, k lie above what the budget allows: the chance is from k / (n + 1) to (k + 1) / (n + 1), its middle
    is given. So it is never 0 or 1, and nears them as trials agree.

    Returns:
        0 without a budget; None with fewer trials than an interval takes, where nothing can be said.
    """
    if budget_bytes is None:
        return 0.0
    ratios = calibration.peak_ratios
    if len(ratios) < Calibration.ENOUGH or peak_bytes <= 0:
        return None
    above = sum(ratio > budget_bytes / peak_bytes for ratio in ratios)
    return (above + 0.5) / (len(ratios) + 1)
