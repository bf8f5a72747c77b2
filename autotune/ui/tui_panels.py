"""Panels of the display as rich text of a given width: header, running trials, scatter, details.

Pure functions of the view.
"""

from __future__ import annotations

import io
import shlex
from typing import Any, NamedTuple

from rich.text import Text

from memtune.autotune.search import TrialPruned
from memtune.autotune.ui import formatting
from memtune.autotune.ui.view import STATUS_TEXT, Point, SearchView, TrialView
from memtune.config import flow
from memtune.executors import TrialResult
from memtune.units import format_bytes, format_seconds

NARROW = 90
_SPARKS = 16
"""Below this many columns the panels use their narrow form."""
DIM, LABEL = "#8a929c", "bold"
_MARKS = {"best": ("★", "bold green"), "baseline": ("◆", "cyan"), "trial": ("●", "blue")}


def header(view: SearchView, now_s: float, width: int, stopping: bool = False) -> Text:
    """Return title, limits and clock; counts and ETA; best against the baselines; errors of predictions."""
    lines = [*_title(view, now_s, width), Text(""), *_counts(view, now_s, width, stopping)]
    lines += [_best(view, width), *_baselines(view, width), _errors(view)]
    return _join(lines, width)


def running(view: SearchView, width: int, rows: int = 4, phase: str = "") -> Text:
    """Return a line for each running trial, or without one the `phase` of the search."""
    trials = view.running
    if not trials:
        return _join([Text("paused, p resumes" if view.paused else phase or _idle(view), DIM)], width)
    lines = [_running_line(view, trial, width) for trial in trials[:rows]]
    if len(trials) > rows:
        lines.append(Text(f"and {len(trials) - rows} more", DIM))
    return _join(lines, width)


def selected(view: SearchView, trial: TrialView | None, width: int) -> Text:
    """Return why the trial under the cursor failed, and its whole setting, on at most two lines."""
    if trial is None:
        return Text("")
    head = f"#{trial.number}  "
    reason = f"{trial.reason} – " if trial.reason else ""
    first, *more = formatting.wrapped(f"{head}{reason}{view.setting(trial)}", width, len(head))
    rest = " " * len(head) + " ".join(line.strip() for line in more)
    return Text.assemble((head, LABEL), first[len(head) :], "\n", formatting.clip(rest, width))


def scatter(view: SearchView, width: int, height: int) -> Text:
    """Return throughput over peak memory of the settings that fit; the dotted line is the budget."""
    points = view.points
    if not points or width < 24 or height < 5:
        return _join(
            [Text("throughput over peak memory:", DIM), Text("no trial has fitted yet", DIM)][:height], width
        )
    label_width = 1 + max(len(formatting.rate(point.samples_per_s)) for point in points)
    frame = _frame(view, points, width - label_width - 1, height - 3)
    cells = [[(" ", "")] * frame.columns for _ in range(frame.rows)]
    if frame.budget_column is not None:
        for row in cells:
            row[frame.budget_column] = ("┊", "red")
    _draw_front(frame, points, cells)
    for point in sorted(points, key=lambda point: _rank(view, point)):
        column, row_index = frame.place(point)
        mark, style = _MARKS[_kind(view, point)]
        number = str(point.number)
        first = max(0, min(column + 1, frame.columns - len(number)))
        for offset, digit in enumerate(number):
            cells[row_index][first + offset] = (digit, DIM)
        cells[row_index][column] = (mark, style)
    lines = [Text.assemble(("samples/s", DIM), "  ", *_legend(width - 11))]
    for index, row in enumerate(cells):
        label = (
            formatting.rate(frame.high_rate if index == 0 else frame.low_rate)
            if index in (0, frame.rows - 1)
            else ""
        )
        line = Text(f"{label:>{label_width - 1}} ", DIM).append("│", DIM)
        for mark, style in row:
            line.append(mark, style)
        lines.append(line)
    lines.append(Text(" " * label_width + "└" + "─" * frame.columns, DIM))
    lines.append(_x_labels(frame, label_width))
    return _join(lines, width)


def _idle(view: SearchView) -> str:
    if view.paused:
        return "paused, p resumes"
    if view.abandoned and view.finished is None:
        return "the process of the search is gone: the same command with --resume goes on"
    if view.finished is not None or view.trials:
        return "no trial running"
    return "recording the training step" if view.recorded is None else "scoring the candidates"


class _Frame(NamedTuple):
    """The data range of the scatter and the cells it maps to."""

    columns: int
    rows: int
    low_bytes: float
    high_bytes: float
    low_rate: float
    high_rate: float
    budget_column: int | None

    def column(self, n_bytes: float) -> int:
        return round((n_bytes - self.low_bytes) / (self.high_bytes - self.low_bytes) * (self.columns - 1))

    def place(self, point: Point) -> tuple[int, int]:
        down = (self.high_rate - point.samples_per_s) / (self.high_rate - self.low_rate)
        return self.column(point.peak_bytes), round(down * (self.rows - 1))


def _frame(view: SearchView, points: list[Point], columns: int, rows: int) -> _Frame:
    peaks, rates = [point.peak_bytes for point in points], [point.samples_per_s for point in points]
    high_bytes = max([*peaks, view.budget_bytes or 0])
    frame = _Frame(columns, rows, 0.0, high_bytes, 0.0, max(rates), None)  # both axes start at zero
    return frame._replace(budget_column=frame.column(view.budget_bytes)) if view.budget_bytes else frame


def _draw_front(frame: _Frame, points: list[Point], cells: list[list[tuple[str, str]]]) -> None:
    """Draw the settings that no other beats in both rate and peak, as steps."""
    best = 0.0
    front = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, -point.samples_per_s)):
        if point.samples_per_s > best:
            best = point.samples_per_s
            front.append(frame.place(point))
    for (column, row), (until, _) in zip(front, [*front[1:], (frame.columns, 0)], strict=True):
        for each in range(column, until):
            if cells[row][each][0] == " ":
                cells[row][each] = ("·", DIM)


def _kind(view: SearchView, point: Point) -> str:
    return "best" if point.number == view.best_number else "baseline" if point.role == "baseline" else "trial"


def _rank(view: SearchView, point: Point) -> int:
    # The most important point of a cell is drawn last, over the others.
    return ("trial", "baseline", "best").index(_kind(view, point))


def _legend(width: int) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    for kind, word in (("best", "best"), ("baseline", "baseline"), ("trial", "trial")):
        if (width := width - len(word) - 3) < -1:
            break
        mark, style = _MARKS[kind]
        parts += [(f"{mark} ", style), (f"{word} ", DIM)]
    return parts


def _x_labels(frame: _Frame, label_width: int) -> Text:
    low, high = format_bytes(frame.low_bytes), format_bytes(frame.high_bytes)
    room = frame.columns - len(low) - len(high)
    middle = "peak" if room >= 8 else ""
    return Text(" " * (label_width + 1) + low + middle.center(max(1, room)) + high, DIM)


def _join(lines: list[Text], width: int) -> Text:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    joined = Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
    joined.no_wrap = True
    return joined


def _title(view: SearchView, now_s: float, width: int) -> list[Text]:
    workload, facts = formatting.title(view)
    limit_s = view.started.time_limit_s if view.started else None
    clock = formatting.clock(now_s) + (f" / {formatting.clock(limit_s)}" if limit_s is not None else "")
    name = Text.assemble(("memtune", "bold cyan"), " ", (workload, LABEL))
    if width >= NARROW:
        name.append(f" · {facts}", DIM)
        return [_spread(name, Text(clock, LABEL), width)]
    return [_spread(name, Text(clock, LABEL), width), Text(facts, DIM)]


def _spread(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(1, width - right.cell_len - 1), overflow="ellipsis")
    return left.append(" " * max(1, width - left.cell_len - right.cell_len)).append_text(right)


def _counts(view: SearchView, now_s: float, width: int, stopping: bool) -> list[Text]:
    narrow, wanted = width < NARROW, view.started.max_trials if view.started else None
    repeats = len(view.done) - view.n_counted
    counts = [
        (f"{view.n_counted}{f'/{wanted}' if wanted else ''} done", "green"),
        *([(formatting.plural(repeats, "repeat"), "green")] if repeats else []),
        (f"{view.count('running')} running", "cyan"),
        (f"{view.n_pruned} pruned", DIM),
        (f"{view.count('oom')} out of memory", "yellow" if view.count("oom") else DIM),
        (
            f"{view.count('crash', 'timeout', 'unfit')} failed",
            "red" if view.count("crash", "timeout", "unfit") else DIM,
        ),
    ]
    line = Text("" if narrow else "trials   ", LABEL)
    for index, (word, style) in enumerate(counts):
        line.append(" · " if index else "", DIM).append(
            word.replace("out of memory", "oom") if narrow else word, style
        )
    eta_s = view.eta_s(now_s)
    state = _state(view, stopping, f"ETA {formatting.clock(eta_s)}" if eta_s is not None else "")
    if narrow:
        return [line, state] if state.plain else [line]
    return [_spread(line, state, width)]


def _state(view: SearchView, stopping: bool, eta: str) -> Text:
    if view.finished is not None:
        return Text(view.finished.status.replace("_", " "), "bold green" if view.finished.out else "bold red")
    if view.abandoned:
        return Text("ended without a result", "bold red")
    if stopping:
        return Text("stopping, keeping the best", "bold yellow")
    return Text("paused", "bold yellow") if view.paused else Text(eta, LABEL)


def _best(view: SearchView, width: int) -> Text:
    best, changed = view.best, view.best_changed
    line = _label("best")
    if best is None or changed is None:
        return line.append("none has fitted yet", DIM)
    limit = f" of {format_bytes(view.budget_bytes)}" if view.budget_bytes else ""
    line.append(f"#{best.number} ", "green").append(
        f"{formatting.rate(view.best_rate)} samples/s", "bold green"
    )
    line.append(_gain(view, width), "green")
    line.append(f" · peak {formatting.maybe_bytes(changed.peak_bytes)}{limit}" if width >= NARROW else "")
    line.append(
        f" · {wear}" if width >= NARROW and best.result and (wear := formatting.wear(best.result)) else ""
    )
    return line.append(f" · {best.label or view.setting(best)}", DIM)


def _baselines(view: SearchView, width: int) -> list[Text]:
    if not view.baselines:
        measured = "not measured yet" if view.finished is None else "none was measured"
        return [_label("baseline").append(measured, DIM)]
    parts = []
    for baseline in view.baselines:
        part = Text(f"{baseline.name}: ", DIM).append(formatting.baseline_outcome(view, baseline))
        part.stylize(formatting.STATUS_COLOR[baseline.status], len(baseline.name) + 2)
        parts.append(part)
    if width >= NARROW:
        return [_label("baseline").append_text(Text(" · ", DIM).join(parts))]
    return [
        _label("baseline" if index == 0 else "").append_text(part) for index, part in enumerate(parts[:3])
    ]


def _gain(view: SearchView, width: int) -> str:
    """Return the speed-up of the best over the fastest baseline that fits."""
    rates = [
        (rate, baseline) for baseline in view.baselines if (rate := view.baseline_rate(baseline)) is not None
    ]
    if not view.best_rate or not rates:
        return ""
    baseline_rate, baseline = max(rates, key=lambda pair: pair[0])
    if view.best is not None and baseline.summary == view.best.summary:
        return ""
    faster = view.best_rate / baseline_rate - 1
    if abs(faster) <= view.noise(view.best_number) + view.noise(baseline.number):
        return ""  # repeats of one setting differ by more
    gain = formatting.percent(faster, signed=True)
    return f" ({gain} over {baseline.name})" if width >= NARROW else f" ({gain})"


def _errors(view: SearchView) -> Text:
    line = _label("errors")
    if view.peak_error is None and view.step_error is None:
        return line.append("of predictions not known yet", DIM)
    line.append(
        f"of predicted peaks {formatting.percent(view.peak_error)}, of step times"
        f" {formatting.percent(view.step_error)}"
    )
    return line.append(" (median)", DIM)


def _label(word: str) -> Text:
    return Text(f"{word:<9}", LABEL)


def _running_line(view: SearchView, trial: TrialView, width: int) -> Text:
    narrow = width < NARROW
    line = Text(f"#{trial.number:<4}", "bold cyan")
    budget, used = view.budget_bytes, trial.device_bytes
    scale = budget or trial.predicted_peak_bytes
    fraction = used / scale if used is not None and scale else 0.0
    line.append(formatting.bar(fraction, 10 if narrow else 20), "green" if fraction < 0.9 else "yellow")
    if not narrow and scale:
        line.append(f" {formatting.sparkline(trial.bytes_seen, _SPARKS, scale):<{_SPARKS}}", "cyan")
    line.append(f" {formatting.maybe_bytes(used):>8}")
    line.append(f"/{format_bytes(budget)}" if budget and not narrow else "", DIM)
    line.append(f"  {formatting.clip(trial.stage, 12):<12} ")
    label = f"{trial.label} · " if trial.label else ""
    return line.append(label, "cyan").append(view.setting(trial), DIM)


# One trial, opened: settings, reason, memory by kind, predicted against measured, the end of its log.
_KIND_COLORS = ("blue", "magenta", "cyan", "green", "yellow", "red")


def details(view: SearchView, trial: TrialView, width: int) -> Text:
    """Return all data of `trial`, as text to scroll through."""
    status = Text.assemble(
        (f"#{trial.number} ", LABEL),
        (STATUS_TEXT[trial.status], f"bold {formatting.STATUS_COLOR[trial.status]}"),
    )
    status.append(f" · {trial.label or 'search'}", DIM)
    if trial.status == "running":
        status.append(f" · {trial.stage}", DIM)
    sections = [status]
    if trial.reason:
        sections.append(_section("reason", Text(trial.reason)))
    sections.append(_section("setting", Text(trial.sentence.replace("; ", "\n"))))
    sections.append(
        _section("as in tuned.yaml", Text(_yaml(trial.settings) or trial.summary or "all left as they are"))
    )
    sections.append(_section("predicted against measured", _comparison(view, trial)))
    if trial.result and trial.result.memory_by_kind:
        sections.append(_section("memory by kind, at the peak of the heaviest rank", _kinds(trial, width)))
    if trial.result and (links := _links(trial.result)):
        sections.append(_section("moved in each step, by the rank that moved most", Text("\n".join(links))))
    if trial.result and trial.result.losses:
        losses = ", ".join(f"{loss:.4g}" for loss in trial.result.losses)
        sections.append(_section("losses", Text(losses)))
    if trial.result and trial.result.log_tail:
        sections.append(_section("log, last lines", Text(trial.result.log_tail.rstrip(), DIM)))
    return Text("\n\n").join(sections)


def not_run(view: SearchView, width: int) -> Text:
    """Return the candidates that were not run, in groups of one reason with their numbers."""
    scored = view.scored
    refused = formatting.grouped(scored.refused) if scored else {}
    groups = [
        (
            f"{formatting.plural(view.n_pruned, 'candidate')} cannot fit: the low end of the predicted peak"
            " exceeds the limit",
            [(1, _proof(each)) for each in view.pruned],
        ),
        (
            f"{formatting.plural(scored.n_unfit if scored else 0, 'candidate')} refused",
            sorted(((count, reason) for reason, count in refused.items()), reverse=True),
        ),
        (
            f"{formatting.plural(len(scored.not_used) if scored else 0, 'technique')} in no candidate",
            _not_used(scored.not_used) if scored else [],
        ),
    ]
    lines = []
    for heading, rows in groups:
        lines.append(Text(heading, "bold cyan"))
        for count, reason in rows:
            number = f"  {count:>6,}  "
            whole = "\n".join(formatting.wrapped(number + reason, width, len(number)))
            lines.append(Text.assemble((number, DIM), whole[len(number) :]))
        lines.append(Text(""))
    return Text("\n").join(lines)


def _proof(event: TrialPruned) -> str:
    return (
        f"at least {format_bytes(event.peak_low_bytes)}, predicted"
        f" {format_bytes(event.predicted_peak_bytes)}: {event.summary}"
    )


def _not_used(reasons: dict[str, str]) -> list[tuple[int, str]]:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [(len(each), f"{', '.join(each)}: {reason}") for reason, each in names.items()]


def comparison(trials: list[TrialView], width: int) -> Text:
    """Return two trials next to each other: clauses that differ, and their measurements."""
    one, two = trials
    own, other = one.sentence.split("; "), two.sentence.split("; ")
    lines = [Text("both: " + ("; ".join(each for each in own if each in other) or "–"), DIM), Text("")]
    for trial, clauses, against in ((one, own, other), (two, other, own)):
        only = "; ".join(each for each in clauses if each not in against) or "–"
        lines.append(Text(f"#{trial.number:<4}", LABEL).append(only))
    column = max(12, min(24, (width - 12) // 2))
    rows = [("", f"#{one.number}", f"#{two.number}"), *_compared(one, two)]
    lines += [Text(""), *(Text(f"{name:<12}{a:>{column}}{b:>{column}}") for name, a, b in rows)]
    return Text("\n").join(lines)


def command_of(trial: TrialView, model: str) -> str:
    """Return shell commands that run a trial's settings once."""
    name = f"trial-{trial.number}.yaml"
    config = f"settings: {flow(trial.settings)}"
    return f"echo {shlex.quote(config)} > {name} && memtune trial {shlex.quote(model)} --config {name}"


def _compared(one: TrialView, two: TrialView) -> list[tuple[str, str, str]]:
    def of(trial: TrialView) -> tuple[str, ...]:
        result = trial.result
        return (
            STATUS_TEXT[trial.status],
            trial.micro_batches,
            formatting.rate(result.samples_per_s if result else None),
            formatting.maybe_seconds(result.step_s if result else None),
            formatting.maybe_seconds(trial.predicted_step_s),
            formatting.maybe_bytes(result.peak_allocated_bytes if result else None),
            formatting.maybe_bytes(trial.predicted_peak_bytes),
            formatting.maybe_bytes(result.host_peak_bytes if result else None),
        )

    names = ("result", "batch", "samples/s", "step", "  predicted", "peak", "  predicted", "host")
    return list(zip(names, of(one), of(two), strict=True))


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
    rows.append(
        (
            "peak",
            formatting.maybe_bytes(trial.predicted_peak_bytes),
            formatting.maybe_bytes(peak),
            _percent(trial.peak_error),
        )
    )
    step_s = result.step_s if result else None
    rows.append(
        (
            "step",
            formatting.maybe_seconds(trial.predicted_step_s),
            formatting.maybe_seconds(step_s),
            _percent(trial.step_error),
        )
    )
    table = Text("\n").join(
        Text(f"{name:<6}{predicted:>12}{measured:>12}{error:>10}", DIM if not name else "")
        for name, predicted, measured, error in rows
    )
    if result is None:
        return table
    facts = [f"{formatting.rate(result.samples_per_s)} samples/s"] if result.samples_per_s else []
    facts += [f"step ± {format_seconds(result.spread_s)}"] if result.step_s_all else []
    facts += [f"reserved {format_bytes(result.peak_reserved_bytes)}"] if result.peak_reserved_bytes else []
    facts += [f"host {format_bytes(result.host_peak_bytes)}"] if result.host_peak_bytes else []
    facts += [wear] if (wear := formatting.wear(result)) else []
    facts += [f"limit {format_bytes(view.budget_bytes)}"] if view.budget_bytes else []
    facts += [f"took {format_seconds(result.wall_s)}"] if result.wall_s else []
    return table.append("\n" + " · ".join(facts), DIM)


def _links(result: TrialResult) -> list[str]:
    """Return the bytes of a step on each link, and their mean rate over the step."""
    return [
        f"{link.replace('_', ' '):<16} {format_bytes(n_bytes):>9}"
        + (f"  {format_bytes(round(n_bytes / result.step_s)):>9}/s" if result.step_s else "")
        for link, n_bytes in sorted(result.link_bytes.items())
        if n_bytes
    ]


def _percent(error: float | None) -> str:
    return formatting.percent(error, signed=True)


def _kinds(trial: TrialView, width: int) -> Text:
    kinds = sorted(trial.result.memory_by_kind.items(), key=lambda item: -item[1]) if trial.result else []
    total = max(1, sum(n_bytes for _, n_bytes in kinds))
    name_width = max(len(name) for name, _ in kinds)
    bar_width = max(8, min(50, width - name_width - 22))
    lines = []
    for index, (name, n_bytes) in enumerate(kinds):
        line = Text(f"{name:<{name_width}}  {format_bytes(n_bytes):>9}  ")
        line.append(
            formatting.bar(n_bytes / total, bar_width, empty=" "), _KIND_COLORS[index % len(_KIND_COLORS)]
        )
        lines.append(line.append(f" {formatting.percent(n_bytes / total)}", DIM))
    return Text("\n").join(lines)
