"""Predictions of a choice as documents: its config before a trial or for `memtune plan --out`, its timelines
and the waterfall of the report.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memtune.autotune.predict import Calibration, oom_probability, step_timeline
from memtune.autotune.search.bucket_plans import plan_buckets
from memtune.autotune.search.preparation import Setup
from memtune.autotune.space import Choice, Scored, ablate, baselines, python_work
from memtune.config import TunedConfig
from memtune.technique import Reason

SCHEMA = 1


def trial_config(setup: Setup, choice: Choice) -> TunedConfig:
    """Return the config of `choice` with its plans, as known before a trial."""
    candidate = setup.scorer.rewriter.candidate(choice)
    if isinstance(candidate, Reason):
        return TunedConfig(settings=choice, made_for=setup.made_for)
    return TunedConfig(
        settings=choice,
        made_for=setup.made_for,
        plan=dict(candidate.plans),
        buckets=plan_buckets(setup, candidate),
    )


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
        "peak_low_bytes": prediction.interval.peak_low_bytes,
        "peak_high_bytes": prediction.interval.peak_high_bytes,
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


@dataclass(frozen=True)
class WaterfallStep:
    """A setting with the techniques of the rows before it and one more."""

    setting: str
    step_s: float | None
    peak_bytes: int | None
    unfit: str = ""
    """Reason why the combination cannot be used; the next row adds to it all the same."""


def timelines(setup: Setup, choice: Choice, step_correction: float) -> dict[str, Any]:
    """Return the simulated timelines and the waterfall as one document."""
    found, _ = baselines(setup.scorer, setup.global_batch)
    plain = next((each.scored.choice for each in found if each.name == "plain"), None)
    named = ({"plain": plain} if plain is not None and plain != choice else {}) | {"chosen": choice}
    hardware = setup.scorer.hardware
    drawn = {
        name: step_timeline(each.program, hardware, python_work(each)).document()
        for name, each in ((name, setup.scorer.candidate(choice)) for name, choice in named.items())
    }
    return {
        "schema": SCHEMA,
        "summaries": {name: each.summary for name, each in named.items()},
        "timelines": drawn,
        "waterfall": [asdict(each) for each in _waterfall(setup, plain, choice, step_correction)],
    }


def _waterfall(
    setup: Setup, plain: Choice | None, choice: Choice, step_correction: float
) -> list[WaterfallStep]:
    """Return the plain setting, then one more of the chosen techniques per row, the micro-batch last."""
    if plain is None or plain == choice:
        return []
    chosen = dict(plain.chosen)
    rows = [("plain", plain)]
    for slot in dict.fromkeys([*choice.chosen, *plain.chosen]):
        if choice.chosen.get(slot) == plain.chosen.get(slot):
            continue
        chosen.pop(slot, None)
        if slot in choice.chosen:
            chosen[slot] = choice.chosen[slot]
        rows.append(
            (f"{slot}: {chosen[slot].kind if slot in chosen else 'none'}", Choice.of(plain.execution, chosen))
        )
    if choice.execution != plain.execution:
        rows.append((choice.execution.summary() or "execution", choice))
    rows.append(("chosen", choice))
    return [_step(setup, name, each, step_correction) for name, each in rows]


def _step(setup: Setup, setting: str, choice: Choice, step_correction: float) -> WaterfallStep:
    scored: Scored | Reason = setup.scorer.score(choice, level="events")
    if isinstance(scored, Reason):
        return WaterfallStep(setting, None, None, str(scored))
    prediction = scored.prediction
    return WaterfallStep(setting, prediction.step_s * step_correction, prediction.peak_allocated_bytes)
