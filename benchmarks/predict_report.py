"""The figures of `predict.py` as a short Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

_TOOLS = {
    "predicted": "memtune",
    "affine": "memtune, from micro-batches 2 and 4 alone",
    "mem_tracker": "MemTracker (torch)",
    "accelerate": "accelerate estimate-memory",
}
LIMIT = 0.03
"""Errors above this are listed one by one."""

Row = dict[str, Any]


def markdown(found: dict[str, Any]) -> str:
    """Return the whole page."""
    about, total = found["machine"], found["summary"]
    parts = [
        "# Predicted against measured peak memory, CPU",
        (
            f"`{found['command']}` on {about['cpu']} ({about['capability']}), {about['cores']} cores, torch"
            f" {about['torch']}, {found['threads']} thread per trial; {found['elapsed_s']} s in all."
            f" {total['cases']} cases: {total['measured']} measured, {total['unfit']} refused by a technique,"
            f" {total['failed']} failed. Nothing is fitted to measurements; but what these models showed to"
            " be predicted wrongly has been mended since the grid was fixed, so expect larger errors on"
            " models that were never looked at."
        ),
        _tools(total),
        (
            "MemTracker is given recompute by torch's `checkpoint_wrapper`; where it has no such setting, or"
            " raises, it has no case. Accelerate's formula knows neither batch nor settings. torch's"
            " SACEstimator predicts no peak."
        ),
        "## By model",
        _by(found["rows"], "model", lambda row: str(row["model"])),
        "## By setting",
        _by(found["rows"], "recompute · offload", lambda row: f"{row['recompute']} · {row['offload']}"),
        *_outliers(found["rows"]),
        *(_speed(found["speed"]) if found["speed"] else ()),
    ]
    return "\n\n".join(parts) + "\n"


def _tools(total: dict[str, Any]) -> str:
    lines = [
        "| tool | cases | median error | worst | plain cases | median error | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for tool, name in _TOOLS.items():
        cells = [total.get(tool), total.get(f"{tool}_plain")]
        figures = " | ".join(_figures(each) for each in cells)
        lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)


def _figures(each: dict[str, Any] | None) -> str:
    return f"{each['n']} | {each['median']:.2%} | {each['worst']:.2%}" if each else "0 | – | –"


def _by(rows: Iterable[Row], title: str, key: Callable[[Row], str]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["measured_bytes"]:
            groups.setdefault(key(row), []).append(row)
    lines = [f"| {title} | cases | measured peak, MiB | median error | worst |", "|---|---|---|---|---|"]
    for name, members in groups.items():
        peaks = [row["measured_bytes"] / 2**20 for row in members]
        errors = [abs(row["error"]) for row in members]
        span = f"{min(peaks):.0f} to {max(peaks):.0f}"
        lines.append(
            f"| {name} | {len(members)} | {span} | {statistics.median(errors):.2%} | {max(errors):.2%} |"
        )
    return "\n".join(lines)


def _outliers(rows: list[Row]) -> list[str]:
    lines = [
        f"- {row['model']}, {row['recompute']}, {row['offload']}, batch {row['batch']}: "
        + (f"{row['error']:+.2%}" if row["error"] is not None else f"{row['status']}, {row['reason']}")
        for row in rows
        if abs(row["error"] or 0) > LIMIT or row["status"] not in ("ok", "unfit")
    ]
    return [f"## Above {LIMIT:.0%}, or failed", "\n".join(lines)] if lines else []


def _speed(found: dict[str, Any]) -> list[str]:
    candidates, allocator = found["candidates_speed"], found["allocator_speed"]["rows"]
    lines = ["| speed, one core | per second |", "|---|---|"]
    lines.append(
        f"| candidates rewritten and scored ({candidates['layers']}-block GPT) |"
        f" {candidates['candidates_per_s']:,} |"
    )
    for row in allocator:
        name = f"allocator events ({row['program']}, {row['settings'] or 'defaults'})"
        lines.append(f"| {name} | {row['events_per_s']:,} |")
    return ["## Speed", "\n".join(lines)]
