"""`memtune explain`: each setting of a config with its effect, reason, cost and savings; then the config's
numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from memtune.cli import _options
from memtune.cli._crash_report import report_crashes
from memtune.cli._output import emit, folded, results, say
from memtune.config import TunedConfig
from memtune.errors import UsageError
from memtune.progress import Progress, shown
from memtune.search_spaces import matching
from memtune.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from memtune.autotune.search import Absence
    from memtune.autotune.space import AblatedSetting, Ablation, PlanOptions

SCHEMA = 1
_INDENT = 21


def explain(given: dict[str, Any]) -> int:
    """Print the explanation; with a model, simulate the config again without each setting."""
    _options.config_file(given["config"])
    if given["why_not"] is not None:
        matching(given["why_not"])
        if given["model"] is None:
            raise UsageError("--why-not simulates the model.", fix="add --model model.py", code="MT100")
    if given["model"] is not None:
        _options.workload(given["model"])

    with (
        nullcontext() if given["model"] is None else report_crashes(given["model"], given["as_json"]),
        results() as stream,
    ):
        progress = Progress()
        say(f"memtune explain {given['config']}")
        tuned = _options.config(given["config"])
        with shown(progress, sys.stderr):
            found, origin = _ablation(tuned, given, progress)
            absent = _absences(tuned, given, progress)
        budget = _budget(tuned, given)
        rows = [*_rows(tuned)]
        if given["as_json"]:
            document = _document(tuned, rows, found, origin, budget)
            emit(document | {"why_not": [each.to_dict() for each in absent]}, stream)
            return 0
        lines = (
            *_setting_lines(tuned, rows, found, origin, budget, verbose=given["verbose"]),
            *_bucket_lines(tuned),
            *(_number_lines(tuned) if given["verbose"] else _figures(tuned, budget)),
            *_over_budget(tuned.certificate),
            *(f"{each.technique}: {each.reason}" for each in absent),
        )
        for line in lines:
            print(folded(line, stream, _INDENT), file=stream)
    return 0


def _figures(tuned: TunedConfig, budget: int | None) -> Iterator[str]:
    """Yield measurement and prediction, a line each."""
    limit = f" of {format_bytes(budget)}" if budget else ""
    unconfirmed = tuned.certificate.get("confirmed_in_fresh_process") is False
    for name in ("measured", "predicted"):
        part = getattr(tuned, name)
        rate, step_s, peak = (part.get(key) for key in ("samples_per_s", "step_s", "peak_bytes"))
        facts = [f"{format_rate(rate)} samples/s"] if isinstance(rate, int | float) else []
        facts += [f"{format_seconds(step_s)} a step"] if isinstance(step_s, int | float) else []
        facts += [f"peak {format_bytes(peak)}{limit}"] if isinstance(peak, int) else []
        if name == "measured" and unconfirmed:
            facts.append("best so far of a search that was stopped, not confirmed: --resume goes on")
        if facts:
            yield f"{name:<{_INDENT}}{', '.join(facts)}"


def _absences(tuned: TunedConfig, given: dict[str, Any], progress: Progress) -> tuple[Absence, ...]:
    """Return why the technique of `--why-not` is not used: from a plan for the target of the config."""
    if given["why_not"] is None:
        return ()
    from memtune.autotune.search import plan

    options = replace(_target(tuned, given), config=None, why_not=given["why_not"])
    return plan(options, say=progress.phase).absences


def _ablation(tuned: TunedConfig, given: dict[str, Any], progress: Progress) -> tuple[Ablation | None, str]:
    """Return cost and savings of each setting, with their origin, or the reason why they are unknown."""
    from memtune.autotune.space import Ablation, Choice

    if given["model"] is not None:
        return _simulated(tuned, given, progress)
    document = tuned.predicted.get("ablation")
    if document is None:
        return None, "not in this config; add --model model.py to record the model and simulate it"
    found = Ablation.read(document, Choice(tuned.settings.execution, tuned.settings.techniques))
    if found is None:
        return (
            None,
            "the settings were changed since it was simulated; add --model model.py to simulate it again",
        )
    return found, "simulated when the config was written"


def _target(tuned: TunedConfig, given: dict[str, Any]) -> PlanOptions:
    """Return the target that the config was made for, unless options name another."""
    from memtune import hardware
    from memtune.autotune.space import PlanOptions

    made = tuned.made_for
    device, ranks, gpu_type = None, 1, given["gpu_type"]
    if any(given[name] is not None for name in ("device", "gpus", "workers", "gpu_type")):
        device, ranks = _options.place(given, for_trials=False)
    elif made is not None:
        device, ranks = made.device, made.ranks
        gpu_type = made.hardware if made.hardware in hardware.names() else None
    return PlanOptions(
        workload=given["model"],
        device=device,
        ranks=ranks,
        gpu_type=gpu_type,
        nodes=given["nodes"],
        budget_bytes=_budget(tuned, given),
        global_batch=None if made is None else made.global_batch,
        config=given["config"],
    )


def _simulated(tuned: TunedConfig, given: dict[str, Any], progress: Progress) -> tuple[Ablation | None, str]:
    """Record the model and simulate."""
    progress.phase("loading the search")
    from memtune.autotune.search import prepare
    from memtune.autotune.space import ablate
    from memtune.technique import Reason

    options = _target(tuned, given)
    setup = prepare(options, say=progress.phase, for_trials=False)
    progress.phase("simulating the config without each setting")
    assert setup.only is not None
    found = ablate(setup.scorer, setup.only)
    ranks_text = f"{options.ranks} rank{'s' * (options.ranks > 1)}"
    if isinstance(found, Reason):
        return None, f"the config does not fit {given['model']} on {ranks_text}: {found}"
    return found, f"simulated now: {given['model']} on {ranks_text} of {setup.hardware.title}"


def _budget(tuned: TunedConfig, given: dict[str, Any]) -> int | None:
    """Return the requested budget, or else the certified one if it is valid: a config may have been edited by
    hand.
    """
    certified = tuned.certificate.get("budget_bytes")
    asked = _options.memory(given["max_memory"])
    return asked or (certified if isinstance(certified, int) and certified > 0 else None)


def _rows(tuned: TunedConfig) -> Iterator[dict[str, Any]]:
    for each in tuned.settings.techniques:
        yield {
            "slot": each.slot,
            "kind": each.kind,
            "title": each.title,
            "sentence": each.described(),
            "source": each.source,
            "exactness": str(each.exactness),
            "knobs": dict(each.knobs()),
            "description": " ".join((type(each).__doc__ or "").split()),
            "plan": list(each.explain(tuned.plan[each.slot])) if each.slot in tuned.plan else [],
        }


def _document(
    tuned: TunedConfig, rows: list[dict[str, Any]], found: Ablation | None, origin: str, budget: int | None
) -> dict[str, Any]:
    def judged(setting: str) -> dict[str, Any]:
        from memtune.autotune.space import ablation_reason, trade

        row = _of(found, setting)
        if found is None or row is None:
            return {}
        taken = (
            {"unfit": row.unfit}
            if row.taken is None
            else {**asdict(row.taken), **trade(found.all_settings, row.taken)}
        )
        return {
            "reason": ablation_reason(found.all_settings, row, budget),
            "without": {"replacement": row.replacement, **taken},
        }

    execution = [
        each.setting for each in (found.without if found else ()) if each.setting.startswith("execution.")
    ]
    return {
        "schema": SCHEMA,
        "execution": tuned.settings.execution.model_dump(mode="json"),
        "execution_trade": {setting: judged(setting) for setting in execution},
        "settings": [{**row, **judged(row["slot"])} for row in rows],
        "all_settings": None if found is None else asdict(found.all_settings),
        "costs_and_savings": origin,
        "measured": tuned.measured,
        "predicted": tuned.predicted,
        "certificate": tuned.certificate,
        "buckets": [{**each.document(), "sentences": each.settings.sentences()} for each in tuned.buckets],
    }


def _setting_lines(
    tuned: TunedConfig,
    rows: list[dict[str, Any]],
    found: Ablation | None,
    origin: str,
    budget: int | None,
    *,
    verbose: bool,
) -> Iterator[str]:
    yield f"{'execution':<{_INDENT}}{tuned.settings.execution.sentence() or 'as the training script does it'}"
    for each in found.without if found else ():
        if each.setting.startswith("execution."):
            yield from _trade_lines(found, each, budget)
    for row in rows:
        yield f"{row['slot']:<{_INDENT}}{row['sentence']}"
        if verbose:
            knobs = ", ".join(f"{name}={value}" for name, value in row["knobs"].items())
            named = f"{row['kind']}{f' ({knobs})' if knobs else ''}: {row['title']} · {row['exactness']}"
            yield from (f"{'':{_INDENT}}{line}" for line in (named, row["description"], row["source"]))
        yield from _trade_lines(found, _of(found, row["slot"]), budget)
        yield from (f"  {line}" for line in row["plan"] if verbose)
    yield f"{'costs and savings':<{_INDENT}}{origin}"


def _bucket_lines(tuned: TunedConfig) -> Iterator[str]:
    """Yield a line for each length bucket: its inputs' shapes, its techniques and its predicted peak."""
    for each in tuned.buckets:
        shapes = ", ".join("×".join(map(str, shape)) for shape in each.inputs)
        clauses = "; ".join(each.settings.sentences().values()) or "keeps all activations"
        numbers = f" ({_numbers(each.predicted)})" if each.predicted else ""
        yield f"{'up to ' + shapes:<{_INDENT}}{clauses}{numbers}"


def _trade_lines(found: Ablation | None, row: AblatedSetting | None, budget: int | None) -> Iterator[str]:
    from memtune.autotune.space import ablation_reason, trade_text

    if found is None or row is None:
        return
    yield f"{'':{_INDENT}}why: {ablation_reason(found.all_settings, row, budget)}"
    if row.taken is not None:
        yield f"{'':{_INDENT}}instead of {row.replacement} it {trade_text(found.all_settings, row.taken)}"


def _of(found: Ablation | None, setting: str) -> AblatedSetting | None:
    return next((each for each in (found.without if found else ()) if each.setting == setting), None)


def _number_lines(tuned: TunedConfig) -> Iterator[str]:
    from memtune.autotune.predict import time_lines

    for name in ("measured", "predicted", "certificate"):
        part = getattr(tuned, name)
        if part:
            yield f"{name:<20} {_numbers(part)}"
        if name == "predicted":
            yield from (f"  {line}" for line in time_lines(part))
            part = {
                key: value
                for key, value in part.items()
                if key not in ("critical_s", "exposed_by_op", "ablation")
            }
        for group, inner in part.items():
            for key, value in inner.items() if isinstance(inner, dict) else ():
                yield (
                    f"  {f'{group}, {key}':<24}"
                    f" {_numbers(value) if isinstance(value, dict) else _human(key, value)}"
                )


def _over_budget(certificate: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each moment of the certificate whose predicted peak exceeds the budget, although the
    config trains.
    """
    # A certificate may have been edited by hand, so its types are checked.
    budget, moments = certificate.get("budget_bytes"), certificate.get("moments")
    for name, moment in moments.items() if isinstance(moments, dict) else ():
        needs = moment.get("peak_bytes") if isinstance(moment, dict) else None
        if isinstance(budget, int) and isinstance(needs, int) and needs > budget:
            more = format_bytes(needs - budget)
            yield (
                f"{name.replace('_', ' ')} exceeds the budget: {format_bytes(needs)} predicted, {more} too"
                " much"
            )


def _numbers(part: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {_human(key, value)}" for key, value in part.items() if not isinstance(value, dict | list)
    )


def _human(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("_bytes"):
            return format_bytes(value)
        return format_seconds(value) if key.endswith("_s") and "per" not in key else f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
