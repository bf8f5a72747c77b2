"""The page and the plot of `published_gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from published.mended_cases import INEXPRESSIBLE, RESERVED

COLUMNS = (("allocated", "GiB"), ("reserved", "GiB"), ("device", "GiB"), ("step", "s"))
_COLOURS = {"allocated": "#1f77b4", "reserved": "#ff7f0e", "device": "#2ca02c", "step": "#d62728"}
_SIZE, _EDGE = 420, 46
_RANGES = {"torch": "torch's counters", "device": "device totals"}


def markdown(rows: Sequence[Any], summary: dict[str, Any], plot_name: str, left: Sequence[str] = ()) -> str:
    """Return the page: bars, sources, cases by error, excluded ones, those `left` out of the run."""
    lines = ["# Predictions for GPUs against published measurements", ""]
    lines += [f"![predicted against measured]({plot_name})", ""] if plot_name else []
    lines += [
        "| column | cases | median error | worst | predicted/measured | inside the interval"
        " | its half-width, median | measured/predicted, nine of ten | inside that of all other sources |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for column, _ in COLUMNS:
        if column in summary:
            each = summary[column]
            lines.append(
                f"| {column} | {each['cases']} | {each['median_error']:.1%} | {each['worst_error']:.1%}"
                f" | {each['median_ratio']:.2f} | {each['inside_interval']:.0%} | {each['half_width']:.0%}"
                f" | {_range(each['factors'])} | {_share(each['held_by_others'])} |"
            )
    lines += _missed(summary["bars"]) + _first(rows)
    for name, derived in summary["ranges"].items():
        low, high = derived["factors"]
        lines += [
            "",
            f"Range without trials of {_RANGES[name]}, derived by `published_ranges.py`: true bytes are {low}"
            f" to {high} of predicted. The range of all other sources holds {derived['held']:.0%} of a"
            " source's rows on average: "
            + ", ".join(
                f"{source} {share:.0%}" for source, (_, share) in sorted(derived["by_source"].items())
            )
            + ".",
        ]
    if "step" in summary:
        lines += ["", f"Steps within ±25 %: {summary['step']['within_25_percent']:.0%}."]
    lines += [
        "",
        "Step time by source; the last column divides by the median ratio of all other sources:",
        "",
    ]
    lines += [
        "| source | cases | rank correlation | pairs 5 % apart in order | predicted/measured"
        " | with the others' factor |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for source, each in summary["sources"].items():
        rank = "–" if each["rank_correlation"] is None else f"{each['rank_correlation']:.2f}"
        lines.append(
            f"| {source} | {each['cases']} | {rank} | {_share(each['pairs_in_order'])}"
            f" | {each['median_ratio']:.2f}"
            f" | {each['median_ratio_with_factor_of_others']:.2f} |"
        )
    for column, unit in COLUMNS:
        mine = [row for row in rows if row.ratio(column) is not None and not row.case.excluded]
        if not mine:
            continue
        mine.sort(key=lambda row: -abs(row.ratio(column) - 1))
        lines += [
            "",
            f"## {column}, worst first",
            "",
            f"| case | GPU | status | measured {unit} | predicted | error |",
            "|---|---|---|--:|--:|--:|",
        ]
        for row in mine:
            error = f"{row.ratio(column) - 1:+.1%}"
            lines.append(
                f"| {row.case.id} | {row.case.gpus} × {row.case.gpu_type} | {row.status}"
                f" | {row.case.measured[column]:.3f} | {row.predicted[column]:.3f} | {error} |"
            )
    known = [row for row in rows if row.case.cause]
    if known:
        lines += ["", "## known causes", "", *(f"- {row.case.id}: {row.case.cause}" for row in known)]
    lines += ["", "## reserved over allocated bytes", "", *(f"- {each}" for each in RESERVED)]
    lines += ["", "## measurements that no setting expresses", "", "| missing | measurements |", "|---|---|"]
    lines += [f"| {feature} | {where} |" for feature, where in INEXPRESSIBLE]
    unfit = [row for row in rows if row.status in ("unfit", "error")]
    if unfit:
        lines += ["", "## not predicted", "", *(f"- {row.case.id}: {row.reason}" for row in unfit)]
    if left:
        lines += ["", "## not in this run", "", f"{len(left)} cases, or their steps: {', '.join(left)}"]
    apart = [row for row in rows if row.case.excluded]
    if apart:
        lines += ["", "## not counted", "", *(f"- {row.case.id}: {row.case.excluded}" for row in apart)]
    return "\n".join(lines) + "\n"


def _missed(bars: Sequence[dict[str, Any]]) -> list[str]:
    """Return the bars that are missed, each with its cause."""
    missed = [bar for bar in bars if not bar["is_met"]]
    lines = ["", "## bars", "", f"{len(bars) - len(missed)} of {len(bars)} are met."]
    if missed:
        lines += [" Missed:", "", "| bar | asked | reached | cause |", "|---|--:|--:|---|"]
        lines += [
            f"| {bar['name']} | {bar['limit']:g} | {bar['reached']:.2f} | {bar['cause']} |" for bar in missed
        ]
    return lines


def _first(rows: Sequence[Any]) -> list[str]:
    """Return the rows that were predicted before their measurement was read: that prediction, and today's."""
    known = [(row, column, value) for row in rows for column, value in row.case.first.items()]
    if not known:
        return []
    lines = [
        "",
        "## predicted before the measurement was read",
        "",
        "| case | column | measured | predicted then | error | error today |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row, column, value in known:
        measured, ratio = row.case.measured[column], row.ratio(column)
        today = "–" if ratio is None else f"{ratio - 1:+.1%}"
        lines.append(
            f"| {row.case.id} | {column} | {measured:.3f} | {value:.3f} | {value / measured - 1:+.1%}"
            f" | {today} |"
        )
    return lines


def _range(given: Sequence[float] | None) -> str:
    return "–" if given is None else f"{given[0]:.2f} to {given[1]:.2f}"


def _share(given: float | None) -> str:
    return "–" if given is None else f"{given:.0%}"


def plot(rows: Sequence[Any]) -> str:
    """Return an SVG: predicted over measured on logarithmic axes, GiB on the left, seconds on the right."""
    size = f'width="{2 * _SIZE}" height="{_SIZE}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect {size} fill="white"/>',
    ]
    parts += _panel(rows, [name for name, unit in COLUMNS if unit == "GiB"], "GiB", 0)
    parts += _panel(rows, ["step"], "s", _SIZE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: Sequence[Any], columns: Sequence[str], unit: str, left: int) -> list[str]:
    points = [
        (row.case.measured[column], row.predicted[column], column, row.case.id)
        for row in rows
        for column in columns
        if row.ratio(column) is not None and not row.case.excluded
    ]
    if not points:
        return []
    values = [value for first, second, *_ in points for value in (first, second)]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05
    inner = _SIZE - 2 * _EDGE

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * inner

    def x(value: float) -> str:
        return f"{left + _EDGE + place(value):.1f}"

    def y(value: float) -> str:
        return f"{_SIZE - _EDGE - place(value):.1f}"

    def text(at: tuple[Any, Any], anchor: str, words: str, fill: str = "#000") -> str:
        return f'<text x="{at[0]}" y="{at[1]}" text-anchor="{anchor}" fill="{fill}">{words}</text>'

    a, b = 10**low, 10**high
    frame = f'x="{left + _EDGE}" y="{_EDGE}" width="{inner}" height="{inner}"'
    diagonal = f'x1="{x(a)}" y1="{y(a)}" x2="{x(b)}" y2="{y(b)}"'
    parts = [
        f'<rect {frame} fill="none" stroke="#888"/>',
        f'<line {diagonal} stroke="#888"/>',
        text((left + _SIZE / 2, _SIZE - 8), "middle", f"measured, {unit}"),
        text((left + _EDGE + 6, _EDGE + 14), "start", f"predicted, {unit}"),
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        value = 10.0**power
        parts.append(text((x(value), _SIZE - _EDGE + 14), "middle", f"{value:g}"))
        parts.append(text((left + _EDGE - 5, y(value)), "end", f"{value:g}"))
    for measured, predicted, column, name in points:
        dot = f'cx="{x(measured)}" cy="{y(predicted)}" r="4" fill="{_COLOURS[column]}" fill-opacity="0.65"'
        parts.append(f"<circle {dot}><title>{name} {column}</title></circle>")
    for number, column in enumerate(columns):
        at = (left + _SIZE - _EDGE - 8, _SIZE - _EDGE - 12 - 14 * number)
        parts.append(text(at, "end", column, _COLOURS[column]))
    return parts
