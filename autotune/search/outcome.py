"""The outcome of a search: the config, the numbers behind it, or why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from memtune.api import starts_off_device
from memtune.autotune.search.driver import Driver, FinishedTrial
from memtune.autotune.search.predictions import ablation, predicted, trial_config
from memtune.autotune.search.preparation import Setup
from memtune.autotune.search.trial_verdict import Measured, Verdict
from memtune.autotune.space import Choice, Scored, Scores, describe, moments, more_memory, remedies
from memtune.config import TunedConfig, load_config
from memtune.errors import NothingFits
from memtune.technique import Reason
from memtune.units import format_bytes

SCHEMA = 1
_SHOWN = {
    "status",
    "reason",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "step_s",
    "samples_per_s",
    "losses",
    "wall_s",
}
Status = Literal["done", "stopped", "interrupted", "dry_run"]


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search."""

    status: Status
    study: str
    """Folder of the study."""
    message: str
    """One sentence: the winner and its gain."""
    config: dict[str, Any] | None = None
    """The written document; None for a dry run."""
    out: str | None = None
    measured: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None
    baselines: tuple[dict[str, Any], ...] = ()
    trials: tuple[dict[str, Any], ...] = ()
    exit_code: int = 0

    @property
    def interrupted(self) -> bool:
        """Return whether a signal ended it; the best so far was written if anything fitted."""
        return self.status == "interrupted"

    @property
    def tuned(self) -> TunedConfig | None:
        """Return the written config."""
        return load_config(self.config) if self.config is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return one document."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> SearchOutcome:
        """Return the outcome that `to_dict` wrote."""
        values = {name: value for name, value in document.items() if name != "schema"}
        return cls(**{**values, "baselines": tuple(values["baselines"]), "trials": tuple(values["trials"])})


def trial_rows(finished: Sequence[FinishedTrial]) -> tuple[dict[str, Any], ...]:
    """Return all trials as plain data, in order."""
    return tuple(
        {
            "number": each.number,
            "role": each.job.role,
            "name": each.job.name,
            "summary": each.job.scored.choice.summary,
            "sentence": each.job.scored.choice.sentence,
            "settings": each.job.scored.choice.dump(),
            "predicted_peak_bytes": each.job.scored.prediction.peak_allocated_bytes,
            "predicted_reserved_bytes": each.job.scored.prediction.peak_reserved_bytes,
            "predicted_step_s": each.job.scored.prediction.step_s,
            **each.result.model_dump(mode="json", include=_SHOWN),
        }
        for each in finished
    )


def tuned_config(
    driver: Driver,
    scored: Scored,
    verdict: Verdict,
    *,
    confirmed: FinishedTrial | None,
    numerics: dict[str, Any],
    study: str,
) -> TunedConfig:
    """Return the winner's config with measurement, prediction and certificate, which includes `numerics`."""
    winner = verdict.winner
    baselines = {each.baseline: numbers(each) for each in driver.measured() if each.baseline}
    baselines |= {
        each.job.name: {"status": each.result.status}
        for each in driver.finished
        if each.job.role == "baseline" and each.result.status != "ok"
    }
    return trial_config(driver.setup, winner.choice).model_copy(
        update={
            "measured": {**numbers(winner), "baselines": baselines},
            "predicted": predicted(driver.setup, scored, driver.pruner.calibration)
            | ablation(driver.setup, winner.choice, driver.pruner.calibration.step_correction),
            "certificate": _certificate(driver, winner, confirmed) | numerics,
            "study": {
                "name": Path(study).name,
                "trial": winner.number,
                "seed": driver.options.seed,
                "goal": driver.setup.goal,
            },
        }
    )


def numbers(measured: Measured) -> dict[str, Any]:
    """Return the measurements of one choice."""
    written = max((each.link_bytes.get("ssd_write", 0) for each in measured.results), default=0)
    return ({"ssd_written_bytes": written} if written else {}) | {
        "peak_bytes": measured.peak_bytes,
        "reserved_bytes": max(each.peak_reserved_bytes or 0 for each in measured.results) or None,
        "step_s": measured.step_s,
        "spread_s": measured.spread_s,
        "samples_per_s": measured.samples_per_s,
        "trials": len(measured.results),
    }


def _certificate(driver: Driver, winner: Measured, confirmed: FinishedTrial | None) -> dict[str, Any]:
    budget = driver.setup.budget_bytes
    reference = driver.reference
    certificate: dict[str, Any] = {
        "fits": budget is None or winner.peak_bytes <= budget,
        "budget_bytes": budget,
    }
    certificate["confirmed_in_fresh_process"] = confirmed is not None
    if confirmed is not None:
        certificate["confirmed_peak_bytes"] = confirmed.result.peak_allocated_bytes
    if reference is not None:
        certificate["losses_agree_with"] = reference.job.name or reference.job.scored.choice.summary
        certificate["largest_relative_loss_difference"] = max(
            (
                abs(mine - other) / max(abs(other), 1e-8)
                for result in winner.results
                for mine, other in zip(result.losses, reference.result.losses, strict=False)
            ),
            default=0.0,
        )
    certificate["exactness"] = str(winner.choice.exactness)
    return certificate | predicted_moments(driver.setup, winner.choice)


def predicted_moments(setup: Setup, choice: Choice) -> dict[str, Any]:
    """Return the part of a certificate about each moment of a run, and which ones exceed the budget."""
    rewriter = setup.scorer.rewriter
    candidate = rewriter.candidate(choice)
    if isinstance(candidate, Reason):
        return {}
    found = moments(rewriter, candidate)
    part: dict[str, Any] = {}
    over = [
        each.name for each in found if setup.budget_bytes is not None and each.peak_bytes > setup.budget_bytes
    ]
    if over:
        part["predicted_over_budget"] = over
    return part | {"moments": {each.name: each.to_dict(setup.budget_bytes) for each in found}}


def weights_over_budget(setup: Setup, scores: Scores) -> NothingFits | None:
    """Return the error, before any trial, if no setting shards or offloads enough of the weights."""
    budget = setup.budget_bytes
    if budget is None or not scores.by_key:
        return None
    least = min(_start_or_peak_bytes(setup, each) for each in scores.by_key.values())
    if least <= budget:
        return None
    return NothingFits(
        f"Nothing fits: the weights alone need {format_bytes(least)} per rank, the limit is"
        f" {format_bytes(budget)} (short by {format_bytes(least - budget)}).",
        evidence=(
            f"{setup.made_for.parameters:,} parameters, {format_bytes(setup.parameter_bytes)} in all, on"
            f" {setup.ranks} rank"
        )
        + ("s." if setup.ranks > 1 else ". No setting that was scored keeps enough of them off the device."),
        fix=(
            f"{more_memory(setup.hardware, least)}; more ranks with sharding.states: fsdp; or fewer or"
            " narrower parameters"
        ),
        code="MT301",
    )


def _start_or_peak_bytes(setup: Setup, scored: Scored) -> int:
    """Return the bytes of weights on the device at the peak of a step, or before the first one if more."""
    peak = scored.prediction.peak_by_kind.get("parameters", 0)
    # Other offload finds the whole model on the device; shards are filled one by one.
    if setup.ranks > 1 or starts_off_device(TunedConfig(settings=scored.choice), setup.ranks):
        return peak
    return max(peak, setup.parameter_bytes)


def nothing_fits(driver: Driver) -> NothingFits:
    """Return the error after the trials: the closest candidate, its excess, and what would help."""
    setup = driver.setup
    budget = setup.budget_bytes or setup.hardware.memory_bytes
    over = [each for each in driver.finished if each.result.status == "oom"]
    if not over:
        failed = [each.result for each in driver.finished if each.result.status != "ok"]
        tried = "; ".join(dict.fromkeys(f"{each.status}: {each.reason}" for each in failed))
        count, ran = len(driver.finished), len(driver.finished) - len(failed)
        return NothingFits(
            f"No setting ran each time: {ran} of {count} trials finished, but their settings failed when they"
            " were run again."
            if ran
            else f"No setting ran: {count} trials, none of them finished.",
            evidence=tried[:500],
            fix="memtune trial with one setting shows its log",
            code="MT301",
        )
    closest = min(over, key=lambda each: each.job.scored.prediction.peak_allocated_bytes)
    prediction = closest.job.scored.prediction
    if prediction.peak_allocated_bytes <= budget:
        # Its prediction was wrong, so predictions for other settings are no advice.
        return NothingFits(
            f"Nothing fits: {len(over)} trials ran out of memory, the limit is {format_bytes(budget)}.",
            evidence=(
                f"Trial {closest.number}, {closest.job.scored.choice.summary}, was predicted to need"
                f" {format_bytes(prediction.peak_allocated_bytes)}: {closest.result.reason}"
            ),
            fix=f"{more_memory(setup.hardware, budget + budget // 10)}; memtune report shows all trials",
            code="MT301",
        )
    needs = max(prediction.peak_allocated_bytes, budget + 1)
    biggest = max(prediction.peak_by_kind.items(), key=lambda item: item[1], default=("", 0))
    return NothingFits(
        f"Nothing fits: the closest of {len(over)} that ran out of memory needs about {format_bytes(needs)}, "
        f"the limit is {format_bytes(budget)} (short by {format_bytes(needs - budget)}).",
        evidence=(
            f"Trial {closest.number}, {closest.job.scored.choice.summary}. Biggest: {biggest[0]}"
            f" {format_bytes(biggest[1])}"
        )
        + (
            f", at {prediction.peak_op} in {prediction.peak_module or 'the model'}."
            if prediction.peak_op
            else "."
        ),
        fix="; ".join(map(describe, remedies(setup.scorer, closest.job.scored, budget))),
        code="MT301",
    )
