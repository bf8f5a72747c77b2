"""The config of a choice with its prediction: before a trial, or for `memtune plan --out`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memtune.autotune.predict import Calibration, oom_probability
from memtune.autotune.search.preparation import Setup
from memtune.autotune.space import Choice, Scored, ablate
from memtune.config import TunedConfig
from memtune.technique import Plan, Reason


def trial_config(setup: Setup, choice: Choice) -> TunedConfig:
    """Return the config of `choice` with its plans, as known before a trial."""
    candidate = setup.scorer.rewriter.candidate(choice)
    plans: dict[str, Plan] = {} if isinstance(candidate, Reason) else dict(candidate.plans)
    return TunedConfig(settings=choice, made_for=setup.made_for, plan=plans)


def predicted_config(setup: Setup, scored: Scored) -> TunedConfig:
    """Return the config of a choice that no trial has run, with its prediction."""
    numbers = predicted(setup, scored, Calibration()) | {"calibrated_by": len(setup.calibration.step_ratios)}
    return trial_config(setup, scored.choice).model_copy(
        update={
            "predicted": numbers | ablation(setup, scored.choice, 1.0),
            "certificate": {"budget_bytes": setup.budget_bytes},
        }
    )


def predicted(setup: Setup, scored: Scored, calibration: Calibration) -> dict[str, Any]:
    """Return the prediction of a choice, corrected by `calibration` if the prediction is not."""
    prediction = scored.prediction
    return {
        "peak_bytes": prediction.peak_allocated_bytes,
        "reserved_bytes": prediction.peak_reserved_bytes,
        "host_peak_bytes": prediction.host_peak_bytes,
        "ssd_peak_bytes": prediction.ssd_peak_bytes,
        "ssd_written_bytes": prediction.ssd_written_bytes,
        "step_s": prediction.step_s * calibration.step_correction,
        "calibrated_by": len(calibration.step_ratios),
        "oom_probability": oom_probability(calibration, prediction.peak_allocated_bytes, setup.budget_bytes),
        "rates": setup.hardware.rates_from,
        "hardware": setup.hardware.name,
        "critical_s": prediction.critical_s,
        "exposed_by_op": [asdict(each) for each in prediction.exposed_by_op[:5]],
    }


def ablation(setup: Setup, choice: Choice, step_correction: float) -> dict[str, Any]:
    """Return cost and saving of each setting, for `memtune explain`."""
    found = ablate(setup.scorer, choice, step_correction=step_correction)
    return {} if isinstance(found, Reason) else {"ablation": found.document()}
