"""The pictures of a report: front, memory over time, streams, waterfall, predicted against measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memtune.autotune.report.svg import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Canvas,
    Picture,
    Scale,
)
from memtune.units import format_bytes, format_seconds

WIDTH = 760
Status = Literal["trial", "baseline", "best", "failed"]
_LOOK: dict[Status, tuple[str, str, str]] = {
    "trial": ("circle", BLUE, "setting"),
    "baseline": ("square", ORANGE, "baseline"),
    "best": ("star", GREEN, "chosen"),
    "failed": ("cross", RED, "did not fit"),
}
_KIND_COLORS = {
    "weights": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": RED,
    "temporaries": SKY,
    "communication": PURPLE,
    "workspace": YELLOW,
    "buffers": GREY,
    "batch": "#333333",
}
_PHASE_COLORS = {
    "prologue": GREY,
    "forward": BLUE,
    "recompute": YELLOW,
    "backward": ORANGE,
    "boundary": PURPLE,
    "optimizer": GREEN,
}
_PHASE_NAMES = {"prologue": "before forward", "boundary": "after backward"}
"""Words of a picture for phases that users do not know by name."""
_STREAMS = {
    "compute": "compute",
    "host_to_device": "host → device",
    "device_to_host": "device → host",
    "intra_link": "links in a node",
    "inter_link": "links between nodes",
    "ssd_read": "SSD reads",
    "ssd_write": "SSD writes",
    "host_threads": "host threads",
    "host_issue": "host issues ops",
}

_TIERS = {"device": "device memory", "host": "host memory", "ssd": "SSD"}
_LEFT = 140
"""Pixels left of the time axis, which hold the labels."""
_STRIP = 4
"""Width in pixels of a part of the time whose bytes a hint gives."""


@dataclass(frozen=True)
class Point:
    """One setting: its peak memory and the time of its step."""

    label: str
    """A trial's number, or empty."""
    text: str
    """Its settings."""
    peak_bytes: int
    step_s: float
    status: Status = "trial"


class Ran(NamedTuple):
    """A trial that ran to its end."""

    number: int
    role: str
    summary: str
    peak_bytes: int | None
    step_s: float | None


def settings_of(trials: Iterable[Ran], best: int | None) -> list[Point]:
    """Return one point per setting: the number and peak of its first trial, the median step of all."""
    times: dict[str, list[float]] = {}
    first: dict[str, Ran] = {}
    chosen = ""
    for each in trials:
        if not each.step_s or not each.peak_bytes:
            continue
        times.setdefault(each.summary, []).append(each.step_s)
        chosen = each.summary if each.number == best else chosen
        if each.role not in ("repeat", "confirm"):
            first.setdefault(each.summary, each)
    return [
        Point(
            label=str(each.number),
            text=summary,
            peak_bytes=each.peak_bytes or 0,
            step_s=statistics.median(times[summary]),
            status="best" if summary == chosen else "baseline" if each.role == "baseline" else "trial",
        )
        for summary, each in first.items()
    ]


def front(points: Sequence[Point], limit_bytes: int | None, *, measured: bool = True) -> Picture:
    """Draw step time against peak memory, with the line of settings that none beats in both."""
    title = f"Time against memory, {'measured' if measured else 'predicted'}"
    if not points:
        return _nothing(title, "no setting ran to its end")
    most_bytes = max([each.peak_bytes for each in points] + ([limit_bytes] if limit_bytes else []))
    most_s = max(each.step_s for each in points)
    canvas = Canvas(WIDTH, 400)
    x, y = Scale(0, most_bytes * 1.06, 74, WIDTH - 20), Scale(0, most_s * 1.1, 330, 36)
    canvas.axes(x, y, "peak device memory", "seconds per step", format_bytes, _seconds, x_base=1024)
    if limit_bytes:
        canvas.line(x(limit_bytes), y.start, x(limit_bytes), y.stop, RED, stroke_dasharray="5 4")
        canvas.text(x(limit_bytes) - 5, y.stop + 2, f"limit {format_bytes(limit_bytes)}", "end", fill=RED)
    best = _front_of([each for each in points if each.status != "failed"])
    canvas.polyline([(x(each.peak_bytes), y(each.step_s)) for each in best], GREY, stroke_width=1.5)
    for each in sorted(points, key=lambda point: point.status == "best"):
        shape, color, _ = _LOOK[each.status]
        at = x(each.peak_bytes), y(each.step_s)
        hint = f"{each.label} {each.text}: {_both(each)}".strip()
        canvas.mark(*at, shape, color, hint)
        canvas.text(at[0] + 8, at[1] - 6, each.label, font_size=11)
    used = {each.status for each in points}
    canvas.legend(74, 390, [look for status, look in _LOOK.items() if status in used])
    fastest = min(best, key=lambda each: each.step_s, default=points[0])
    smallest = min(best, key=lambda each: each.peak_bytes, default=points[0])
    description = (
        f"{len(points)} settings. Fastest that fits: {fastest.text}, {_both(fastest)}. Smallest:"
        f" {smallest.text}, {_both(smallest)}."
    )
    return canvas.picture(title, description)


def _both(point: Point) -> str:
    return f"{format_seconds(point.step_s)} a step, peak {format_bytes(point.peak_bytes)}"


def _front_of(points: Sequence[Point]) -> list[Point]:
    found: list[Point] = []
    for each in sorted(points, key=lambda point: (point.peak_bytes, point.step_s)):
        if not found or each.step_s < found[-1].step_s:
            found.append(each)
    return found


def memory(runs: Mapping[str, Mapping[str, Any]], limit_bytes: int | None) -> Picture:
    """Draw the bytes of one step over time by kind, one panel per setting on common axes."""
    title = "Memory of a step by kind, simulated"
    if not runs:
        return _nothing(title, "the study has no timelines")
    most_s = max(run["time_s"][-1] for run in runs.values())
    peaks = {
        name: max(map(sum, zip(*run["bytes_by_kind"].values(), strict=True))) for name, run in runs.items()
    }
    most = max([*peaks.values(), limit_bytes or 0])
    canvas = Canvas(WIDTH, 36 + 250 * len(runs))
    kinds = [kind for kind in _KIND_COLORS if any(kind in run["bytes_by_kind"] for run in runs.values())]
    for row, (name, run) in enumerate(runs.items()):
        top = 40 + 250 * row
        x, y = Scale(0, most_s, 74, WIDTH - 20), Scale(0, most * 1.05, top + 170, top)
        canvas.axes(
            x,
            y,
            "time in the step",
            f"{name}: peak {format_bytes(peaks[name])}",
            _seconds,
            format_bytes,
            y_base=1024,
        )
        _stack(canvas, x, y, run["time_s"], run["bytes_by_kind"], kinds)
        _readings(canvas, x, y, run["time_s"], run["bytes_by_kind"], kinds)
        if limit_bytes:
            canvas.line(x.start, y(limit_bytes), x.stop, y(limit_bytes), RED, stroke_dasharray="5 4")
    canvas.legend(20, 26 + 250 * len(runs), [("bar", _KIND_COLORS[kind], kind) for kind in kinds])
    facts = "; ".join(f"{name} has a peak of {format_bytes(peak)}" for name, peak in peaks.items())
    return canvas.picture(
        title, f"{facts}. {_LIMIT.format(format_bytes(limit_bytes)) if limit_bytes else ''}".strip()
    )


_LIMIT = "The limit is {}."


def technique(data: Mapping[str, Any], without: Mapping[str, Any], title: str) -> Picture:
    """Draw one step with a technique, for the catalogue: what lives in each memory, and what runs, over time.

    Args:
        data: `device`, `host` and `ssd`, each with `time` and `kib_by_kind`, one without times is not drawn;
            `streams`, by resource lists of (phase, start, stop); `step_s`. Times are parts of `step_s`.
        without: The same of the step without the technique; a dashed line has its bytes.
        title: Name of the setting.
    """
    tiers = [each for each in _TIERS if data[each]["time"]]
    streams = [each for each in _STREAMS if each in data["streams"] and each != "host_issue"]
    canvas = Canvas(WIDTH, 30 + 150 * len(tiers) + 16 * len(streams) + 44)
    end_s = max(data["step_s"], without["step_s"])
    x = Scale(0, end_s, _LEFT, WIDTH - 12)
    kinds = [kind for kind in _KIND_COLORS if any(kind in data[each]["kib_by_kind"] for each in tiers)]
    facts = []
    for row, tier in enumerate(tiers):
        top = 24 + 150 * row
        times, by_kind = _seconds_and_bytes(data[tier], data["step_s"])
        before_s, before = _seconds_and_bytes(without[tier], without["step_s"])
        plain = [sum(each) for each in zip(*before.values(), strict=True)]
        peak = max(map(sum, zip(*by_kind.values(), strict=True)))
        y = Scale(0, max([peak, *plain]) * 1.05, top + 90, top)
        facts.append(f"{_TIERS[tier]}: peak {format_bytes(peak)}")
        if plain and tier == "device":
            was = format_bytes(max(plain))
            facts[-1] += ", as without it" if was == format_bytes(peak) else f" instead of {was}"
        canvas.axes(x, y, "", facts[-1], _seconds, format_bytes, y_base=1024)
        _stack(canvas, x, y, times, by_kind, kinds)
        if plain:
            outline = [(x(t), y(v)) for t, v in _steps(before_s, plain)]
            canvas.polyline(outline, "#333", stroke_width=1.2, stroke_dasharray="4 3")
    top = 22 + 150 * len(tiers)
    for row, stream in enumerate(streams):
        _spans(canvas, x, top + 16 * row, 12, stream, data["streams"][stream], data["step_s"])
    ran = {phase for each in streams for phase, *_ in data["streams"][each]}
    top += 16 * len(streams)
    for below, colors, used in ((16, _KIND_COLORS, set(kinds)), (36, _PHASE_COLORS, ran)):
        canvas.legend(
            12,
            top + below,
            [("bar", color, _PHASE_NAMES.get(each, each)) for each, color in colors.items() if each in used],
        )
    return canvas.picture(title, f"{'; '.join(facts)}; the step takes {format_seconds(data['step_s'])}.")


def _seconds_and_bytes(curve: Mapping[str, Any], step_s: float) -> tuple[list[float], dict[str, list[int]]]:
    """Return times and bytes by kind; the last bytes hold until the end of the step."""
    by_kind = {
        kind: [1024 * each for each in (*values, values[-1])] for kind, values in curve["kib_by_kind"].items()
    }
    return [*(each * step_s for each in curve["time"]), step_s], by_kind


def _spans(
    canvas: Canvas,
    x: Scale,
    top: float,
    height: float,
    stream: str,
    spans: Sequence[Any],
    unit_s: float = 1.0,
) -> None:
    """Draw when a resource works, coloured by phase."""
    canvas.text(x.start - 6, top + height - 2, _STREAMS[stream], "end")
    canvas.rect(x.start, top, x.stop - x.start, height, "#f2f2f2")
    for phase, start, stop in spans:
        start_s, stop_s = start * unit_s, stop * unit_s
        name = _PHASE_NAMES.get(phase, phase)
        hint = f"{_STREAMS[stream]}, {name}: {format_seconds(start_s)} to {format_seconds(stop_s)}"
        canvas.rect(x(start_s), top, x(stop_s) - x(start_s), height, _PHASE_COLORS[phase], hint)


def _stack(
    canvas: Canvas,
    x: Scale,
    y: Scale,
    times: Sequence[float],
    by_kind: Mapping[str, Sequence[float]],
    kinds: Sequence[str],
) -> None:
    below = [0.0] * len(times)
    for kind in kinds:
        values = by_kind.get(kind)
        if values is None:
            continue
        above = [low + value for low, value in zip(below, values, strict=True)]
        outline = [(x(t), y(v)) for t, v in _steps(times, above)]
        outline += [(x(t), y(v)) for t, v in reversed(_steps(times, below))]
        canvas.polygon(outline, _KIND_COLORS[kind], f"{kind}: at most {format_bytes(max(values))}")
        below = above


def _readings(
    canvas: Canvas,
    x: Scale,
    y: Scale,
    times: Sequence[float],
    by_kind: Mapping[str, Sequence[float]],
    kinds: Sequence[str],
) -> None:
    """Cover the areas with strips whose hints give the bytes of each kind where the pointer rests."""
    shown = [kind for kind in kinds if kind in by_kind]
    totals = [sum(values) for values in zip(*by_kind.values(), strict=True)]
    place = [int((x(time) - x.start) / _STRIP) for time in times]
    latest = 0
    for strip in range(place[-1] + 1):
        inside = [at for at, each in enumerate(place) if each == strip]
        at = max(inside, key=totals.__getitem__, default=latest)
        latest = inside[-1] if inside else latest
        parts = [f"{kind} {format_bytes(by_kind[kind][at])}" for kind in shown if by_kind[kind][at]]
        hint = "\n".join([f"{format_bytes(totals[at])} at {format_seconds(times[at])}", *reversed(parts)])
        canvas.rect(x.start + strip * _STRIP, y.stop, _STRIP, y.start - y.stop, "transparent", hint)


def _steps(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a line that holds each value until the next time."""
    corners = [(times[0], values[0])]
    for time, value in zip(times[1:], values[1:], strict=True):
        corners += [(time, corners[-1][1]), (time, value)]
    return corners


def streams(runs: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Draw for each setting which resource works when, coloured by phase.

    Args:
        runs: `streams` of each `StepTimeline` document by the name of its setting: by resource a list of
            (phase, start, stop).
    """
    title = "Timeline of a step, simulated"
    rows = [(name, stream) for name, run in runs.items() for stream in _STREAMS if stream in run]
    if not rows:
        return _nothing(title, "the study has no timelines")
    most_s = max(stop for run in runs.values() for spans in run.values() for _, _, stop in spans)
    height = 30 + sum(28 + 24 * len([1 for owner, _ in rows if owner == name]) for name in runs)
    canvas = Canvas(WIDTH, height + 30)
    x = Scale(0, most_s, 150, WIDTH - 20)
    top, facts, phases = 8, [], set()
    for name, run in runs.items():
        canvas.text(8, top + 16, name, font_weight="bold")
        top += 24
        for stream in (each for each in _STREAMS if each in run):
            phases |= {phase for phase, *_ in run[stream]}
            _spans(canvas, x, top, 18, stream, run[stream])
            busy = sum(stop - start for _, start, stop in run[stream])
            facts.append(f"{name}, {_STREAMS[stream]}: busy for {format_seconds(busy)}")
            top += 24
        top += 4
    for value in x.ticks():
        canvas.line(x(value), top, x(value), top + 4)
        canvas.text(x(value), top + 17, _seconds(value), "middle")
    canvas.legend(
        150,
        top + 42,
        [
            ("bar", color, _PHASE_NAMES.get(phase, phase))
            for phase, color in _PHASE_COLORS.items()
            if phase in phases
        ],
    )
    return canvas.picture(title, "; ".join(facts) + ".")


def waterfall(steps: Sequence[Mapping[str, Any]], limit_bytes: int | None) -> Picture:
    """Draw how time and peak change from the plain setting to the chosen one, one setting more per row."""
    title = "From the plain setting to the chosen one, simulated"
    known = [each for each in steps if each.get("step_s") is not None]
    if len(known) < 2:
        return _nothing(title, "the chosen setting is the plain one")
    canvas = Canvas(WIDTH, 76 + 30 * len(known))
    most_s, most = max(each["step_s"] for each in known), max(each["peak_bytes"] for each in known)
    time, size = (
        Scale(0, most_s, 270, 450),
        Scale(0, max(most, limit_bytes or 0), 520, 690),
    )  # room for numbers
    canvas.text(time.start, 20, "seconds per step", font_weight="bold")
    canvas.text(size.start, 20, "peak device memory", font_weight="bold")
    before: Mapping[str, Any] | None = None
    for row, each in enumerate(known):
        top = 32 + 30 * row
        canvas.text(time.start - 10, top + 15, each["setting"], "end")
        for scale, key, form in ((time, "step_s", _seconds), (size, "peak_bytes", format_bytes)):
            value, last = each[key], before[key] if before else 0
            whole = before is None or row == len(known) - 1
            low, high = (0, value) if whole else sorted((value, last))
            color = BLUE if whole else GREEN if value < last else ORANGE if value > last else GREY
            canvas.rect(
                scale(low),
                top,
                max(scale(high) - scale(low), 1.5),
                20,
                color,
                f"{each['setting']}: {form(value)}",
            )
            canvas.text(scale(high) + 5, top + 15, form(value), font_size=11)
        before = each
    bottom = 32 + 30 * len(known)
    if limit_bytes:
        canvas.line(size(limit_bytes), 26, size(limit_bytes), bottom, RED, stroke_dasharray="5 4")
    canvas.legend(
        20, bottom + 22, [("bar", BLUE, "whole setting"), ("bar", GREEN, "gain"), ("bar", ORANGE, "cost")]
    )
    facts = "; ".join(
        f"{each['setting']}: {format_seconds(each['step_s'])}, {format_bytes(each['peak_bytes'])}"
        for each in known
    )
    return canvas.picture(title, f"{facts}.")


def agreement(trials: Sequence[Mapping[str, Any]]) -> Picture:
    """Draw predicted against measured peak and step time of the trials that fit."""
    title = "Predicted against measured"
    if not trials:
        return _nothing(title, "no trial fitted")
    canvas = Canvas(WIDTH, 360)
    facts = []
    for left, key, name, form, base in (
        (78, "peak_bytes", "peak", format_bytes, 1024),
        (WIDTH / 2 + 74, "step_s", "step time", _seconds, 10),
    ):
        pairs = [
            (each[f"predicted_{key}"], each[key], each["number"])
            for each in trials
            if each[f"predicted_{key}"] and each[key]
        ]
        if not pairs:
            continue
        most = max(max(predicted, measured) for predicted, measured, _ in pairs) * 1.08
        x, y = Scale(0, most, left, left + 270), Scale(0, most, 300, 40)
        canvas.axes(x, y, f"measured {name}", f"predicted {name}", form, form, x_base=base, y_base=base)
        canvas.line(x(0), y(0), x(most), y(most), GREY, stroke_dasharray="4 4")
        for predicted, measured, number in pairs:
            canvas.mark(
                x(measured),
                y(predicted),
                "circle",
                BLUE,
                f"trial {number}: {form(predicted)} predicted, {form(measured)} measured",
            )
        errors = sorted(abs(predicted / measured - 1) for predicted, measured, _ in pairs)
        facts.append(f"{name}: median error {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}")
    return canvas.picture(title, f"{len(trials)} trials. {'; '.join(facts)}.")


def _nothing(title: str, reason: str) -> Picture:
    canvas = Canvas(WIDTH, 40)
    canvas.text(8, 24, f"Nothing to draw: {reason}.")
    return canvas.picture(title, f"Nothing to draw: {reason}.")


def _seconds(value: float) -> str:
    return format_seconds(value) if value else "0"
