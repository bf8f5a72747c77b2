"""What the display draws, as rich text of a given width: header, running trials, scatter. Pure functions of the view."""

from __future__ import annotations

from typing import NamedTuple

from rich.text import Text

from memtune.autotune import text
from memtune.autotune.view import Point, SearchView, TrialView
from memtune.units import format_bytes

NARROW = 90
"""Below this many columns the panels take their narrow form."""
DIM, LABEL = "#8a929c", "bold"
_MARKS = {"best": ("★", "bold green"), "guard": ("◆", "cyan"), "trial": ("●", "blue")}


def header(view: SearchView, now_s: float, width: int, stopping: bool = False) -> Text:
    """Title, limits and clock; counts and ETA; best against the guards; how far predictions are off."""
    lines = [*_title(view, now_s, width), Text(""), *_counts(view, now_s, width, stopping)]
    lines += [_best(view, width), *_guards(view, width), _errors(view)]
    return _join(lines, width)


def running(view: SearchView, width: int, rows: int = 4) -> Text:
    """A line for each running trial: device bytes against the budget, stage, settings."""
    trials = view.running
    if not trials:
        return _join([Text(_idle(view), DIM)], width)
    lines = [_running_line(view, trial, width) for trial in trials[:rows]]
    if len(trials) > rows:
        lines.append(Text(f"and {len(trials) - rows} more", DIM))
    return _join(lines, width)


def scatter(view: SearchView, width: int, height: int) -> Text:
    """Throughput over peak memory of the trials that fit; the dotted line is the budget."""
    points = view.points
    if not points or width < 24 or height < 5:
        return _join([Text("throughput over peak memory:", DIM), Text("no trial has fitted yet", DIM)][:height], width)
    label_width = 1 + max(len(text.rate(point.samples_per_s)) for point in points)
    frame = _frame(view, points, width - label_width - 1, height - 3)
    cells = [[(" ", "")] * frame.columns for _ in range(frame.rows)]
    if frame.budget_column is not None:
        for row in cells:
            row[frame.budget_column] = ("┊", "red")
    for point in sorted(points, key=lambda point: _rank(view, point)):
        column, row_index = frame.place(point)
        cells[row_index][column] = _MARKS[_kind(view, point)]
    lines = [Text.assemble(("samples/s", DIM), "  ", *_legend(width - 11))]
    for index, row in enumerate(cells):
        label = text.rate(frame.high_rate if index == 0 else frame.low_rate) if index in (0, frame.rows - 1) else ""
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
    low_bytes = min(peaks) - 0.1 * (high_bytes - min(peaks)) - 1
    # One trial alone, or equal ones, still need a range.
    low_rate, high_rate = (min(rates), max(rates)) if max(rates) > min(rates) else (0.9 * min(rates), 1.1 * max(rates))
    frame = _Frame(columns, rows, low_bytes, high_bytes, low_rate, high_rate, None)
    return frame._replace(budget_column=frame.column(view.budget_bytes)) if view.budget_bytes else frame


def _kind(view: SearchView, point: Point) -> str:
    return "best" if point.number == view.best_number else "guard" if point.role == "guard" else "trial"


def _rank(view: SearchView, point: Point) -> int:
    # What matters is drawn last, over what it shares a cell with.
    return ("trial", "guard", "best").index(_kind(view, point))


def _legend(width: int) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    for kind, word in (("best", "best"), ("guard", "guard"), ("trial", "trial")):
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
    workload, facts = text.title(view)
    limit_s = view.started.time_limit_s if view.started else None
    clock = text.clock(now_s) + (f" / {text.clock(limit_s)}" if limit_s is not None else "")
    name = Text.assemble(("memtune", "bold cyan"), " ", (workload, LABEL))
    if width >= NARROW:
        name.append(f" · {facts}", DIM)
        return [_spread(name, Text(clock, LABEL), width)]
    return [_spread(name, Text(clock, LABEL), width), Text(facts, DIM)]


def _spread(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(1, width - right.cell_len - 1), overflow="ellipsis")
    return left.append(" " * max(1, width - left.cell_len - right.cell_len)).append_text(right)


def _counts(view: SearchView, now_s: float, width: int, stopping: bool) -> list[Text]:
    wanted = view.started.max_trials if view.started else None
    total = f"/{wanted}" if wanted and len(view.done) <= wanted else ""  # repeats and the confirmation come on top
    counts = [
        (f"{len(view.done)}{total} done", "green"),
        (f"{view.count('running')} running", "cyan"),
        (f"{view.n_pruned} pruned", DIM),
        (f"{view.count('oom')} out of memory", "yellow" if view.count("oom") else DIM),
        (f"{view.count('crash', 'timeout', 'unfit')} failed", "red" if view.count("crash", "timeout", "unfit") else DIM),
    ]
    narrow = width < NARROW
    line = Text("" if narrow else "trials   ", LABEL)
    for index, (word, style) in enumerate(counts):
        line.append(" · " if index else "", DIM).append(word.replace("out of memory", "oom") if narrow else word, style)
    eta_s = view.eta_s(now_s)
    state = _state(view, stopping, f"ETA {text.clock(eta_s)}" if eta_s is not None else "")
    if narrow:
        return [line, state] if state.plain else [line]
    return [_spread(line, state, width)]


def _state(view: SearchView, stopping: bool, eta: str) -> Text:
    if view.finished is not None:
        return Text(view.finished.status.replace("_", " "), "bold green" if view.finished.out else "bold red")
    if stopping:
        return Text("stopping, keeping the best", "bold yellow")
    return Text("paused", "bold yellow") if view.paused else Text(eta, LABEL)


def _best(view: SearchView, width: int) -> Text:
    best, changed = view.best, view.best_changed
    line = _label("best")
    if best is None or changed is None:
        return line.append("none has fitted yet", DIM)
    limit = f" of {format_bytes(view.budget_bytes)}" if view.budget_bytes else ""
    line.append(f"#{best.number} ", "green").append(f"{text.rate(changed.samples_per_s)} samples/s", "bold green")
    line.append(_gain(view, width), "green")
    line.append(f" · peak {text.maybe_bytes(changed.peak_bytes)}{limit}" if width >= NARROW else "")
    line.append(f" · {wear}" if width >= NARROW and best.result and (wear := text.wear(best.result)) else "")
    return line.append(f" · {best.label or changed.summary}", DIM)


def _guards(view: SearchView, width: int) -> list[Text]:
    if not view.guards:
        return [_label("guards").append("not measured yet", DIM)]
    parts = []
    for guard in view.guards:
        part = Text(f"{guard.name}: ", DIM).append(text.outcome(guard))
        part.stylize(text.STATUS_COLOR[guard.status], len(guard.name) + 2)
        parts.append(part)
    if width >= NARROW:
        return [_label("guards").append_text(Text(" · ", DIM).join(parts))]
    return [_label("guards" if index == 0 else "").append_text(part) for index, part in enumerate(parts[:3])]


def _gain(view: SearchView, width: int) -> str:
    """How much faster the best is than the fastest guard that fits."""
    rates = [(guard.result.samples_per_s, guard) for guard in view.guards if guard.result and guard.result.samples_per_s]
    if view.best_changed is None or not view.best_changed.samples_per_s or not rates:
        return ""
    guard_rate, guard = max(rates, key=lambda pair: pair[0])
    if guard.number == view.best_number:
        return ""
    gain = text.percent(view.best_changed.samples_per_s / guard_rate - 1, signed=True)
    return f" ({gain} over {guard.name})" if width >= NARROW else f" ({gain})"


def _errors(view: SearchView) -> Text:
    line = Text("model    ", LABEL)
    if view.peak_error is None and view.step_error is None:
        return line.append("uncalibrated", DIM)
    line.append(f"error of peak {text.percent(view.peak_error)} · of step {text.percent(view.step_error)}")
    return line.append(" (median)", DIM)


def _label(word: str) -> Text:
    return Text(f"{word:<9}", LABEL)


def _running_line(view: SearchView, trial: TrialView, width: int) -> Text:
    narrow = width < NARROW
    line = Text(f"#{trial.number:<4}", "bold cyan")
    budget, used = view.budget_bytes, trial.device_bytes
    scale = budget or trial.predicted_peak_bytes
    fraction = used / scale if used is not None and scale else 0.0
    line.append(text.bar(fraction, 10 if narrow else 20), "green" if fraction < 0.9 else "yellow")
    line.append(f" {text.maybe_bytes(used):>8}")
    line.append(f"/{format_bytes(budget)}" if budget and not narrow else "", DIM)
    line.append(f"  {text.clip(trial.stage, 12):<12} ")
    label = f"{trial.label} · " if trial.label else ""
    return line.append(label, "cyan").append(trial.summary, DIM)
