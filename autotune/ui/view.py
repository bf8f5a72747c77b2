"""The state of a search, derived from its events: everything that the display, the lines and the report show.

It is computed by `SearchView.apply(event)` in order, so views of a finished log, of a growing one and of one
that was interrupted and resumed share one implementation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from memtune.autotune.search import (
    BestChanged,
    Calibrated,
    CandidatesScored,
    Event,
    LogOpened,
    Note,
    Paused,
    Recorded,
    Resumed,
    Role,
    SearchFinished,
    SearchStarted,
    TrialCancelled,
    TrialFinished,
    TrialProgress,
    TrialPruned,
    TrialStarted,
    Unknown,
)
from memtune.errors import ConfigError
from memtune.executors import TrialResult
from memtune.units import format_micro_batch

Shown = Literal["running", "ok", "oom", "timeout", "crash", "unfit", "cancelled"]
STATUS_TEXT: dict[str, str] = {
    "running": "running",
    "ok": "ok",
    "oom": "out of memory",
    "timeout": "timed out",
    "crash": "crashed",
    "unfit": "unfit",
    "cancelled": "ended",
}
_ETA_WINDOW = 10
"""Number of latest finished trials that the ETA is based on; earlier ones ran other kinds of settings."""
MAX_NOTES, MAX_SEEN = 200, 64


@dataclass
class TrialView:
    """The current state of one trial."""

    number: int
    role: Role
    name: str
    settings: dict[str, Any]
    summary: str
    predicted_peak_bytes: int | None
    predicted_step_s: float | None
    started_s: float
    status: Shown = "running"
    stage: str = "starting"
    device_bytes: int | None = None
    bytes_seen: list[int] = field(default_factory=list)
    """Device bytes at each sign of life, oldest first."""
    reason: str = ""
    finished_s: float | None = None
    result: TrialResult | None = None

    @cached_property
    def sentence(self) -> str:
        """The techniques as clauses that a user can read; the short summary for a newer version's."""
        from memtune.config import load_config

        if not self.settings:
            return self.summary
        try:
            return load_config({"settings": self.settings}).settings.sentence
        except ConfigError:
            return self.summary

    @property
    def micro_batches(self) -> str:
        """Return `4`, or `2×4` for four micro-batches of two samples; empty if unknown."""
        execution = self.settings.get("execution") or {}
        return format_micro_batch(execution.get("micro_batch"), execution.get("accumulate", 1))

    @property
    def label(self) -> str:
        """Return a baseline's name, else the role unless it is plain search."""
        return self.name or ("" if self.role == "search" else self.role)

    @property
    def peak_error(self) -> float | None:
        """Return (predicted - measured) / measured peak allocated bytes."""
        measured = self.result.peak_allocated_bytes if self.result and self.status == "ok" else None
        return _relative(self.predicted_peak_bytes, measured)

    @property
    def step_error(self) -> float | None:
        """Return (predicted - measured) / measured step time."""
        return _relative(
            self.predicted_step_s, self.result.step_s if self.result and self.status == "ok" else None
        )


class Point(NamedTuple):
    """One setting in the scatter of throughput against memory."""

    number: int
    peak_bytes: int
    samples_per_s: float
    role: Role


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return (predicted - measured) / measured if predicted is not None and measured else None


def _median_size(errors: list[float | None]) -> float | None:
    known = [abs(error) for error in errors if error is not None]
    return statistics.median(known) if known else None


@dataclass
class SearchView:
    """A search, accumulated from its events."""

    started: SearchStarted | None = None
    recorded: Recorded | None = None
    scored: CandidatesScored | None = None
    finished: SearchFinished | None = None
    trials: dict[int, TrialView] = field(default_factory=dict)
    pruned: list[TrialPruned] = field(default_factory=list)
    best_number: int | None = None
    best_changed: BestChanged | None = None
    calibrated: Calibrated | None = None
    paused: bool = False
    abandoned: bool = False
    """True if its process ended without a last event."""
    notes: list[Note] = field(default_factory=list)
    elapsed_s: float = 0.0
    last_t: float = 0.0
    opened_t: float = field(default_factory=time.time, compare=False)
    """Wall clock when the view was opened; the log begins only after recording and scoring."""
    heading: str = field(default="", compare=False)
    """Model, devices, limit and goal, known before the log is."""
    pid: int = 0
    """Process that wrote the last part of the log; 0 if unknown."""
    writer: int = field(default=0, compare=False)
    """Process of the search that the display belongs to; 0 for any, as in `memtune watch`."""
    changes: int = 0
    """Incremented by every event with an effect, so that a display can skip redrawing."""

    def apply(self, event: Event | Unknown) -> None:
        """Apply the next event."""
        if isinstance(event, Unknown):
            return
        self.elapsed_s, self.last_t = max(self.elapsed_s, event.elapsed_s), event.t
        self.changes += 1
        match event:
            case TrialStarted() | TrialFinished() | TrialProgress() | TrialCancelled():
                self._apply_trial(event)
            case TrialPruned():
                self.pruned.append(event)
            case BestChanged():
                self.best_number, self.best_changed = event.number, event
            case Paused() | Resumed():
                self.paused = isinstance(event, Paused)
            case Note():
                self.notes = [*self.notes, event][-MAX_NOTES:]
            case LogOpened():
                self._reopen(event)
            case SearchStarted():
                self.started = event
            case Recorded():
                self.recorded = event
            case CandidatesScored():
                self.scored = event
            case Calibrated():
                self.calibrated = event
            case SearchFinished():
                self.finished, self.paused = event, False
                self.best_number = event.best_number if event.best_number is not None else self.best_number

    def _apply_trial(self, event: TrialStarted | TrialFinished | TrialProgress | TrialCancelled) -> None:
        if isinstance(event, TrialStarted | TrialFinished):
            trial = self.trials.get(event.number)
            if trial is None or isinstance(event, TrialStarted):
                trial = TrialView(
                    event.number,
                    event.role,
                    event.name,
                    event.settings,
                    event.summary,
                    event.predicted_peak_bytes,
                    event.predicted_step_s,
                    event.elapsed_s,
                )
                self.trials[event.number] = trial
            if isinstance(event, TrialFinished):
                trial.status = event.result.status
                trial.reason = event.result.reason
                trial.result = event.result
                trial.finished_s = event.elapsed_s
            return
        trial = self.trials.get(event.number)
        if trial is None or trial.status != "running":
            return
        if isinstance(event, TrialCancelled):
            trial.status, trial.reason, trial.finished_s = "cancelled", event.reason, event.elapsed_s
        else:
            trial.stage = event.stage
            if event.device_bytes is not None:
                trial.device_bytes = event.device_bytes
                trial.bytes_seen = [*trial.bytes_seen, event.device_bytes][-MAX_SEEN:]

    def _reopen(self, event: LogOpened) -> None:
        """Handle a resumed search: trials that ran when the last process ended have no result."""
        self.pid, self.finished, self.paused, self.abandoned = event.pid, None, False, False
        self._end_unfinished(event.elapsed_s)

    def abandon(self) -> None:
        """Record that the process of the search is gone; another one may resume it."""
        self.abandoned = True
        self.changes += 1
        self._end_unfinished(self.elapsed_s)

    def _end_unfinished(self, elapsed_s: float) -> None:
        for trial in self.unfinished:
            trial.status = "cancelled"
            trial.reason = "the search ended before it did"
            trial.finished_s = elapsed_s

    def now_s(self) -> float:
        """Return seconds since the search started: up to now while it runs, up to its end otherwise."""
        if self.finished or self.abandoned:
            return self.elapsed_s
        return self.elapsed_s + max(0.0, time.time() - (self.last_t or self.opened_t))

    def apply_call(self, out: str) -> str:
        """Return the line of a training script that applies the config `out`."""
        # A model whose weights exceed the limit must not be moved to the device before.
        started = self.started
        exceeds = started is not None and (started.parameter_bytes or 0) > (started.budget_bytes or math.inf)
        device = f', device="{started.device}"' if started is not None and exceeds else ""
        note = "  # model: on the CPU, or memtune.deferred(build)" if exceeds else ""
        return f'model, optimizer = memtune.apply(model, optimizer, "{out}"{device}){note}'

    @property
    def running(self) -> list[TrialView]:
        """Return trials that run, oldest first."""
        # A resumed search writes to the log after it has recorded the step; until then the log is that of the
        # process before, whose trials ended with it.
        return [] if self.writer and self.pid not in (0, self.writer) else self.unfinished

    @property
    def unfinished(self) -> list[TrialView]:
        """Return trials without a result, oldest first."""
        return [trial for trial in self.trials.values() if trial.status == "running"]

    @property
    def done(self) -> list[TrialView]:
        """Return trials with a result, of any status."""
        return [trial for trial in self.trials.values() if trial.result is not None]

    @property
    def n_counted(self) -> int:
        """Return the number of trials that `--trials` limits: not repeats and the confirmation."""
        return sum(trial.role not in ("repeat", "confirm") for trial in self.done)

    @property
    def trials_done(self) -> str:
        """Return `3 of 8 trials`, `8 of 8 trials and 5 repeats`: those with a result."""
        wanted = self.started.max_trials if self.started else None
        of, repeats = f" of {wanted}" if wanted else "", len(self.done) - self.n_counted
        trials = f"{self.n_counted}{of} trial{'s' * ((wanted or self.n_counted) != 1)}"
        return trials + (f" and {repeats} repeat{'s' * (repeats != 1)}" if repeats else "")

    def count(self, *statuses: Shown) -> int:
        """Return the number of trials with one of `statuses`."""
        return sum(trial.status in statuses for trial in self.trials.values())

    @property
    def n_pruned(self) -> int:
        """Return the number of candidates whose peak exceeds the budget even at its low end."""
        return max(len(self.pruned), self.scored.n_pruned if self.scored else 0)

    @property
    def baselines(self) -> list[TrialView]:
        """Return the baselines in the order in which they were started, each by its last trial that ended."""
        found: dict[str, TrialView] = {}
        for trial in self.trials.values():
            if trial.role == "baseline" and (trial.result is not None or trial.name not in found):
                found[trial.name] = trial
        return [*found.values()]

    @property
    def best(self) -> TrialView | None:
        """Return the trial that is currently best."""
        return self.trials.get(self.best_number) if self.best_number is not None else None

    @property
    def best_rate(self) -> float | None:
        """Return samples/s of the best over its repeats; at the end that of the config."""
        if self.finished is not None and self.finished.samples_per_s:
            return self.finished.samples_per_s
        return self.best_changed.samples_per_s if self.best_changed is not None else None

    def baseline_rate(self, baseline: TrialView) -> float | None:
        """Return samples/s of a baseline; at the end from all its runs, as those of the best."""
        if self.finished is not None and baseline.name in self.finished.baselines:
            return self.finished.baselines[baseline.name]
        return baseline.result.samples_per_s if baseline.result is not None else None

    def noise(self, number: int | None) -> float:
        """Return by how much a setting's rates differ, relatively: over repeats, and over steps of each."""
        trial = self.trials.get(-1 if number is None else number)
        if trial is None:
            return 0.0
        same = (trial.settings, trial.summary)
        results = [
            each.result for each in self.done if (each.settings, each.summary) == same and each.status == "ok"
        ]
        rates = [each.samples_per_s for each in results if each and each.samples_per_s]
        steps = [each.spread_s / each.step_s for each in results if each and each.step_s]
        return max(max(rates) / min(rates) - 1 if rates else 0.0, *steps, 0.0)

    def setting(self, trial: TrialView) -> str:
        """Return the clauses of a trial that are not those of the user's own setting, if any."""
        own = () if trial.name == "plain" else self.own_clauses()
        clauses = [each for each in trial.sentence.split("; ") if each not in own]
        return "; ".join(clauses) or trial.sentence

    def own_clauses(self) -> Collection[str]:
        """Return the clauses of the user's own setting, which a list need not repeat in every row."""
        plain = next((each for each in self.baselines if each.name == "plain"), None)
        return plain.sentence.split("; ") if plain is not None else self._replicas()

    def _replicas(self) -> Collection[str]:
        if self.started is None or self.started.ranks < 2:
            return ()
        from memtune.search_spaces import find

        return (find("sharding.states", "ddp")(kind="ddp").described(),)

    @property
    def budget_bytes(self) -> int | None:
        """Return device bytes per rank, None without a limit."""
        return self.started.budget_bytes if self.started else None

    @property
    def points(self) -> list[Point]:
        """Return a point per setting that fits: the number of its first trial, the median rate of all."""
        rates: dict[str, list[float]] = {}
        first: dict[str, Point] = {}
        for trial in self.done:
            peak_bytes, rate = (
                (trial.result.peak_allocated_bytes, trial.result.samples_per_s)
                if trial.result
                else (None, None)
            )
            if trial.status == "ok" and peak_bytes and rate:
                rates.setdefault(trial.summary, []).append(rate)
                point = Point(trial.number, peak_bytes, rate, trial.role)
                if trial.number == self.best_number:
                    first[trial.summary] = point  # the star is at the number that the lines above name
                first.setdefault(trial.summary, point)
        return [
            point._replace(samples_per_s=statistics.median(rates[summary]))
            for summary, point in first.items()
        ]

    @property
    def peak_error(self) -> float | None:
        """Return the median relative error of predicted peaks; None before any trial has one."""
        if self.calibrated and self.calibrated.peak_error is not None:
            return self.calibrated.peak_error
        return _median_size([trial.peak_error for trial in self.trials.values()])

    @property
    def step_error(self) -> float | None:
        """Return the median relative error of predicted step times, as `peak_error`."""
        if self.calibrated and self.calibrated.step_error is not None:
            return self.calibrated.step_error
        return _median_size([trial.step_error for trial in self.trials.values()])

    def eta_s(self, elapsed_s: float | None = None) -> float | None:
        """Return seconds until the search ends, from the latest durations and the limits; None if unknown."""
        now_s = self.elapsed_s if elapsed_s is None else elapsed_s
        if self.finished or self.started is None:
            return None
        bounds = []
        if self.started.time_limit_s is not None:
            bounds.append(self.started.time_limit_s - now_s)
        durations = [
            trial.finished_s - trial.started_s for trial in self.done if trial.finished_s is not None
        ]
        if self.started.max_trials is not None and self.n_counted < self.started.max_trials and durations:
            left_s = (self.started.max_trials - self.n_counted) * statistics.mean(durations[-_ETA_WINDOW:])
            spent_s = sum(max(0.0, now_s - trial.started_s) for trial in self.running)
            bounds.append((left_s - spent_s) / max(1, self.started.slots))
        # The limit that is reached first.
        return max(0.0, min(bounds)) if bounds else None
