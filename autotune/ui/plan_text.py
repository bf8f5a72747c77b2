"""Text output of `memtune plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memtune.autotune.predict import Calibration, PeakRow, time_lines
from memtune.autotune.search import PlanReport, PlanRow
from memtune.autotune.space import describe
from memtune.autotune.ui import formatting
from memtune.units import format_bytes, format_seconds, parse_bytes

_ROWS = 6
"""Modules to show of a peak."""
_BYTES = re.compile(r"\d+(?:\.\d+)? (?:[KMGT]i)?B\b")


def render(report: PlanReport) -> RenderableType:
    """Return baselines and front (or the one config), omissions, memory at the peak, and remedies."""
    parts: list[RenderableType] = [Text(_headline(report.facts))]
    limited = report.facts["budget_bytes"] is not None
    if report.config is not None:
        parts.append(_table([report.config], limited=limited, with_largest=False))
        if report.config.status == "unfit":
            parts.append(Text(f"cannot be used: {report.config.reason}"))
    else:
        rows = [*report.baselines, *report.front]
        parts.append(_table(rows, limited=limited, with_largest=limited))
        if not report.front:
            parts.append(Text(_nothing_fits(report), "bold"))
        parts.append(Text(_counts(report), "dim"))
    if report.peak:
        parts += [Text(""), Text(f"at the peak of {_first_name(report)}:"), _peak(report.peak)]
    first = report.config or (report.front[0] if report.front else None)
    if first is not None:
        parts += [Text(line) for line in time_lines(first.details)]
    parts += [Text(line, "dim") for line in _not_exact(report)]
    parts += [Text(line, "dim") for line in ("", *_omissions(report))] if report.config is None else []
    parts += [Text(note, "dim") for note in report.notes]
    return Group(*parts)


def _table(rows: Sequence[PlanRow], *, limited: bool, with_largest: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("settings", overflow="fold")
    with_exact = any(each.exact_peak_bytes is not None or each.exact_reason for each in rows)
    more = (
        (["out of memory"] if limited else [])
        + (["exact peak"] if with_exact else [])
        + (["largest mb"] if with_largest else [])
    )
    for name in ("samples/s", "step", "peak", *more):
        table.add_column(name, justify="right", no_wrap=True)
    number = 0
    for each in rows:
        number += not each.baseline
        largest = "" if each.largest_micro_batch is None else str(each.largest_micro_batch)
        exact = [_exact(each)] if with_exact else []
        odds = [_oom_text(each)] if limited else []
        cells = [
            each.baseline or str(number),
            each.summary,
            *_numbers(each),
            *odds,
            *exact,
            *([largest] if with_largest else []),
        ]
        table.add_row(*cells)
    return table


def _numbers(planned: PlanRow) -> tuple[str, str, str]:
    if planned.step_s is None or planned.peak_allocated_bytes is None:
        return "–", "–", "–"
    over = "" if planned.status == "ok" else " over"
    peak = format_bytes(planned.peak_allocated_bytes) + over
    return formatting.rate(planned.samples_per_s), format_seconds(planned.step_s), peak


def _oom_text(planned: PlanRow) -> str:
    """Return the probability of running out of memory, or that there are no trials to estimate it from."""
    if planned.peak_allocated_bytes is None:
        return "–"
    return "uncalibrated" if planned.oom_probability is None else f"{planned.oom_probability:.1%}"


def _exact(planned: PlanRow) -> str:
    """Return the peak of the dry run and its difference from the predicted one."""
    if planned.exact_peak_bytes is None or planned.peak_allocated_bytes is None:
        return ""
    more = planned.exact_peak_bytes - planned.peak_allocated_bytes
    return f"{format_bytes(planned.exact_peak_bytes)} ({'+' if more >= 0 else '-'}{format_bytes(abs(more))})"


def _headline(facts: dict[str, Any]) -> str:
    limit = f" · limit {format_bytes(facts['budget_bytes'])}" if facts["budget_bytes"] else ""
    count = facts["calibrated_by"]
    trials = (
        f"calibrated by {count} trials on this machine" if count >= Calibration.ENOUGH else "uncalibrated"
    )
    ranks = f"{facts['ranks']}× " if facts["ranks"] > 1 else ""
    return (
        f"{facts['workload']} · {facts['parameters'] / 1e6:.4g}M parameters ·"
        f" {ranks}{facts['hardware']}{limit} · {facts['global_batch']} samples a step · predicted, {trials} ·"
        f" rates: {facts['rates']}"
    )


def _nothing_fits(report: PlanReport) -> str:
    return "nothing fits; what would help:" + "".join(f"\n  {describe(each)}" for each in report.remedies)


def _counts(report: PlanReport) -> str:
    return (
        f"{report.n_candidates:,} candidates · {report.n_merged:,} equal to another · {report.n_pruned:,}"
        f" pruned · {sum(report.refused.values()):,} refused"
    )


def _omissions(report: PlanReport) -> Iterator[str]:
    limit = report.facts["budget_bytes"]
    for name, (count, least) in report.pruned.items():
        over = format_bytes(least - limit)
        yield (
            f"pruned    {count:,} with {name}: they need {format_bytes(least)} at the least, {over} too much"
        )
    for reason, count in sorted(merged(report.refused).items(), key=lambda each: -each[1]):
        yield f"refused   {count:,}: {reason}"
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in report.unfit.items():
        slot, _, kind = name.partition(": ")
        alike.setdefault((slot, reason), []).append(kind)
    for (slot, reason), kinds in alike.items():
        yield f"not used  {slot}: {', '.join(kinds)}: {reason}"


def merged(refused: Mapping[str, int]) -> dict[str, int]:
    """Return `refused` with reasons merged that differ only in byte counts, keeping the smallest."""
    alike: dict[str, list[str]] = {}
    for reason in refused:
        alike.setdefault(_BYTES.sub("", reason), []).append(reason)
    return {
        min(reasons, key=lambda reason: [parse_bytes(size) for size in _BYTES.findall(reason)])
        + (f" · the least of {len(reasons)} such" if len(reasons) > 1 else ""): sum(
            map(refused.__getitem__, reasons)
        )
        for reasons in alike.values()
    }


def _not_exact(report: PlanReport) -> Iterator[str]:
    """Yield why requested dry runs were not possible; only the predicted peak is known there."""
    rows = [report.config] if report.config is not None else report.front
    for reason in dict.fromkeys(each.exact_reason for each in rows if each.exact_reason):
        yield f"no dry run of {sum(each.exact_reason == reason for each in rows)}: {reason}"


def _first_name(report: PlanReport) -> str:
    first = report.config or (report.front[0] if report.front else None)
    return first.summary if first else "the closest"


def _peak(rows: Sequence[PeakRow]) -> Table:
    """Return bytes by kind on the left, the largest modules on the right."""
    by_kind: dict[str, int] = {}
    for row in rows:
        by_kind[row.kind] = by_kind.get(row.kind, 0) + row.n_bytes
    total = sum(by_kind.values())
    kinds = sorted(by_kind.items(), key=lambda item: -item[1])
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "right", "left", "left", "right"):
        table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    for i in range(max(len(kinds), min(_ROWS, len(rows)))):
        kind = (
            (f"  {kinds[i][0]}", format_bytes(kinds[i][1]), f"{kinds[i][1] / total:.0%}")
            if i < len(kinds)
            else ("", "", "")
        )
        module = (
            (rows[i].module or "(model)", rows[i].kind, format_bytes(rows[i].n_bytes))
            if i < _ROWS and i < len(rows)
            else ()
        )
        table.add_row(*kind, *(("   " + module[0], *module[1:]) if module else ()))
    return table
