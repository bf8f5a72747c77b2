"""What each setting of a config costs and saves: the config simulated once more without it, the rest as it is.

Plans belong to a program, so those of the other settings are solved anew for the program that is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from memtune.autotune.candidates import Choice, short
from memtune.autotune.scoring import Scorer
from memtune.autotune.simulate import Prediction
from memtune.search_spaces import null
from memtune.technique import Reason
from memtune.units import format_bytes, format_seconds

EXECUTION = ("execution.accumulate", "execution.compile")
"""Settings of `execution` that have a default to be compared with."""
_WORDS = {"peak_bytes": "of device memory", "reserved_bytes": "reserved", "host_bytes": "of host memory", "ssd_bytes": "on SSD"}
_NOTICED = 0.001
"""Differences of the step time below this part are none."""


@dataclass(frozen=True)
class Taken:
    """What a step takes as predicted; bytes are peaks per rank."""

    step_s: float
    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    ssd_bytes: int

    @classmethod
    def of(cls, prediction: Prediction, step_correction: float = 1.0) -> Taken:
        """From a prediction, its step time times a correction that is not in it yet."""
        return cls(
            prediction.step_s * step_correction, prediction.peak_allocated_bytes, prediction.peak_reserved_bytes,
            prediction.host_peak_bytes, prediction.ssd_peak_bytes,
        )  # fmt: skip

    @classmethod
    def read(cls, document: Any) -> Taken | None:
        """What `asdict` made; None where it is anything else, as a config may have been edited by hand."""
        values = [document.get(each.name) for each in fields(cls)] if isinstance(document, Mapping) else [None]
        if any(isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each) for each in values):
            return None
        return cls(*values)


@dataclass(frozen=True)
class Without:
    """One setting, and what the config takes in the default's place."""

    setting: str
    """A slot, or one of `EXECUTION`."""
    of: str
    """What it is set to, for people."""
    instead: str
    taken: Taken | None
    """None where the rest does not stand without it."""
    unfit: str = ""


@dataclass(frozen=True)
class Ablation:
    """A config, and the same with each setting left out in turn."""

    whole: Taken
    without: tuple[Without, ...]

    def document(self) -> dict[str, Any]:
        """As it stands in a config, below `predicted`."""
        rows = {}
        for each in self.without:
            found = {"unfit": each.unfit} if each.taken is None else asdict(each.taken)
            rows[each.setting] = {"of": each.of, "instead": each.instead, **found}
        return {"whole": asdict(self.whole), "without": rows}

    @classmethod
    def read(cls, document: Any, choice: Choice) -> Ablation | None:
        """What `document` made, if it was made for `choice`; None where it was not, or is anything else."""
        whole = Taken.read(document.get("whole")) if isinstance(document, Mapping) else None
        rows = document.get("without") if isinstance(document, Mapping) else None
        if whole is None or not isinstance(rows, Mapping):
            return None
        expected = {setting: of for setting, of, *_ in _variants(choice)}
        if {key: row.get("of") for key, row in rows.items() if isinstance(row, Mapping)} != expected:
            return None
        return cls(whole, tuple(_row(setting, rows[setting]) for setting in expected))


def _row(setting: str, row: Mapping[str, Any]) -> Without:
    taken = Taken.read(row)
    return Without(
        setting, row["of"], str(row.get("instead", "")), taken, str(row.get("unfit", "not known")) if taken is None else ""
    )


def ablate(scorer: Scorer, choice: Choice, *, step_correction: float = 1.0) -> Ablation | Reason:
    """Simulate `choice`, and `choice` without each of its settings, op by op; or why it does not fit itself.

    Args:
        scorer: For the target.
        choice: With its micro-batch.
        step_correction: Factor that trials put on step times and `scorer` does not know.
    """
    whole = scorer.score(choice, level="events")
    if isinstance(whole, Reason):
        return whole
    rows = []
    for setting, of, instead, variant in _variants(choice):
        found = scorer.score(variant, level="events")
        if isinstance(found, Reason):
            rows.append(Without(setting, of, instead, None, str(found)))
        else:
            rows.append(Without(setting, of, instead, Taken.of(found.prediction, step_correction)))
    return Ablation(Taken.of(whole.prediction, step_correction), tuple(rows))


def _variants(choice: Choice) -> Iterator[tuple[str, str, str, Choice]]:
    """Setting, what it is, what is there instead, and the choice with that; the same samples in a step."""
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


def trade(whole: Taken, without: Taken) -> dict[str, dict[str, float]]:
    """What a setting `costs` and `saves`, each by field of `Taken`, both positive; too small differences are left out."""
    found: dict[str, dict[str, float]] = {"costs": {}, "saves": {}}
    for each in fields(Taken):
        saved = getattr(without, each.name) - getattr(whole, each.name)
        if saved and (each.name != "step_s" or abs(saved) > _NOTICED * whole.step_s):
            found["saves" if saved > 0 else "costs"][each.name] = abs(saved)
    return found


def trade_text(whole: Taken, without: Taken) -> str:
    """`trade` in a line: `saves 1.2 GiB of device memory, costs 90 ms a step (12 %)`."""
    parts = []
    for verb, found in trade(whole, without).items():
        said = [_said(name, value, without) for name, value in found.items()]
        if found.get("reserved_bytes") == found.get("peak_bytes") and "peak_bytes" in found:
            said.remove(_said("reserved_bytes", found["reserved_bytes"], without))
        parts += [f"{verb} {', '.join(said)}"] if said else []
    return "; ".join(reversed(parts)) or "no difference that the simulator sees"


def _said(name: str, value: float, without: Taken) -> str:
    if name != "step_s":
        return f"{format_bytes(int(value))} {_WORDS[name]}"
    return f"{format_seconds(value)} a step" + (
        f" ({value / without.step_s:.1%} of what it takes without)" if without.step_s else ""
    )


def why(whole: Taken, row: Without, budget_bytes: int | None) -> str:
    """Why the setting is there, as far as the predictions say."""
    if row.taken is None:
        return f"the rest does not stand without it: {row.unfit}"
    found, needs = trade(whole, row.taken), row.taken.peak_bytes
    if budget_bytes is not None and whole.peak_bytes <= budget_bytes < needs:
        over = format_bytes(needs - budget_bytes)
        return f"without it {format_bytes(needs)} would be needed, {over} over the budget of {format_bytes(budget_bytes)}"
    if "step_s" in found["saves"]:
        return "the step is faster with it"
    fits = "" if budget_bytes is None else "; without it the config would be within the budget, too"
    if found["saves"]:
        return f"it needs less memory{fits}"
    return f"the simulator sees nothing in its favour, so it was measured or asked for{fits}"
