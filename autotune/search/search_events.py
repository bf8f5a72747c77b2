"""Events of a search, as an append-only JSON Lines file.

The only source of the display, the report and `watch`.

One event per line; the first line names the schema. A line without its newline is torn (the writer died while
writing): readers skip it and the next writer truncates it, so a crash at any byte loses at most the event
being written.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from memtune.errors import EnvironmentFault
from memtune.executors import TrialResult

SCHEMA_VERSION = 1
Role = Literal["baseline", "search", "audit", "confirm", "repeat"]
"""Never-worse-than check, search, pruned candidate run anyway, winner in a fresh process, repeat."""


class _Event(BaseModel):
    # Fields of a newer version are dropped, not refused: an old `watch` still shows a new search.
    model_config = ConfigDict(frozen=True, extra="ignore")

    t: float = 0.0
    """Wall clock, seconds since 1970; for display only. Set by `EventLog.write`."""
    elapsed_s: float = 0.0
    """Seconds since the search started, monotonic over resumes. Set by `EventLog.write`."""


class LogOpened(_Event):
    """First line of every log, and written again each time a search resumes into it."""

    event: Literal["log_opened"] = "log_opened"
    schema_version: int = SCHEMA_VERSION
    pid: int = 0


class SearchStarted(_Event):
    """Workload, target and limits of the search."""

    event: Literal["search_started"] = "search_started"
    study: str
    workload: str
    device: str
    ranks: int = 1
    slots: int = 1
    """Number of concurrent trials."""
    executor: str = "local"
    goal: str = "throughput"
    budget_bytes: int | None = None
    """Device bytes per rank."""
    max_trials: int | None = None
    time_limit_s: float | None = None
    seed: int = 0
    n_parameters: int | None = None
    parameter_bytes: int | None = None
    global_batch: int | None = None
    hardware: str = ""
    """Display name of the device: `H100-80GB`, `2 CPU cores`."""


class Recorded(_Event):
    """The user's step was recorded on fake tensors (or on a higher recording rung)."""

    event: Literal["recorded"] = "recorded"
    rung: str
    record_s: float
    n_ops: int
    blocks: int
    plain_peak_bytes: int
    """Predicted peak of the unchanged model."""


class CandidatesScored(_Event):
    """The simulator has scored the candidates."""

    event: Literal["candidates_scored"] = "candidates_scored"
    n_candidates: int
    n_merged: int = 0
    """Candidates with the same canonical settings as another."""
    n_pruned: int = 0
    n_unfit: int = 0
    score_s: float = 0.0
    refused: dict[str, int] = {}
    """Number of candidates that some technique refused, by reason."""
    not_used: dict[str, str] = {}
    """Techniques (`slot: kind`) in no candidate, with the reason."""


class TrialPruned(_Event):
    """A candidate is not run: even the lower end of its predicted peak exceeds the budget."""

    event: Literal["trial_pruned"] = "trial_pruned"
    number: int
    settings: dict[str, Any] = {}
    summary: str = ""
    predicted_peak_bytes: int
    peak_low_bytes: int
    budget_bytes: int
    reason: str = ""


class _OfTrial(_Event):
    number: int
    role: Role = "search"
    name: str = ""
    """Name of a baseline (`plain`, `full recompute`); empty for candidates of the search."""
    settings: dict[str, Any] = {}
    """As in `tuned.yaml`."""
    summary: str = ""
    """The settings in one short line."""
    predicted_peak_bytes: int | None = None
    """Peak allocated device bytes of the heaviest rank."""
    predicted_step_s: float | None = None


class TrialStarted(_OfTrial):
    """A trial was given to the executor."""

    event: Literal["trial_started"] = "trial_started"


class TrialProgress(_Event):
    """A heartbeat of a running trial."""

    event: Literal["trial_progress"] = "trial_progress"
    number: int
    stage: str
    device_bytes: int | None = None


def _known_fields(value: Any) -> Any:
    """Drop fields of a newer TrialResult, as for newer events."""
    return (
        {key: value[key] for key in value if key in TrialResult.model_fields}
        if isinstance(value, dict)
        else value
    )


class TrialFinished(_OfTrial):
    """A trial has its result; the log is flushed to disk before anything else happens."""

    event: Literal["trial_finished"] = "trial_finished"
    result: Annotated[TrialResult, BeforeValidator(_known_fields)]


class TrialCancelled(_Event):
    """A running trial was ended by the user or by the end of the search and has no result."""

    event: Literal["trial_cancelled"] = "trial_cancelled"
    number: int
    reason: str = ""


class BestChanged(_Event):
    """Another trial is now the best."""

    event: Literal["best_changed"] = "best_changed"
    number: int
    summary: str = ""
    samples_per_s: float | None = None
    peak_bytes: int | None = None


class Calibrated(_Event):
    """Predictions were calibrated by the trials so far; errors are medians of absolute relative errors."""

    event: Literal["calibrated"] = "calibrated"
    peak_error: float | None = None
    step_error: float | None = None
    n_trials: int = 0


class Paused(_Event):
    """No new trial starts until `Resumed`."""

    event: Literal["paused"] = "paused"


class Resumed(_Event):
    """Trials start again."""

    event: Literal["resumed"] = "resumed"


class Note(_Event):
    """One line of text that belongs to no trial."""

    event: Literal["note"] = "note"
    text: str
    level: Literal["info", "warning", "detail"] = "info"
    """`detail`: of interest to those who ask for it."""


class SearchFinished(_Event):
    """The search is over; `out` is the config written, if one was."""

    event: Literal["search_finished"] = "search_finished"
    status: Literal["done", "stopped", "interrupted", "nothing_fits", "failed"]
    out: str | None = None
    best_number: int | None = None
    samples_per_s: float | None = None
    """Of the best, from all deciding runs, not just its first."""
    baselines: dict[str, float] = {}
    """Name → samples/s from all its runs, of each baseline that ran to its end."""
    confirmed: bool = False
    """The best was run again in a fresh process and was confirmed."""
    message: str = ""


class Unknown(_Event):
    """An event of a newer version, or an unreadable line; kept in the log, ignored by the view."""

    event: str
    raw: str


Event = (
    LogOpened
    | SearchStarted
    | Recorded
    | CandidatesScored
    | TrialPruned
    | TrialStarted
    | TrialProgress
    | TrialFinished
    | TrialCancelled
    | BestChanged
    | Calibrated
    | Paused
    | Resumed
    | Note
    | SearchFinished
)
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
_DURABLE = (LogOpened, TrialFinished, SearchFinished)
_SUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\s*$')
"""CRC-32 of what is before it in the line."""
_FIRST_BYTES = b'{"event":"log_opened"'


def parse_event(line: bytes) -> Event | Unknown:
    """Parse one line into an event; lines that this version cannot read become `Unknown` with their text."""
    # So do lines whose checksum is wrong: their text is kept, and nothing of it is used.
    found = _SUM.search(line)
    if found is not None and int(found[1], 16) != zlib.crc32(line[: found.start()]):
        return Unknown(event="unreadable", raw=line.decode("utf-8", errors="replace"))
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError:
        text = line.decode("utf-8", errors="replace")
    try:
        kind = json.loads(text)["event"]
    except (ValueError, KeyError, TypeError):
        kind = "unreadable"
    return Unknown(event=str(kind), raw=text)


def _plain(value: Any) -> Any:
    """Return data that JSON can hold."""
    # A diverged loss becomes text, because null would not be read as a float.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _line(event: Event) -> bytes:
    # The kind comes first so that a log is recognizable among other files, and readable by eye.
    body = {"event": event.event, "t": round(event.t, 3), "elapsed_s": round(event.elapsed_s, 3)}
    body |= _plain(event.model_dump(exclude={"event", "t", "elapsed_s"}))
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    line = text.encode().removesuffix(b"}")
    return line + b',"crc32":"%08x"}\n' % zlib.crc32(line)


class EventLog:
    """The one writer of a log: events are visible to readers at once.

    Ends of trials and searches are flushed to disk.

    An existing log is continued: a torn last line is truncated, `elapsed_s` continues from the last event.

    Args:
        path: The file; its folder is created if missing.
        began_s: Start of `elapsed_s` in a new log, on the monotonic clock; now by default.

    Raises:
        EnvironmentFault: The file cannot be written, or it exists and is no event log.
    """

    def __init__(self, path: str | Path, began_s: float | None = None) -> None:
        self.path = Path(path)
        self._start_s = time.monotonic() if began_s is None else began_s
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.fchmod(self._file, 0o600)  # it holds the output of trials
            self._end = self._cut_torn_tail()
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self.write(LogOpened(pid=os.getpid()))

    def _cut_torn_tail(self) -> int:
        content = self.path.read_bytes()
        if not content.startswith(_FIRST_BYTES[: len(content)]):
            raise EnvironmentFault(
                f"{self.path} exists and is not an event log of memtune.",
                fix="choose another name",
                code="MT403",
            )
        end = content.rfind(b"\n") + 1
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        if end:
            last = content[content.rfind(b"\n", 0, end - 1) + 1 : end]
            self._start_s -= parse_event(last).elapsed_s
        return end

    def write(self, event: Event) -> Event:
        """Append `event` with the current time and return it; raise EnvironmentFault on a disk error."""
        event = event.model_copy(update={"t": time.time(), "elapsed_s": time.monotonic() - self._start_s})
        line = _line(event)
        try:
            done = 0
            while done < len(line):
                done += os.write(self._file, line[done:])
            if isinstance(event, _DURABLE):
                os.fsync(self._file)
        except OSError as error:
            # A full disk may have taken half a line; what comes later must not fuse with it.
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
            raise _cannot_write(self.path, error) from error
        self._end += len(line)
        return event

    def close(self) -> None:
        """Close the file; writing afterwards is an error."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> EventLog:
        """Return the log itself; it is closed on exit."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the log."""
        self.close()


def _cannot_write(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"The event log {path} cannot be written.",
        evidence=str(error),
        fix="free space or choose another folder; finished trials are in the study",
        code="MT403",
    )


class LogTail:
    """Reads a log that may still grow; `poll` never waits. A missing log counts as empty."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0

    def poll(self) -> list[Event | Unknown]:
        """Return the complete lines since the last call; a partial last line is left for the next call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        end = content.rfind(b"\n") + 1
        self._offset += end
        return [parse_event(line) for line in content[:end].split(b"\n") if line.strip()]


def read_events(path: str | Path) -> list[Event | Unknown]:
    """Return all events of the log at `path` in order, without a torn last line."""
    return LogTail(path).poll()
