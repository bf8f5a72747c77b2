"""Text output of `memtune plan`: the advice first, then table, memory, changes that would help."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from memtune.autotune.predict import Calibration, PeakRow, TightSetting, time_lines
from memtune.autotune.search import PlanReport, PlanRow
from memtune.autotune.space import Goal, describe
from memtune.autotune.ui import formatting
from memtune.hardware import BUSY
from memtune.units import format_bytes, format_count, format_micro_batch, format_seconds

_REASONS = 12
"""Groups of refusals to show."""
_NOTICEABLE = 0.03
"""Relative difference of two predictions below which they count as equal."""
_LEAST_COST = 1 << 20
"""Bytes of host memory, beyond those of the user's own setting, below which it is no cost."""
_LEAST_SETTING = 14
"""Columns of a terminal that a setting needs in a table."""
_BAR = 8
_KIND_BAR = 20
_NAMES = {"plain": "yours"}
_PLAN_OPTIONS = ("--gpu-type", "--nodes", "--top", "--row", "--why-not")
_PLAN_FLAGS = ("--exact", "--why", "--verbose", "-v")
"""Options of `memtune plan` that a search does not need."""
_EXACTNESS = {
    "bitwise": "results are bitwise those of your script",
    "reordered": "results are equal up to the order of summation",
    "lossy": "results change: --allow-lossy was given",
}


_FITS = ("ok", "tight")
_BETTER = {"throughput": "be faster", "memory": "need less memory", "batch": "take a larger micro-batch"}


def render(
    report: PlanReport,
    *,
    command: Sequence[str] = ("memtune", "plan"),
    why: bool = False,
    verbose: bool = False,
) -> RenderableType:
    """Return the advice, the table, memory at the peak, and changes that would help.

    Args:
        report: The predictions.
        command: The command line that made them, to name the one that writes the config.
        why: List refusals and pruned settings in groups.
        verbose: List the time's critical path and notes of the recording.
    """
    parts: list[RenderableType] = [
        Text(_headline(report.facts), "bold"),
        Text(_basis(report.facts), "dim"),
        Text(""),
    ]
    if report.config is not None:
        parts.append(_table([report.config], report.facts))
        if report.config.status == "unfit":
            parts.append(Text(f"cannot be used: {report.config.reason}"))
        elif report.config.allocators:
            parts.append(Text(f"{report.config.status}: {report.config.reason}", "bold"))
            parts += [Text(_setting_line(each)) for each in report.config.allocators]
        parts += _written(report, command)
    else:
        parts += _advice(report, command)
        rows = [*report.baselines, *report.front]
        parts += [Text(""), _table(rows, report.facts), *(Text(each, "dim") for each in _terms(rows))]
    if report.peak:
        parts += [Text(""), *_peak(report)]
    if report.improvements:
        parts += [Text(""), Text("would be faster", "bold"), *map(Text, _improvements(report))]
    for each in report.absences:
        parts += [Text(""), Text(f"{each.technique} {each.sentence}", "bold"), Text(f"  {each.reason}")]
    if report.config is None:
        parts += [Text(""), *(Text(line, "dim") for line in _omissions(report, why))]
    parts += [Text(line, "dim") for line in _not_exact(report)]
    parts += [Text(each, "dim") for each in report.notes if verbose or each not in report.recording_notes]
    first = report.config or (report.front[0] if report.front else None)
    parts += [Text(each, "yellow") for each in (report.config.unmet if report.config is not None else ())]
    if verbose and first is not None:
        parts += [Text(""), *(Text(line, "dim") for line in time_lines(first.details))]
    return Group(*parts)


# -- the advice ----------------------------------------------------------------------------------------------


def _advice(report: PlanReport, command: Sequence[str]) -> Iterator[Text]:
    if not report.front:
        yield Text("nothing fits; what would help:", "bold red")
        yield from (Text(f"  {describe(each)}") for each in report.remedies)
        return
    first, facts = report.front[0], report.facts
    plain = next((each for each in report.baselines if each.baseline == "plain"), None)
    keeps = plain is not None and plain.status in _FITS and not _improves(first, plain, facts["goal"])
    if plain is not None and keeps:
        better = _BETTER[facts["goal"]]
        yield _labelled(
            "do this",
            Text(f"keep your own setting: it fits, and nothing is predicted to {better}", "bold green"),
        )
        yield _labelled("it has", Text(f"{_rate_and_peak(plain, facts['budget_bytes'])} (predicted)"))
    else:
        yield _labelled("do this", Text(_with_batches(first, plain), "bold green"))
        yield _labelled("gains", Text(_gains(first, plain, report.baselines, facts["budget_bytes"])))
        yield _labelled("costs", Text(_costs(first, plain)))
        yield from (_labelled("but", Text(each, "yellow")) for each in first.unmet)
    if report.out is not None:
        yield from _written(report, command)
        return
    if not keeps:
        yield _labelled(
            "write it",
            Text(shlex.join([*command, "--out", "tuned.yaml"]), "cyan").append(
                "   (another row: --row N)", "dim"
            ),
        )
    yield _labelled(
        "measure",
        Text(shlex.join(_as_search(command)), "cyan").append("   finds the fastest by real trials", "dim"),
    )


def _with_batches(first: PlanRow, plain: PlanRow | None) -> str:
    """Return the setting as clauses, with its micro-batches where they are not those of the user's own."""
    if plain is not None and (first.micro_batch, first.accumulate) == (plain.micro_batch, plain.accumulate):
        return first.sentence
    return formatting.with_batches(first.sentence, first.micro_batch, first.accumulate)


def _written(report: PlanReport, command: Sequence[str]) -> Iterator[Text]:
    if report.out is not None:
        yield _labelled("written", Text(f"{report.out}, predicted and not measured"))
        yield _labelled("measure", Text(f"memtune trial {_model(command)} --config {report.out}", "cyan"))


def _labelled(label: str, text: Text) -> Text:
    return Text(f"{label:<10}", "bold").append_text(text)


def _model(command: Sequence[str]) -> str:
    return next((each for each in command if ".py" in each), "model.py")


def _as_search(command: Sequence[str]) -> list[str]:
    """Return the command that searches what this one has planned; options of `plan` alone are dropped."""
    kept, skip = [], False
    for each in command:
        name = each.partition("=")[0]
        if not skip and name not in (*_PLAN_OPTIONS, *_PLAN_FLAGS):
            kept.append(each)
        skip = not skip and "=" not in each and name in _PLAN_OPTIONS
    return ["search" if each == "plan" else each for each in kept]


def _improves(first: PlanRow, plain: PlanRow, goal: Goal) -> bool:
    """Return whether the first row is noticeably better than the user's own setting, by the goal."""
    if goal == "memory":
        peak, own = (each.peak_allocated_bytes or 0 for each in (first, plain))
        return peak <= own * (1 - _NOTICEABLE)
    if goal == "batch":
        return (first.micro_batch or 0) > (plain.micro_batch or 0)
    return _gain(first, plain) >= _NOTICEABLE


def _gain(first: PlanRow, other: PlanRow) -> float:
    """Return the relative gain in samples/s over another row."""
    return (
        first.samples_per_s / other.samples_per_s - 1 if first.samples_per_s and other.samples_per_s else 0.0
    )


def _gains(first: PlanRow, plain: PlanRow | None, rows: Sequence[PlanRow], budget: int | None) -> str:
    peak = first.peak_allocated_bytes or 0
    facts = [_rate_and_peak(first, budget)]
    if plain is not None and plain.peak_allocated_bytes and plain.summary != first.summary:
        less = plain.peak_allocated_bytes - peak
        more = "less" if less >= 0 else "more"
        lacking = ", which does not fit" if plain.status not in _FITS else ""
        facts.append(f"{format_bytes(abs(less))} {more} than your setting{lacking}")
    fitting = [each for each in rows if each.status in _FITS and each.samples_per_s]
    if fitting:
        usual = max(fitting, key=lambda each: each.samples_per_s or 0.0)
        gain = _gain(first, usual)
        name = _NAMES.get(usual.baseline, usual.baseline)
        name = "your setting" if name == "yours" else name
        change = f"{gain:.0%} faster than" if gain > 0 else f"{-gain:.0%} slower than"
        facts.append(f"{change if abs(gain) >= _NOTICEABLE else 'as fast as'} {name}")
    return "; ".join(facts) + " (predicted)"


def _rate_and_peak(row: PlanRow, budget: int | None) -> str:
    limit = f" of {format_bytes(budget)}" if budget else ""
    peak = format_bytes(row.peak_allocated_bytes or 0)
    return f"{formatting.rate(row.samples_per_s)} samples/s with {peak}{limit}"


def _costs(first: PlanRow, plain: PlanRow | None) -> str:
    host, written = first.details.get("host_peak_bytes") or 0, first.details.get("ssd_written_bytes") or 0
    if plain is not None:
        host -= plain.details.get("host_peak_bytes") or 0  # the batch is there in any case
    facts = [f"{format_bytes(host)} of host memory per rank"] if host >= _LEAST_COST else []
    facts += [f"{format_bytes(written)} written to SSD a step and rank"] if written else []
    return "; ".join([*facts, _EXACTNESS[first.exactness]])


# -- the table -----------------------------------------------------------------------------------------------


def _table(rows: Sequence[PlanRow], facts: Mapping[str, Any]) -> _FoldingTable:
    budget = facts["budget_bytes"]
    columns: list[tuple[str, str, bool]] = [("micro-batch", "right", True), ("samples/s", "right", True)]
    columns += [("tokens/s", "right", True)] if facts.get("tokens_per_sample") else []
    columns += [("step", "right", True), ("peak", "left", True)]
    with_odds = bool(budget) and any(each.oom_probability is not None for each in rows)
    with_exact = any(each.exact_peak_bytes is not None or each.exact_reason for each in rows)
    with_largest = any(each.largest_micro_batch for each in rows)
    columns += [("out of memory", "right", True)] if with_odds else []
    columns += [("exact peak", "right", True)] if with_exact else []
    columns += [("largest", "right", True)] if with_largest else []
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("setting", overflow="fold", ratio=1, min_width=_LEAST_SETTING)
    for name, justify, no_wrap in columns:
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=no_wrap)
    number = 0
    plain = next((each for each in rows if each.baseline == "plain"), None)
    scale = budget or max((each.peak_allocated_bytes or 0 for each in rows), default=0)
    for each in rows:
        number += not each.baseline
        known = each.step_s is not None and each.peak_allocated_bytes is not None
        cells: list[str | Text] = [_batch(each), formatting.rate(each.samples_per_s)]
        cells += [formatting.rate(each.tokens_per_s)] if facts.get("tokens_per_sample") else []
        cells += [format_seconds(each.step_s or 0) if known else "–", _peak_bar(each, scale)]
        cells += [formatting.percent(each.oom_probability)] if with_odds else []
        cells += [_exact(each)] if with_exact else []
        cells += [str(each.largest_micro_batch or "")] if with_largest else []
        name = _NAMES.get(each.baseline, each.baseline) or str(number)
        own = plain.sentence.split("; ") if plain is not None and plain is not each else ()
        setting = formatting.differing(each.sentence or each.summary, own)
        table.add_row(name, setting, *cells, style="" if each.status == "ok" else "dim")
    return _FoldingTable(table)


def _terms(rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield the meaning of the words of a table that it does not explain itself."""
    if any(each.largest_micro_batch for each in rows):
        yield "largest: the largest micro-batch that fits with the setting"
    if any(each.status == "tight" for each in rows):
        yield (
            "tight: the tensors fit, but PyTorch's allocator must return cached memory to the device and ask"
            " again, which takes time"
        )


@dataclass(frozen=True)
class _FoldingTable:
    """A table; where the console is too narrow for it, its rows as lines."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.table.columns
        rows = list(zip(*(column.cells for column in columns), strict=True))
        widths = (
            max([cell_len(str(column.header)), *(cell_len(str(cell)) for cell in column.cells)])
            if column.no_wrap
            else _LEAST_SETTING
            for column in columns
        )
        if sum(width + 2 for width in widths) <= options.max_width:
            yield self.table
            return
        for row in rows:
            head, facts = list[Text](), list[Text]()
            for column, cell in zip(columns, row, strict=True):
                text = cell.copy() if isinstance(cell, Text) else Text(str(cell))
                if column.header in ("", "setting"):
                    head.append(text)
                elif text:
                    facts.append(Text(f"{column.header} ").append_text(text))
            yield Text(": ").join(head)
            if facts:
                yield Text("  ").append_text(Text(" · ").join(facts))


def _batch(row: PlanRow) -> str:
    return format_micro_batch(row.micro_batch, row.accumulate) or "–"


def _peak_bar(row: PlanRow, scale: int) -> Text:
    if row.peak_allocated_bytes is None:
        return Text("–")
    bar = formatting.bar(row.peak_allocated_bytes / scale if scale else 0.0, _BAR)
    word, colour = {"ok": ("", "green"), "tight": (" tight", "yellow")}.get(row.status, (" > limit", "red"))
    text = Text(bar, colour).append(f" {format_bytes(row.peak_allocated_bytes)}")
    return text.append(word, colour) if word else text


def _setting_line(setting: TightSetting) -> str:
    """Return one setting of the allocator under the limit."""
    if not setting.fits:
        found = "runs out of memory"
    elif setting.retries:
        found = f"{setting.retries} retries a step, about {format_seconds(setting.retry_s)}"
    else:
        found = "no retries"
    name = setting.settings or "torch's defaults"
    return f"  {name}: {format_bytes(setting.peak_reserved_bytes)} reserved, {found}"


def _exact(planned: PlanRow) -> str:
    """Return the peak of the dry run and its difference from the predicted one."""
    if planned.exact_peak_bytes is None or planned.peak_allocated_bytes is None:
        return ""
    more = planned.exact_peak_bytes - planned.peak_allocated_bytes
    return f"{format_bytes(planned.exact_peak_bytes)} ({'+' if more >= 0 else '-'}{format_bytes(abs(more))})"


def _headline(facts: Mapping[str, Any]) -> str:
    ranks = f"{facts['ranks']} × " if facts["ranks"] > 1 else ""
    parts = [
        f"{facts['workload']}",
        f"{format_count(facts['parameters'])} parameters",
        f"{ranks}{facts['hardware']}",
        *([f"limit {format_bytes(facts['budget_bytes'])} each"] if facts["budget_bytes"] else []),
        *(
            [f"{format_bytes(facts['host_memory_bytes'])} of host memory"]
            if facts["host_memory_bytes"]
            else []
        ),
        f"{facts['global_batch']} samples a step",
    ]
    return " · ".join(parts)


def _basis(facts: Mapping[str, Any]) -> str:
    count = facts["calibrated_by"]
    times = (
        f"calibrated by {count} trials on this machine"
        if count >= Calibration.ENOUGH
        else "uncalibrated: no search has run on this machine"
    )
    busy = ""
    if facts.get("other_load", 0) > BUSY:
        busy = (
            f"; this machine is busy (others use {facts['other_load']:.0%}), predictions are for a quiet one"
        )
    return f"all numbers are predicted; times are {times}, rates: {facts['rates']}{busy}"


# -- memory, changes, refusals -------------------------------------------------------------------------------


def _peak(report: PlanReport) -> Iterator[RenderableType]:
    """Yield bytes by kind, each with its bar and its largest module."""
    by_kind: dict[str, int] = {}
    largest: dict[str, str] = {}
    for row in report.peak:
        by_kind[row.kind] = by_kind.get(row.kind, 0) + row.n_bytes
        largest.setdefault(row.kind, f"{_place(row)} {format_bytes(row.n_bytes)}")
    total = sum(by_kind.values())
    if report.config:
        subject = "this setting"
    else:
        subject = "row 1" if report.front else "the closest"
    yield Text(f"memory of {subject} at its peak, {format_bytes(total)}", "bold")
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    for justify in ("left", "left", "right", "right", "left"):
        table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    for kind, n_bytes in sorted(by_kind.items(), key=lambda item: -item[1]):
        share = n_bytes / total if total else 0.0
        bar = Text(formatting.bar(share, _KIND_BAR, empty=" "), "cyan")
        table.add_row(
            f"  {kind}", bar, format_bytes(n_bytes), f"{share:.0%}", Text(f"most in {largest[kind]}", "dim")
        )
    yield _FoldingTable(table)


def _place(row: PeakRow) -> str:
    if row.module == "*":
        return "the blocks"
    return row.module.replace("(outside)", "modules outside the blocks,") or "the model"


def _improvements(report: PlanReport) -> Iterator[str]:
    for each in report.improvements:
        more = each.speedup - 1
        gain = f"{more:.0%} more samples/s" if more < 1 else f"{each.speedup:.2g} × the samples/s"
        yield f"  {gain}, {format_bytes(each.peak_bytes)}: {each.change}"


def _omissions(report: PlanReport, why: bool) -> Iterator[str]:
    refused, pruned = sum(report.refused.values()), report.n_pruned
    settings = formatting.plural(report.n_candidates, "setting")
    counts = f"{settings} predicted: {pruned:,} cannot fit, {refused:,} refused"
    if not why:
        unused = formatting.plural(len(report.unfit), "technique")
        yield f"{counts}, {unused} not used (--why; --why-not KIND for one)"
        return
    yield f"{counts}, {report.n_merged:,} the same as another"
    limit = report.facts["budget_bytes"]
    for name, (count, least) in report.pruned.items():
        yield f"  cannot fit  {count:>5,} with {name}: {format_bytes(least - limit)} too much at the least"
    groups = sorted(formatting.grouped(report.refused).items(), key=lambda each: -each[1])
    for reason, count in groups[:_REASONS]:
        yield f"  refused     {count:>5,} {reason}"
    if len(groups) > _REASONS:
        rest = sum(count for _, count in groups[_REASONS:])
        yield f"  refused     {rest:>5,} for {len(groups) - _REASONS} other reasons (--json lists all)"
    alike: dict[tuple[str, str], list[str]] = {}
    for name, reason in report.unfit.items():
        slot, _, kind = name.partition(": ")
        alike.setdefault((slot, reason), []).append(kind)
    for (slot, reason), names in alike.items():
        yield f"  not used    {slot}: {', '.join(names)}: {reason}"


def _not_exact(report: PlanReport) -> Iterator[str]:
    """Yield why requested dry runs were not possible; only the predicted peak is known there."""
    rows = [report.config] if report.config is not None else report.front
    for reason in dict.fromkeys(each.exact_reason for each in rows if each.exact_reason):
        yield f"no dry run of {sum(each.exact_reason == reason for each in rows)}: {reason}"
