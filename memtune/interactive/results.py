"""Results of `memtune.search` and `memtune.plan`: they print as a table, and have trials and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from memtune.autotune.report import Picture, Point, Ran, front, settings_of
from memtune.autotune.search import PlanReport, PlanRow, SearchOutcome
from memtune.config import TunedConfig
from memtune.units import format_bytes, format_micro_batch, format_rate, format_seconds

_COLUMNS = ("#", "trial", "result", "step", "samples/s", "peak", "micro-batch", "setting")


def table_of(rows: Sequence[dict[str, Any]]) -> Any:
    """Return a `pandas.DataFrame` of `rows`, or a list where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return list(rows)
    return pandas.DataFrame(list(rows))


@dataclass(frozen=True, repr=False)
class SearchResult:
    """The outcome of `memtune.search`.

    Attributes:
        outcome: All of it as plain data; `outcome.to_dict()` is the document of `memtune search --json`.
    """

    outcome: SearchOutcome

    @property
    def status(self) -> Literal["done", "stopped", "interrupted", "dry_run"]:
        """Return the end of the search: done, stopped, interrupted or a dry run."""
        return self.outcome.status

    @property
    def message(self) -> str:
        """One sentence: the winner and its gain."""
        return self.outcome.message

    @property
    def best(self) -> TunedConfig | None:
        """The config that was written, for `memtune.apply`; None for a dry run."""
        return self.outcome.tuned

    @property
    def path(self) -> Path | None:
        """The file of the config, None if none was written."""
        return Path(self.outcome.out) if self.outcome.out is not None else None

    @property
    def study(self) -> Path:
        """The folder of the study, with its event log: `memtune report` and `memtune watch` read it."""
        return Path(self.outcome.study)

    @property
    def trials(self) -> Any:
        """One row per trial: a `pandas.DataFrame`, or a list of dicts where pandas is not installed.

        The columns are the fields of `trials` in `docs/json.md`; bytes and seconds.
        """
        return table_of(self.outcome.trials)

    def plot(self) -> Picture:
        """Return the picture of step time against peak memory, measured; a notebook shows it."""
        config = self.outcome.config or {}
        winner = (config.get("study") or {}).get("trial")
        ran = (
            Ran(row["number"], row["role"], row["summary"], row["peak_allocated_bytes"], row["step_s"])
            for row in self.outcome.trials
            if row.get("status") == "ok"
        )
        return front(settings_of(ran, winner), self._limit_bytes)

    @property
    def _limit_bytes(self) -> int | None:
        config = self.outcome.config or {}
        return (config.get("certificate") or {}).get("budget_bytes")

    def _table(self) -> Iterator[tuple[str, ...]]:
        yield _COLUMNS
        for row in self.outcome.trials:
            execution = row["settings"]["execution"]
            step, rate, peak = (row.get(each) for each in ("step_s", "samples_per_s", "peak_allocated_bytes"))
            yield (
                str(row.get("number", "")),
                row["name"] or row["role"],
                row.get("status", "not run"),
                format_seconds(step) if step else "",
                format_rate(rate) if rate else "",
                format_bytes(peak) if peak else "",
                format_micro_batch(execution.get("micro_batch"), execution.get("accumulate", 1)),
                row.get("sentence", row["summary"]),  # studies of earlier versions have no sentences
            )

    def _headline(self) -> str:
        """Return the message; of a search that was stopped that its best is one so far."""
        if self.status not in ("interrupted", "stopped"):
            return self.message
        return f"{self.status}, best so far, not confirmed in a fresh process: {self.message}"

    def __repr__(self) -> str:
        """Return the message, the file and the table of trials."""
        head = [self._headline()] + ([f"written to {self.path}"] if self.path else [])
        return "\n".join([*head, *_aligned(list(self._table()))])

    def _repr_html_(self) -> str:
        return f"<p>{escape(self._headline())}</p>{_html(list(self._table()))}{self.plot().svg}"


@dataclass(frozen=True, repr=False)
class PlanResult:
    """The outcome of `memtune.plan`: predictions, nothing was run.

    Attributes:
        report: All of it as plain data; `report.to_dict()` is the document of `memtune plan --json`.
        command: The command line for the same model, which the text names.
    """

    report: PlanReport
    command: tuple[str, ...] = ("memtune", "plan")

    @property
    def feasible(self) -> bool:
        """Return whether anything, or the given config, is predicted to fit."""
        return self.report.feasible

    @property
    def best(self) -> PlanRow | None:
        """The first setting of `front`, or the given config; None if nothing fits."""
        if self.report.config is not None:
            return self.report.config if self.report.feasible else None
        return self.report.front[0] if self.report.front else None

    @property
    def rows(self) -> Any:
        """The ranking, best first: a `pandas.DataFrame`, or a list of dicts where pandas is not installed."""
        return table_of([each.to_dict() for each in self.report.rows])

    @property
    def front(self) -> Any:
        """The settings that none beats in both cost (time, techniques, retries) and memory, cheapest first;
        a table as `rows`.
        """
        return table_of([each.to_dict() for each in self.report.front])

    def plot(self) -> Picture:
        """Return the picture of step time against peak memory, predicted; a notebook shows it."""
        best = self.best

        def status_of(row: PlanRow) -> Literal["failed", "best", "baseline", "trial"]:
            if row.status == "oom":
                return "failed"
            if best is not None and row.settings == best.settings:
                return "best"
            return "baseline" if row.baseline else "trial"

        rows = [
            *self.report.rows,
            *self.report.baselines,
            *self.report.front,
            *([self.report.config] if self.report.config else []),
        ]
        points = {
            row.summary: Point(
                label=row.baseline,
                text=row.summary,
                peak_bytes=row.peak_allocated_bytes,
                step_s=row.step_s,
                status=status_of(row),
            )
            for row in rows
            if row.peak_allocated_bytes is not None and row.step_s is not None
        }
        return front(list(points.values()), self.report.facts["budget_bytes"], measured=False)

    def __repr__(self) -> str:
        """Return the text that `memtune plan` prints."""
        import io

        from rich.console import Console

        from memtune.autotune.ui import render

        stream = io.StringIO()
        Console(file=stream, width=120, no_color=True).print(render(self.report, command=self.command))
        return stream.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>{self.plot().svg}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _html(rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
