"""Predict the contribution of each setting of a config: simulate the config again without it.

Plans belong to a program, so the plans of the remaining settings are solved again for the remaining program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from memtune.autotune.predict import Prediction
from memtune.autotune.space.candidates import Choice, short
from memtune.autotune.space.scoring import Scorer
from memtune.search_spaces import null
from memtune.technique import Reason
from memtune.units import format_bytes, format_seconds

EXECUTION = ("execution.accumulate", "execution.compile")
"""Settings of `execution` that have a default to compare with."""
_WORDS = {
    "peak_bytes": "of device memory",
    "reserved_bytes": "reserved",
    "host_bytes": "of host memory",
    "ssd_bytes": "on SSD",
}
_NEGLIGIBLE = 0.001
"""Relative difference of step times below which there is none."""


@dataclass(frozen=True)
class StepCost:
    """Predicted cost of a step; bytes are peaks per rank."""

    step_s: float
    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    ssd_bytes: int

    @classmethod
    def from_prediction(cls, prediction: Prediction, step_correction: float = 1.0) -> StepCost:
        """Return the cost of a prediction, its step time multiplied by a correction not included in it."""
        return cls(
            prediction.step_s * step_correction,
            prediction.peak_allocated_bytes,
            prediction.peak_reserved_bytes,
            prediction.host_peak_bytes,
            prediction.ssd_peak_bytes,
        )

    @classmethod
    def read(cls, document: Any) -> StepCost | None:
        """Return the cost that `asdict` wrote, or None for anything else."""
        # A config may have been edited by hand.
        values = (
            [document.get(each.name) for each in fields(cls)] if isinstance(document, Mapping) else [None]
        )
        if any(
            isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each)
            for each in values
        ):
            return None
        return cls(*values)


@dataclass(frozen=True)
class AblatedSetting:
    """One setting, and the cost of the config with its default instead."""

    setting: str
    """A slot, or one of `EXECUTION`."""
    value: str
    """Its value, for display."""
    replacement: str
    taken: StepCost | None
    """None if the remaining settings do not fit without it."""
    unfit: str = ""


@dataclass(frozen=True)
class Ablation:
    """The cost of a config, and of the same config without each setting."""

    all_settings: StepCost
    without: tuple[AblatedSetting, ...]

    def document(self) -> dict[str, Any]:
        """Return the document below `predicted` in a config."""
        rows = {}
        for each in self.without:
            found = {"unfit": each.unfit} if each.taken is None else asdict(each.taken)
            rows[each.setting] = {"value": each.value, "replacement": each.replacement, **found}
        return {"all_settings": asdict(self.all_settings), "without": rows}

    @classmethod
    def read(cls, document: Any, choice: Choice) -> Ablation | None:
        """Return the ablation in `document` if it was made for `choice`, else None."""
        whole = StepCost.read(document.get("all_settings")) if isinstance(document, Mapping) else None
        rows = document.get("without") if isinstance(document, Mapping) else None
        if whole is None or not isinstance(rows, Mapping):
            return None
        expected = {setting: of for setting, of, *_ in _variants(choice)}
        if {key: row.get("value") for key, row in rows.items() if isinstance(row, Mapping)} != expected:
            return None
        return cls(whole, tuple(_row(setting, rows[setting]) for setting in expected))


def _row(setting: str, row: Mapping[str, Any]) -> AblatedSetting:
    taken = StepCost.read(row)
    return AblatedSetting(
        setting,
        row["value"],
        str(row.get("replacement", "")),
        taken,
        str(row.get("unfit", "not known")) if taken is None else "",
    )


def ablate(scorer: Scorer, choice: Choice, *, step_correction: float = 1.0) -> Ablation | Reason:
    """Simulate `choice`, with and without each setting, op by op; return why if it does not fit.

    Args:
        scorer: For the target.
        choice: With its micro-batch.
        step_correction: Factor of trials on step times that `scorer` does not include.
    """
    whole = scorer.score(choice, level="events")
    if isinstance(whole, Reason):
        return whole
    rows = []
    for setting, of, instead, variant in _variants(choice):
        found = scorer.score(variant, level="events")
        if isinstance(found, Reason):
            rows.append(AblatedSetting(setting, of, instead, None, str(found)))
        else:
            rows.append(
                AblatedSetting(
                    setting, of, instead, StepCost.from_prediction(found.prediction, step_correction)
                )
            )
    return Ablation(StepCost.from_prediction(whole.prediction, step_correction), tuple(rows))


def _variants(choice: Choice) -> Iterator[tuple[str, str, str, Choice]]:
    """Yield setting, its value, the replacement and the choice with it; samples per step do not change."""
    execution = choice.execution
    size = execution.micro_batch
    if execution.accumulate > 1:
        whole = None if size is None else size * execution.accumulate
        once = execution.model_copy(update={"micro_batch": whole, "accumulate": 1})
        of = f"micro_batch={size}, accumulate={execution.accumulate}"
        yield "execution.accumulate", of, f"micro_batch={whole}", replace(choice, execution=once)
    if execution.compile:
        plain = execution.model_copy(update={"compile": False, "compile_backend": "inductor"})
        of = f"{execution.compile}, {execution.compile_backend}"
        yield "execution.compile", of, "not compiled", replace(choice, execution=plain)
    for technique in choice.techniques:
        rest = {slot: each for slot, each in choice.chosen.items() if slot != technique.slot}
        yield technique.slot, short(technique), null(technique.slot).kind, Choice.of(execution, rest)


def trade(whole: StepCost, without: StepCost) -> dict[str, dict[str, float]]:
    """Return what a setting `costs` and `saves`, by field of `StepCost`, without negligible differences."""
    found: dict[str, dict[str, float]] = {"costs": {}, "saves": {}}
    for each in fields(StepCost):
        saved = getattr(without, each.name) - getattr(whole, each.name)
        if saved and (each.name != "step_s" or abs(saved) > _NEGLIGIBLE * whole.step_s):
            found["saves" if saved > 0 else "costs"][each.name] = abs(saved)
    return found


def trade_text(whole: StepCost, without: StepCost) -> str:
    """Return `trade` in a line: `saves 1.2 GiB of device memory, costs 90 ms a step (12 %)`."""
    parts = []
    for verb, found in trade(whole, without).items():
        changes = [_amount(name, value, without) for name, value in found.items()]
        if found.get("reserved_bytes") == found.get("peak_bytes") and "peak_bytes" in found:
            changes.remove(_amount("reserved_bytes", found["reserved_bytes"], without))
        parts += [f"{verb} {', '.join(changes)}"] if changes else []
    return "; ".join(reversed(parts)) or "no difference that the simulator sees"


def _amount(name: str, value: float, without: StepCost) -> str:
    if name != "step_s":
        return f"{format_bytes(int(value))} {_WORDS[name]}"
    return f"{format_seconds(value)} a step" + (
        f" ({value / without.step_s:.1%} of what it takes without)" if without.step_s else ""
    )


def ablation_reason(whole: StepCost, row: AblatedSetting, budget_bytes: int | None) -> str:
    """Return why a setting is used, as far as predictions explain it."""
    if row.taken is None:
        return f"the rest does not stand without it: {row.unfit}"
    found, needs = trade(whole, row.taken), row.taken.peak_bytes
    if budget_bytes is not None and whole.peak_bytes <= budget_bytes < needs:
        over = format_bytes(needs - budget_bytes)
        return (
            f"without it {format_bytes(needs)} would be needed, {over} over the budget of"
            f" {format_bytes(budget_bytes)}"
        )
    if "step_s" in found["saves"]:
        return "the step is faster with it"
    fits = "" if budget_bytes is None else "; without it the config would be within the budget, too"
    if found["saves"]:
        return f"it needs less memory{fits}"
    return f"the simulator sees nothing in its favour, so it was measured or asked for{fits}"
