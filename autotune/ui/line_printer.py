"""Print a search to a pipe, a log file or with `--no-tui`.

One line per trial, and a heartbeat at most once a minute.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from memtune.autotune.search import (
    CandidatesScored,
    Control,
    Event,
    LogOpened,
    LogTail,
    Note,
    Paused,
    Recorded,
    Resumed,
    SearchStarted,
    TrialCancelled,
    TrialFinished,
    TrialPruned,
    Unknown,
)
from memtune.autotune.ui import formatting
from memtune.autotune.ui.view import STATUS_TEXT, SearchView, TrialView
from memtune.progress import SILENT_S, Progress, StatusLine, columns, drain, prints_kept_apart, reported_to
from memtune.units import format_bytes, format_count, format_seconds

T = TypeVar("T")
HEARTBEAT_S = 60.0
_ANSI = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
    "bright_black": "90",
}
_HEAD = ("#", "trial", "result", "batch", "step", "samples/s", "peak", "predicted")
_CELLS = (">4", "<15", "<13", ">6", ">8", ">9", ">9", ">9")
_ONE_LINE = 150
"""Columns of a terminal from which on a trial and its setting share a line."""
_TWO_BLANKS = 88
"""Columns from which on cells have two blanks between them."""
_BELOW = 6
"""Indent of a setting below its trial."""


def use_color(stream: TextIO) -> bool:
    """Return whether to use colour: on terminals that support it, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class LinePrinter:
    """Prints a search as it proceeds.

    Args:
        stream: By default stderr, so that stdout holds the result alone.
        color: Whether to use ANSI colours; by default `use_color` of the stream.
        progress: Of phases without events: before the first trial and after the last.
        verbose: Also print notes about the recording, and techniques that are not used.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        color: bool | None = None,
        *,
        progress: Progress | None = None,
        verbose: bool = False,
    ) -> None:
        self.view, self.progress, self._verbose = SearchView(), progress, verbose
        self._stream = stream if stream is not None else sys.stderr
        self._color = use_color(self._stream) if color is None else color
        self._pruned: list[TrialPruned] = []
        self._last_line_s = 0.0
        self._headed = False
        self._idle_since_s = 0.0
        self._status = StatusLine(self._stream)

    @property
    def _width(self) -> int | None:
        """Columns of the terminal; None off a terminal, where lines are as long as they are."""
        return columns(self._stream) if self._status.redraws else None

    def apply(self, event: Event | Unknown) -> None:
        """Apply the next event, and print its line if it has one."""
        ended = self.view.unfinished if isinstance(event, LogOpened) else ()
        self.view.apply(event)
        if isinstance(event, TrialPruned):
            self._pruned.append(event)
            return
        self._flush_pruned()
        for trial in ended:
            self._trial(trial)
        match event:
            case SearchStarted():
                workload, facts = formatting.title(self.view)
                size = f"{format_count(event.n_parameters)} parameters · " if event.n_parameters else ""
                batch = f" · {event.global_batch} samples a step" if event.global_batch else ""
                self._print(f"{workload} · {size}{facts}{batch}", "bold")
            case Recorded():
                how = f" in {format_seconds(event.record_s)} ({event.rung})" if self._verbose else ""
                blocks = formatting.plural(event.blocks, "repeated block")
                self._print(
                    f"recorded {event.n_ops:,} ops, {blocks}{how} · your own setting needs"
                    f" {format_bytes(event.plain_peak_bytes)} (predicted)"
                )
            case CandidatesScored():
                merged = f", {event.n_merged:,} the same as another" if event.n_merged else ""
                self._print(
                    f"{formatting.plural(event.n_candidates, 'setting')} predicted: {event.n_pruned:,} cannot"
                    f" fit, {event.n_unfit:,} refused{merged}"
                )
                if event.not_used and self._verbose:
                    self._print(f"not used: {_by_slot(event.not_used)} (memtune plan --why)", "dim")
            case TrialFinished() | TrialCancelled() if event.number in self.view.trials:
                self._trial(self.view.trials[event.number])
            case Paused() | Resumed():
                self._print(
                    "paused: running trials go on, no new one starts"
                    if isinstance(event, Paused)
                    else "resumed"
                )
            case Note() if event.level != "detail" or self._verbose:
                self._print(event.text, "yellow" if event.level == "warning" else "")

    def tick(self, elapsed_s: float) -> None:
        """Show the present on the status line, with a heartbeat after a minute without a line."""
        for line in drain(self.progress) if self.progress is not None else ():
            self._status.finish(line)
        if self.view.running:
            self._status.show(*self._present(elapsed_s))
        elif self.progress is not None and self.progress.text:
            self._status.show(self.progress.text, self.progress.detail())
        elif self.view.trials and self.view.finished is None:
            self._idle_since_s = self._idle_since_s or elapsed_s
            if elapsed_s - self._idle_since_s >= SILENT_S:
                self._status.show("choosing the next trial", f" · {elapsed_s - self._idle_since_s:.0f} s")
            return
        self._idle_since_s = 0.0
        if not self.view.running or elapsed_s - self._last_line_s < HEARTBEAT_S:
            return
        running = ", ".join(f"#{trial.number} {trial.stage}" for trial in self.view.running)
        facts = [running, f"{len(self.view.done)} done"]
        if (best := self.view.best) is not None:
            facts.append(f"best #{best.number} {formatting.outcome(best)}")
        if (eta_s := self.view.eta_s(elapsed_s)) is not None:
            facts.append(f"~{formatting.clock(eta_s)} left")
        self._print(f"… {formatting.clock(elapsed_s)}  {' · '.join(facts)}", "dim", elapsed_s)

    def prints_kept_apart(self) -> contextlib.AbstractContextManager[None]:
        """Keep lines that user code prints apart from the status line."""
        return prints_kept_apart(self._status)

    def close(self) -> None:
        """Print pending lines."""
        self._flush_pruned()
        self._status.close()

    def _present(self, elapsed_s: float) -> tuple[str, str]:
        """Return subject and detail of the running trials."""
        numbers = ", ".join(f"#{each.number}" for each in self.view.running)
        stages = ", ".join(each.stage for each in self.view.running)
        newest = self.view.running[-1]
        used = f" · {format_bytes(newest.device_bytes)}" if newest.device_bytes is not None else ""
        count = f" · {self.view.trials_done} done"
        eta_s = self.view.eta_s(elapsed_s)
        left = f" · ~{formatting.clock(eta_s)} left" if eta_s is not None else ""
        return f"  {numbers}", f" · {stages}{used}" + (f"{count}{left}" if self._status.redraws else "")

    def _trial(self, trial: TrialView) -> None:
        if not self._headed:
            self._headed = True
            self._print_row(_HEAD, "setting", lambda cell, text: self._paint(text, "dim"))
        result = trial.result
        cells = (
            str(trial.number),
            formatting.clip(trial.label or "search", 15),
            STATUS_TEXT[trial.status],
            trial.micro_batches,
            formatting.maybe_seconds(result.step_s if result else None),
            formatting.rate(result.samples_per_s if result else None),
            formatting.maybe_bytes(result.peak_allocated_bytes if result else None),
            formatting.percent(trial.peak_error, signed=True),
        )
        color = formatting.STATUS_COLOR[trial.status]
        reason = f" – {formatting.clip(trial.reason, 100)}" if trial.status != "ok" and trial.reason else ""
        self._print_row(
            cells,
            f"{self.view.setting(trial)}{reason}",
            lambda cell, text: self._paint(text, color) if cell == _HEAD.index("result") else text,
        )

    def _print_row(self, cells: Sequence[str], setting: str, paint: Callable[[int, str], str]) -> None:
        """Print the cells of a row and its setting: behind them, or below where a terminal is narrow."""
        gap = "  " if self._width is None or self._width >= _TWO_BLANKS else " "
        texts = [f"{text:{cell}}" for text, cell in zip(cells, _CELLS, strict=True)]
        row = gap.join(paint(cell, text) for cell, text in enumerate(texts))
        indent = len(gap.join(texts)) + 2
        if self._width is None:
            lines = [f"{row}  {setting}"]
        elif self._width >= _ONE_LINE:
            first, *more = formatting.wrapped(setting, self._width - indent)
            lines = [f"{row}  {first}", *(" " * indent + each for each in more)]
        else:
            lines = [row, *formatting.wrapped(" " * _BELOW + setting, self._width, _BELOW)]
        self._last_line_s = self.view.elapsed_s
        for line in lines:
            self._status.print(line)

    def _flush_pruned(self) -> None:
        if not self._pruned:
            return
        first, lowest = self._pruned[0], min(self._pruned, key=lambda pruned: pruned.peak_low_bytes)
        what = (
            first.summary or first.reason
            if len(self._pruned) == 1
            else formatting.plural(len(self._pruned), "candidate")
        )
        self._print(
            f"pruned {what}: at least {format_bytes(lowest.peak_low_bytes)} predicted, limit"
            f" {format_bytes(lowest.budget_bytes)}"
        )
        self._pruned = []

    def _paint(self, line: str, color: str) -> str:
        return f"\x1b[{_ANSI[color]}m{line}\x1b[0m" if self._color else line

    def _print(self, text: str, color: str = "", elapsed_s: float | None = None) -> None:
        self._last_line_s = self.view.elapsed_s if elapsed_s is None else elapsed_s
        for line in [text] if self._width is None else formatting.wrapped(text, self._width):
            self._status.print(self._paint(line, color) if color else line)


def with_lines(
    search: Callable[[], T], log_path: str | Path, control: Control, printer: LinePrinter | None = None
) -> T:
    """Run `search` in this thread while another prints its event log; returns or raises what `search` does.

    The first Ctrl-C or SIGTERM asks `control` for an orderly end, the second raises KeyboardInterrupt.
    """
    printer, tail, over = printer or LinePrinter(), LogTail(log_path), threading.Event()
    progress, printer.view.writer = printer.progress or Progress(), os.getpid()

    def follow() -> None:
        while True:
            last = over.wait(0.25)
            for event in tail.poll():
                printer.apply(event)
            if last:
                return printer.close()
            printer.tick(printer.view.now_s())

    thread = threading.Thread(target=follow, name="memtune-lines", daemon=True)
    thread.start()
    try:
        with control.catch_signals(), reported_to(progress), printer.prints_kept_apart():
            return search()
    finally:
        progress.end()
        over.set()
        thread.join()


def summary_lines(
    view: SearchView,
    see_why: str = "",
    color: bool = False,
    *,
    go_on: str = "",
    pictures: str = "",
    width: int | None = None,
) -> list[str]:
    """Return the last lines of a finished search: the config written, its gain, and the next commands.

    Args:
        view: The finished search.
        see_why: The command that shows more; omitted if empty.
        go_on: The command that resumes a search which was interrupted; omitted if empty.
        pictures: The command that writes the report; omitted if empty.
        color: Whether to use ANSI colours.
        width: Columns of the terminal; commands, which are copied, are not wrapped.
    """
    finished, best = view.finished, view.best
    if finished is None:
        return []
    if finished.out is None or best is None or best.result is None:
        sign = "\x1b[31m✘\x1b[0m" if color else "✘"
        lines = [f"{sign} {finished.message or 'no config was written'}"]
        return lines + ([f"  go on      {go_on}"] if go_on and _is_partial(view) else [])
    partial, out = _is_partial(view), formatting.short_path(finished.out)
    sign = "◐" if partial else "✔"
    sign = f"\x1b[{_ANSI['yellow' if partial else 'green']}m{sign}\x1b[0m" if color else sign
    plain = next((baseline for baseline in view.baselines if baseline.name == "plain"), None)
    against = (
        f" (plain: {formatting.baseline_outcome(view, plain)})"
        if plain is not None and plain.summary != best.summary
        else ""
    )
    peak = f"peak {formatting.maybe_bytes(best.result.peak_allocated_bytes)}"
    rate = (
        formatting.outcome(best)
        if finished.samples_per_s is None
        else f"{formatting.rate(finished.samples_per_s)} samples/s"
    )
    facts = [
        f"{out}  {rate}{against}",
        peak + (f" of {format_bytes(view.budget_bytes)}" if view.budget_bytes else ""),
    ]
    facts += [wear] if (wear := formatting.wear(best.result)) else []
    facts += ["checked in a fresh process"] if finished.confirmed else []
    lines = _folded(f"{sign} {_partly(view)} {out} is the best so far", width, 2) if partial else []
    lines += _folded(f"{' ' if partial else sign} {' · '.join(facts)}", width, 2)
    execution = best.settings.get("execution") or {}
    batches = execution.get("micro_batch"), execution.get("accumulate", 1)
    lines += _folded(f"  setting    {formatting.with_batches(best.sentence, *batches)}", width, 13)
    lines += [f"  go on      {go_on}"] if go_on and partial else []
    lines += _folded(f"  {finished.message}", width, 2) if finished.message and not partial else []
    lines.append(f"  use it     {view.apply_call(out)}")
    lines += [f"  see why    {see_why}"] if see_why else []
    return lines + ([f"  pictures   {pictures}"] if pictures else [])


def _folded(text: str, width: int | None, indent: int) -> list[str]:
    return [text] if width is None else formatting.wrapped(text, width, indent)


def _is_partial(view: SearchView) -> bool:
    return view.finished is not None and view.finished.status in ("interrupted", "stopped")


def _partly(view: SearchView) -> str:
    """Return how far an interrupted search came: `interrupted after 3 of 8 trials, not confirmed:`."""
    assert view.finished is not None
    confirmed = "" if view.finished.confirmed else ", not confirmed in a fresh process"
    return f"{view.finished.status} after {view.trials_done}{confirmed}:"


def _by_slot(names: Iterable[str]) -> str:
    """Return `recompute coop, dtr · allocator async` for `recompute: coop`, `recompute: dtr` and so on."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        slot, _, kind = name.partition(": ")
        kinds.setdefault(slot, []).append(kind)
    return " · ".join(f"{slot} {', '.join(each)}" for slot, each in kinds.items())
