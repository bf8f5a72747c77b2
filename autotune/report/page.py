"""The report of a study: one HTML page without script and network, for screen, print and screen readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from memtune import __version__
from memtune.autotune.report import pictures
from memtune.autotune.report.pictures import Ran
from memtune.autotune.report.study_data import StudyData, read_study
from memtune.autotune.report.svg import Picture
from memtune.autotune.ui import SearchView
from memtune.config import load_config, save_text
from memtune.units import format_bytes, format_rate, format_seconds

Cells = Sequence[str]
_ENDS = {
    "stopped": "was stopped",
    "interrupted": "was interrupted",
    "nothing_fits": "found nothing that fits",
    "failed": "failed",
}
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 50rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.lead { font-size: 1.2rem; } .warning { border-left: .3rem solid #d55e00; padding-left: .8rem; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; color: #555; }
dt { font-weight: bold; } dd { margin: 0 0 .5rem 1.2rem; }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } section, figure { break-inside: avoid; }
  a { color: inherit; } svg, .warning { print-color-adjust: exact; } }
"""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
"""


def write_report(log: Path, out: Path) -> Path:
    """Write the report of the study with the event log `log`, and return its path.

    Raises:
        EnvironmentFault: The log holds no search, or a file of the study is damaged.
    """
    return save_text(out, page(read_study(log)))


def page(study: StudyData) -> str:
    """Return the report as HTML; all text of the study is escaped."""
    view = study.view
    assert view.started is not None
    title = f"{view.started.workload} – memtune report"
    parts = [
        _HEAD.format(title=escape(title), style=_STYLE),
        *_opening(study),
        *_settings(view),
        *_front(view),
        *_timelines(study),
        *_agreement(view),
        *_trials(view),
        *_not_run(view),
        f"<footer><p>memtune {escape(__version__)}, study {escape(study.name)}. Simulated numbers are"
        " predictions; all others were measured on the machine named above.</p></footer>",
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _opening(study: StudyData) -> Iterable[str]:
    view = study.view
    started, finished = view.started, view.finished
    assert started is not None
    yield f"<h1>{escape(started.workload)}</h1>"
    if finished is None or finished.status != "done":
        state = "is still running, or was killed" if finished is None else _ENDS[finished.status]
        more = f": {finished.message}" if finished and finished.message else ""
        yield (f'<p class="warning">This search {escape(state)}{escape(more)}. Done: {view.trials_done}.</p>')
    elif finished.message:
        yield f'<p class="lead">{escape(finished.message)}</p>'
    best = view.best.result if view.best is not None else None
    facts = []
    if best is not None and view.best_rate:
        peak = f", peak {format_bytes(best.peak_allocated_bytes)}" if best.peak_allocated_bytes else ""
        facts = [("measured", f"{format_rate(view.best_rate)} samples/s{peak}")]
    where = f"{started.ranks} × {started.hardware or started.device}"
    facts += [
        ("machine", where),
        ("goal", started.goal),
        ("limit", f"{format_bytes(started.budget_bytes)} per rank" if started.budget_bytes else "none"),
        ("parameters", f"{started.n_parameters:,}" if started.n_parameters else "unknown"),
        ("samples per step", str(started.global_batch or "unknown")),
        ("date", datetime.fromtimestamp(started.t).strftime("%Y-%m-%d %H:%M") if started.t else "unknown"),
    ]
    yield _table(("", ""), facts)


def _settings(view: SearchView) -> Iterable[str]:
    best, finished = view.best, view.finished
    if best is None:
        return
    yield f"<section><h2>The chosen setting</h2><p><code>{escape(best.summary)}</code></p><dl>"
    for slot, sentence in load_config({"memtune": 1, "settings": best.settings}).settings.sentences().items():
        yield f"<dt>{escape(slot)}</dt><dd>{escape(sentence)}</dd>"
    yield "</dl>"
    if finished is not None and finished.out is not None:
        out = Path(finished.out).name
        ranks = view.started.ranks if view.started is not None else 1
        launcher = f"torchrun --nproc-per-node={ranks}" if ranks > 1 else "python"
        use = f"memtune run {out} -- {launcher} train.py\n\n# in train.py\n" + view.apply_call(out)
        yield f"<p>To use it:</p><pre><code>{escape(use)}</code></pre>"
    yield "</section>"


def _front(view: SearchView) -> Iterable[str]:
    points = pictures.settings_of(
        (
            Ran(each.number, each.role, each.summary, each.result.peak_allocated_bytes, each.result.step_s)
            for each in view.done
            if each.status == "ok" and each.result is not None
        ),
        view.best_number,
    )
    rows = [
        (each.label, format_seconds(each.step_s), format_bytes(each.peak_bytes), each.text) for each in points
    ]
    yield _figure(
        pictures.front(points, view.budget_bytes),
        "Each mark is a setting with the number of its first trial, at the median of all its trials.",
        _table(("trial", "step", "peak", "settings"), rows),
    )


def _timelines(study: StudyData) -> Iterable[str]:
    drawn, limit = study.timelines, study.view.budget_bytes
    runs = {name: each.device.model_dump() for name, each in drawn.timelines.items()}
    names = ". ".join(f"{name}: {text}" for name, text in drawn.summaries.items())
    note = f"One micro-batch and the optimizer update. {names}"
    kinds = [
        (name, kind, format_bytes(max(values)))
        for name, run in drawn.timelines.items()
        for kind, values in run.device.bytes_by_kind.items()
        if any(values)
    ]
    yield _figure(pictures.memory(runs, limit), note, _table(("setting", "kind", "at most"), kinds))
    busy = [
        (name, stream, format_seconds(sum(stop - start for _, start, stop in spans)))
        for name, run in drawn.timelines.items()
        for stream, spans in run.streams.items()
    ]
    yield _figure(
        pictures.streams({name: each.streams for name, each in drawn.timelines.items()}),
        note,
        _table(("setting", "resource", "busy"), busy),
    )
    rows = [
        (
            each.setting,
            format_seconds(each.step_s) if each.step_s is not None else f"not alone: {each.unfit}",
            format_bytes(each.peak_bytes) if each.peak_bytes is not None else "",
        )
        for each in drawn.waterfall
    ]
    yield _figure(
        pictures.waterfall([each.model_dump() for each in drawn.waterfall], limit),
        "Each row adds one setting to those above it. A combination that cannot be used alone has no bar.",
        _table(("setting", "step", "peak"), rows),
    )


def _agreement(view: SearchView) -> Iterable[str]:
    trials = [
        {
            "number": each.number,
            "predicted_peak_bytes": each.predicted_peak_bytes,
            "peak_bytes": each.result.peak_allocated_bytes,
            "predicted_step_s": each.predicted_step_s,
            "step_s": each.result.step_s,
        }
        for each in view.done
        if each.status == "ok" and each.result is not None
    ]
    yield _figure(
        pictures.agreement(trials),
        "On the dashed line both are equal. Each prediction was made before its trial.",
        "",
    )


def _trials(view: SearchView) -> Iterable[str]:
    rows = []
    for each in view.done:
        result = each.result
        ok = result is not None and each.status == "ok"
        rows.append(
            (
                str(each.number),
                each.label or "search",
                each.status if ok else f"{each.status}: {each.reason}",
                format_seconds(result.step_s) if ok and result and result.step_s else "",
                format_bytes(result.peak_allocated_bytes)
                if ok and result and result.peak_allocated_bytes
                else "",
                each.micro_batches,
                each.sentence or each.summary,
            )
        )
    head = ("trial", "role", "result", "step", "peak", "batch", "setting")
    yield f"<section><h2>All trials</h2>{_table(head, rows)}</section>"


def _not_run(view: SearchView) -> Iterable[str]:
    scored = view.scored
    if scored is None:
        return
    yield (
        f"<section><h2>Not run</h2><p>Of {scored.n_candidates:,} candidates {scored.n_pruned:,} cannot fit,"
        f" {scored.n_merged:,} equal another and {scored.n_unfit:,} cannot be used."
    )
    if scored.not_used:
        yield "Techniques in none of them:</p>"
        yield _table(("technique", "reason"), list(scored.not_used.items())) + "</section>"
    else:
        yield "</p></section>"


def _figure(picture: Picture, caption: str, table: str) -> str:
    details = f"<details><summary>The numbers</summary>{table}</details>" if table else ""
    return (
        f"<section><h2>{escape(picture.title)}</h2><figure>{picture.svg}"
        f"<figcaption>{escape(caption)}</figcaption></figure>{details}</section>"
    )


def _table(head: Cells, rows: Iterable[Cells]) -> str:
    titles = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    named = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escape(cell)}</th>' if i == 0 and not any(head) else _cell(cell, any(head))
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table>{named}<tbody>{body}</tbody></table>"


def _cell(text: str, in_columns: bool) -> str:
    kind = ' class="number"' if in_columns and text[:1].isdigit() and len(text) < 14 else ""
    return f"<td{kind}>{escape(text)}</td>"
