"""One trial, opened: settings, reason, memory by kind, predicted against measured, the end of its log."""

from __future__ import annotations

import io
from typing import Any

from rich.text import Text

from memtune.autotune import text
from memtune.autotune.tui_panels import DIM, LABEL
from memtune.autotune.view import STATUS_TEXT, SearchView, TrialView
from memtune.units import format_bytes, format_seconds

_KIND_COLORS = ("blue", "magenta", "cyan", "green", "yellow", "red")


def details(view: SearchView, trial: TrialView, width: int) -> Text:
    """All that is known of `trial`, as text to scroll through."""
    status = Text.assemble((f"#{trial.number} ", LABEL), (STATUS_TEXT[trial.status], f"bold {text.STATUS_COLOR[trial.status]}"))
    status.append(f" · {trial.label or 'search'}", DIM)
    if trial.status == "running":
        status.append(f" · {trial.stage}", DIM)
    sections = [status]
    if trial.reason:
        sections.append(_section("reason", Text(trial.reason)))
    sections.append(_section("settings", Text(_yaml(trial.settings) or trial.summary or "all left as they are")))
    sections.append(_section("predicted against measured", _comparison(view, trial)))
    if trial.result and trial.result.memory_by_kind:
        sections.append(_section("memory by kind, at the peak of the heaviest rank", _kinds(trial, width)))
    if trial.result and trial.result.losses:
        losses = ", ".join(f"{loss:.4g}" for loss in trial.result.losses)
        sections.append(_section("losses", Text(losses)))
    if trial.result and trial.result.log_tail:
        sections.append(_section("log, last lines", Text(trial.result.log_tail.rstrip(), DIM)))
    return Text("\n\n").join(sections)


def not_run(view: SearchView, width: int) -> Text:
    """The candidates that were pruned, each with its proof."""
    lines = [
        Text(f"{text.plural(view.n_pruned, 'candidate')} cannot fit: the low end of the predicted peak exceeds the limit", DIM)
    ]
    for event in view.pruned.values():
        proof = f"at least {format_bytes(event.peak_low_bytes):>8}, predicted {format_bytes(event.predicted_peak_bytes):>8}"
        line = Text(f"#{event.number:<4} ", LABEL).append(f"{proof}  ").append(event.summary, "cyan")
        line.append(f"  {event.reason}" if event.reason else "", DIM)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return Text("\n").join(lines)


def _section(heading: str, body: Text) -> Text:
    return Text.assemble((f"{heading}\n", "bold cyan"), body)


def _yaml(settings: dict[str, Any]) -> str:
    # Only shown when a trial is opened: the display starts without the YAML library.
    from ruamel.yaml import YAML

    if not settings:
        return ""
    yaml = YAML()
    yaml.default_flow_style = None  # a leaf mapping on one line, as in tuned.yaml
    yaml.width = 200
    stream = io.StringIO()
    yaml.dump(settings, stream)
    return stream.getvalue().rstrip()


def _comparison(view: SearchView, trial: TrialView) -> Text:
    result = trial.result
    rows = [("", "predicted", "measured", "error")]
    peak = result.peak_allocated_bytes if result else None
    rows.append(("peak", text.maybe_bytes(trial.predicted_peak_bytes), text.maybe_bytes(peak), _percent(trial.peak_error)))
    step_s = result.step_s if result else None
    rows.append(("step", text.maybe_seconds(trial.predicted_step_s), text.maybe_seconds(step_s), _percent(trial.step_error)))
    table = Text("\n").join(
        Text(f"{name:<6}{predicted:>12}{measured:>12}{error:>10}", DIM if not name else "")
        for name, predicted, measured, error in rows
    )
    if result is None:
        return table
    facts = [f"{text.rate(result.samples_per_s)} samples/s"] if result.samples_per_s else []
    facts += [f"step ± {format_seconds(result.spread_s)}"] if result.step_s_all else []
    facts += [f"reserved {format_bytes(result.peak_reserved_bytes)}"] if result.peak_reserved_bytes else []
    facts += [f"host {format_bytes(result.host_peak_bytes)}"] if result.host_peak_bytes else []
    facts += [wear] if (wear := text.wear(result)) else []
    facts += [f"limit {format_bytes(view.budget_bytes)}"] if view.budget_bytes else []
    facts += [f"took {format_seconds(result.wall_s)}"] if result.wall_s else []
    return table.append("\n" + " · ".join(facts), DIM)


def _percent(error: float | None) -> str:
    return text.percent(error, signed=True)


def _kinds(trial: TrialView, width: int) -> Text:
    kinds = sorted(trial.result.memory_by_kind.items(), key=lambda item: -item[1]) if trial.result else []
    total = max(1, sum(n_bytes for _, n_bytes in kinds))
    name_width = max(len(name) for name, _ in kinds)
    bar_width = max(8, min(50, width - name_width - 22))
    lines = []
    for index, (name, n_bytes) in enumerate(kinds):
        line = Text(f"{name:<{name_width}}  {format_bytes(n_bytes):>9}  ")
        line.append(text.bar(n_bytes / total, bar_width, empty=" "), _KIND_COLORS[index % len(_KIND_COLORS)])
        lines.append(line.append(f" {text.percent(n_bytes / total)}", DIM))
    return Text("\n").join(lines)
