"""Numbers and trials of a search as short text; shared by the lines, the panels and the details."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from memtune.autotune.ui.view import STATUS_TEXT, SearchView, TrialView
from memtune.config import UNCHANGED
from memtune.executors import TrialResult
from memtune.search_spaces import SLOTS, kinds
from memtune.search_spaces.execution import Execution
from memtune.units import format_bytes, format_rate, format_seconds, parse_bytes

STATUS_COLOR = {
    "running": "cyan",
    "ok": "green",
    "oom": "yellow",
    "timeout": "red",
    "crash": "red",
    "unfit": "magenta",
    "cancelled": "bright_black",
}
_BYTES = re.compile(r"\d+(?:\.\d+)? (?:[KMGT]i)?B\b")
_NUMBER = re.compile(r"\d[\d.,]*")
_COLUMNS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def rate(samples_per_s: float | None) -> str:
    """Format samples per second with three significant digits: `18.9`, `1,240`, `2.00`; a dash if unknown."""
    return "–" if samples_per_s is None else format_rate(samples_per_s)


def maybe_bytes(n_bytes: int | None) -> str:
    """Format bytes; a dash if unknown."""
    return "–" if n_bytes is None else format_bytes(n_bytes)


def maybe_seconds(seconds: float | None) -> str:
    """Format seconds; a dash if unknown."""
    return "–" if seconds is None else format_seconds(seconds)


def percent(fraction: float | None, signed: bool = False) -> str:
    """Format `3.1 %`, or `+3.1 %` when `signed`; a dash if unknown."""
    if fraction is None:
        return "–"
    digits = 0 if abs(fraction) >= 0.0995 else 1
    return f"{100 * fraction:{'+' if signed else ''}z.{digits}f} %"


def clock(seconds: float) -> str:
    """Format seconds as `0:41` or `1:02:09`, of a constant width while the hours do not change."""
    hours, rest = divmod(int(max(0.0, seconds)), 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def clip(text: str, width: int) -> str:
    """Return the first line of `text`, with an ellipsis if it is longer than `width`."""
    first = text.splitlines()[0] if text else ""
    return first if len(first) <= width else first[: max(0, width - 1)] + "…"


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Return `text` as lines of at most `width` unless a word is longer, indented from the second on."""
    blanks = " " * indent
    lines = textwrap.wrap(
        text, width, subsequent_indent=blanks, break_long_words=False, break_on_hyphens=False
    )
    return lines or [""]


def bar(fraction: float, width: int, empty: str = "░") -> str:
    """Return a bar of `width` cells in eighths of a cell; fractions above 1 fill it."""
    cells = min(1.0, max(0.0, fraction)) * width
    full = int(cells)
    part = _EIGHTHS[int((cells - full) * 8)] if full < width else ""
    done = "█" * full + part.strip()
    return done + empty * (width - len(done))


def sparkline(values: Sequence[float], width: int, top: float) -> str:
    """Return the last `width` values as columns from zero to `top`."""
    return "".join(
        _COLUMNS[min(round(max(0.0, value) / top * (len(_COLUMNS) - 1)), len(_COLUMNS) - 1)] if top else " "
        for value in values[-width:]
    )


def plural(count: int, noun: str) -> str:
    """Return `1 trial`, `2 trials`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def outcome(trial: TrialView) -> str:
    """Return the outcome of a trial, in a word or a number."""
    if trial.status == "ok" and trial.result is not None:
        return f"{rate(trial.result.samples_per_s)} samples/s"
    return trial.stage if trial.status == "running" else STATUS_TEXT[trial.status]


def baseline_outcome(view: SearchView, baseline: TrialView) -> str:
    """Return the outcome of a baseline; at the end the rate of all its runs, which gains are of."""
    found = view.baseline_rate(baseline)
    return outcome(baseline) if found is None else f"{rate(found)} samples/s"


def with_batches(sentence: str, micro_batch: int | None, accumulate: int) -> str:
    """Return the clauses of a setting after that of its micro-batches, if these are known."""
    batches = Execution(micro_batch=micro_batch, accumulate=accumulate).sentence()
    return "; ".join(each for each in (batches, sentence) if each and each != UNCHANGED) or UNCHANGED


def differing(sentence: str, own: Collection[str]) -> str:
    """Return the clauses of a setting that are not the user's `own`; all of them if no others are left."""
    clauses = [each for each in sentence.split("; ") if each not in own]
    return "; ".join(clauses) or sentence


def short_path(path: str) -> str:
    """Return a path relative to the working directory if it is inside it."""
    with contextlib.suppress(ValueError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


def title(view: SearchView) -> tuple[str, str]:
    """Return the workload, and the target and goal of its search."""
    started = view.started
    if started is None:
        model, _, rest = view.heading.partition(" · ")
        return model or "search", rest or "waiting for it to start"
    device = (
        f"{started.ranks} × {started.hardware or started.device}"
        if started.ranks > 1
        else started.hardware or started.device
    )
    facts = [device, f"goal {started.goal}"]
    facts += [f"limit {format_bytes(started.budget_bytes)}"] if started.budget_bytes is not None else []
    return started.workload, " · ".join(facts)


def wear(result: TrialResult) -> str:
    """Return the SSD writes per step of the rank that wrote most; '' without any."""
    written = result.link_bytes.get("ssd_write", 0)
    return f"{format_bytes(written)} a step to SSD" if written else ""


def grouped(refused: Mapping[str, int]) -> dict[str, int]:
    """Return the number of refusals by reason; texts that differ in names and numbers are one group."""
    names = {kind for slot in SLOTS for kind in kinds(slot)}
    groups: dict[str, list[str]] = {}
    for reason in refused:
        text = reason.split(" (")[0].split(": any needs")[0].split(" · ")[0]
        key = " ".join("*" if word.strip(",:;") in names else word for word in text.split())
        groups.setdefault(_NUMBER.sub("#", _BYTES.sub("#", key)), []).append(reason)
    return {_text(reasons): sum(map(refused.__getitem__, reasons)) for reasons in groups.values()}


def _text(reasons: Sequence[str]) -> str:
    """Return one text for a group: that of the smallest need, so that the nearest remedy is seen."""
    least = min(reasons, key=lambda reason: [parse_bytes(size) for size in _BYTES.findall(reason)])
    return least.split(" (")[0] + (f" · {len(reasons)} alike" if len(reasons) > 1 else "")
