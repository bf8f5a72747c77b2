"""Monitor the ranks of a running trial and decide when and how it has ended.

Rules:

1. The first failure ends the trial for all ranks, after a short wait for other evidence: a rank whose peer
  vanished may be heard before the peer's death is.
2. A rank is done when it has reported its record. The exit of its process afterwards changes nothing, and may
  not take long.
3. No trial outlives its deadline, which does not count time without a core for its ranks. Once
  steps are made, silence as long as many steps is a hang already.
4. A trial ended from outside is repeated once in fresh processes; any other failure would recur.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from memtune.executors.base import Progress, Trial, TrialResult
from memtune.executors.merge_results import (
    Failure,
    RankExit,
    RankRecord,
    failed,
    failure_of_end,
    failure_of_record,
    merge,
    read_record,
    root_failure,
)

SETTLE_S = 0.2
"""Wait for other evidence after the first failure (rule 1)."""
EXIT_S = 5.0
"""Time for processes to exit after all records are there (rule 2)."""
GRACE_S = 5.0
"""Time for a hanging rank to dump its stacks and end, before it is killed."""
SILENT_STEPS = 20
SILENCE_S: float = 60.0
"""A rank that is silent for longer than this and than `SILENT_STEPS` steps has hung (rule 3)."""


@dataclass(frozen=True)
class Line:
    """A line that a rank reported."""

    rank: int
    line: dict[str, Any]
    at: float
    """Seconds since the epoch, by the clock of the rank's machine."""


@dataclass(frozen=True)
class RankLost:
    """The host process of a rank is gone, and the rank with it."""

    rank: int
    what: str


@dataclass(frozen=True)
class Leftovers:
    """Processes that outlived their ranks and were killed."""

    names: tuple[str, ...]


Event = Line | RankExit | RankLost | Leftovers


class Ranks(Protocol):
    """The running processes of one trial."""

    @property
    def gone(self) -> bool:
        """Return whether all processes have ended and all events were returned."""
        ...

    @property
    def core_wait_s(self) -> float:
        """Return the longest time for which a process has waited for a core; 0 if unknown."""
        ...

    def events(self, timeout_s: float) -> list[Event]:
        """Return events since the last call, waiting up to `timeout_s` for the first."""
        ...

    def stop(self, *, dump: bool, grace_s: float) -> None:
        """Ask all processes to end, at once: dump stacks if `dump`, then TERM, then KILL after the grace."""
        ...

    def close(self) -> None:
        """Kill remaining processes and return when none is left; may be called twice."""
        ...


@dataclass
class _Rank:
    heard_s: float
    n_lines: int = 0
    last_line_at: float = 0.0
    stage: str = "starting"
    step_heard_s: float | None = None
    record: RankRecord | None = None
    ended: bool = False
    tail: str = ""

    @property
    def pending(self) -> bool:
        return self.record is None and not self.ended

    @property
    def blame(self) -> tuple[int, bool, float]:
        """Return a sort key that is smallest for the rank that stopped first.

        Least progress, not waiting for others, earliest last line.
        """
        return (
            self.n_lines,
            # A rank in a collective waits for the one that stopped.
            "torch/distributed/" in self.tail.rpartition("Fatal Python error: Aborted")[2],
            self.last_line_at,
        )


@dataclass
class TrialMonitor:
    """State of a running trial; times are those of the monotonic clock."""

    trial: Trial
    start_s: float
    silence_s: float = SILENCE_S
    ranks: dict[int, _Rank] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    failed_s: float | None = None
    recorded_s: float | None = None
    longest_step_s: float = 0.0
    core_wait_s: float = 0.0
    """Time for which other load kept a rank from running; it moves the deadline."""
    hang: tuple[str, list[int]] | None = None
    """The evidence of a hang, and the ranks that had not ended then."""
    decided: bool = False
    """From here on ranks end because they are stopped; their last reports are kept, but are no failures."""

    def __post_init__(self) -> None:
        self.ranks = {rank: _Rank(self.start_s) for rank in range(self.trial.ranks)}

    @property
    def deadline_s(self) -> float:
        """Return when the trial ends, done or not."""
        return self.start_s + self.trial.deadline_s + self.core_wait_s

    def take(self, event: Event, now_s: float) -> Progress | None:
        """Process an event; return a new stage of rank 0 as progress."""
        match event:
            case Leftovers():
                self.leftovers += event.names
            case RankLost():
                self._end(event.rank, Failure(event.rank, "crash", event.what, lost=True, root=True), now_s)
            case RankExit():
                self.ranks[event.rank].tail = event.tail
                self._end(event.rank, failure_of_end(event), now_s)
            case Line():
                return self._hear(event, now_s)
        return None

    def _end(self, rank: int, failure: Failure, now_s: float) -> None:
        state = self.ranks[rank]
        # A rank that has reported may end in any way (rule 2).
        if state.pending:
            self._fail(failure, now_s)
        state.ended = True

    def _fail(self, failure: Failure, now_s: float) -> None:
        if not self.decided:
            self.failures.append(failure)
        # The first failure starts the wait; later ones do not prolong it.
        self.failed_s = self.failed_s or now_s

    def _hear(self, report: Line, now_s: float) -> Progress | None:
        """Note a line of a rank; return progress for the screen, if it is any."""
        state, line = self.ranks[report.rank], report.line
        state.heard_s, state.last_line_at, state.n_lines = now_s, report.at, state.n_lines + 1
        if "result" in line and state.record is None:
            record = read_record(report.rank, line["result"])
            # A record that cannot be read is a crash of its rank; one that can may report a failure itself.
            failure = record if isinstance(record, Failure) else failure_of_record(report.rank, record)
            state.record = RankRecord(status="crash") if isinstance(record, Failure) else record
            if failure:
                self._fail(failure, now_s)
            if all(other.record for other in self.ranks.values()):
                self.recorded_s = now_s
        elif isinstance(stage := line.get("stage"), str):
            state.stage = stage
            if stage.startswith("step"):
                # The longest: after one slow step the next silence is no hang.
                self.longest_step_s = max(self.longest_step_s, now_s - (state.step_heard_s or now_s))
                state.step_heard_s = now_s
            device_bytes = line.get("device_bytes")
            if report.rank == 0:
                size = device_bytes if isinstance(device_bytes, int) else None
                return Progress(number=self.trial.number, stage=stage, device_bytes=size)
        return None

    def over(self, now_s: float) -> bool:
        """Return whether the trial is over; detects hangs."""
        if self.failed_s is not None:
            # Nothing more can be heard once all ranks have ended.
            return now_s >= self.failed_s + SETTLE_S or not any(
                state.pending for state in self.ranks.values()
            )
        if self.recorded_s is not None:
            return now_s >= self.recorded_s + EXIT_S
        pending = [rank for rank, state in self.ranks.items() if state.pending]
        quietest = min((self.ranks[rank] for rank in pending), key=lambda state: state.heard_s, default=None)
        if quietest is None:
            return False
        quiet_s = now_s - quietest.heard_s
        if now_s >= self.deadline_s:
            self.hang = f"the trial was not done after its {self.trial.deadline_s:g} s", pending
        elif quietest.step_heard_s is not None and quiet_s >= max(
            self.silence_s, SILENT_STEPS * self.longest_step_s
        ):
            self.hang = f"it gave no sign of life for {quiet_s:.0f} s", pending
        return self.hang is not None

    @property
    def lost(self) -> bool:
        """Return whether another try is worthwhile (rule 4)."""
        return bool(self.failures) and root_failure(self.failures).lost

    def _hung(self, how: str, pending: list[int]) -> Failure:
        # Others only wait for the one that stopped, so their stacks show a collective.
        first = min(pending, key=lambda rank: self.ranks[rank].blame)
        rank_text = "stopped first" if len(pending) > 1 else "was last heard"
        return Failure(first, "timeout", f"{rank_text} at '{self.ranks[first].stage}'; {how}")

    def result(self, now_s: float) -> TrialResult:
        """Return the result, once it is over."""
        wall_s = now_s - self.start_s
        if self.hang or self.failures:
            failure = self._hung(*self.hang) if self.hang else root_failure(self.failures)
            return failed(self.trial, failure, self.ranks[failure.rank].tail, wall_s)
        records = {rank: state.record for rank, state in self.ranks.items() if state.record}
        return merge(self.trial, records, wall_s, self.leftovers)


def run_once(
    trial: Trial,
    start: Callable[[], Ranks],
    on_progress: Callable[[Progress], None],
    cancelled: threading.Event,
    silence_s: float,
) -> TrialMonitor | None:
    """Start the ranks once and monitor them to their end; return None if `cancelled` was set.

    No process is left.
    """
    on_progress(Progress(number=trial.number, stage="starting"))
    ranks = start()
    watch = TrialMonitor(trial, time.monotonic(), silence_s)
    try:
        while not ranks.gone and not watch.over(time.monotonic()):
            if cancelled.is_set():
                break
            if time.monotonic() >= watch.deadline_s - 1:
                # Only near the deadline: it reads a file per process.
                watch.core_wait_s = ranks.core_wait_s
            _handle_events(watch, ranks, 0.1, on_progress)
        watch.decided = True
        # The ends of the others bring the tails of their output, the stacks of a hang among them.
        if cancelled.is_set():
            return None
        ranks.stop(dump=watch.hang is not None, grace_s=GRACE_S if watch.hang else 0.0)
        stop_s = time.monotonic() + 2 * GRACE_S
        while not ranks.gone and time.monotonic() < stop_s:
            _handle_events(watch, ranks, 0.1, lambda _: None)
    finally:
        ranks.close()
    return watch


def _handle_events(
    watch: TrialMonitor, ranks: Ranks, timeout_s: float, on_progress: Callable[[Progress], None]
) -> None:
    for event in ranks.events(timeout_s):
        if progress := watch.take(event, time.monotonic()):
            on_progress(progress)


def run_monitored(
    trial: Trial,
    start: Callable[[], Ranks],
    *,
    on_progress: Callable[[Progress], None],
    cancelled: threading.Event,
    silence_s: float = SILENCE_S,
) -> TrialResult | None:
    """Run `trial` on the ranks that `start` starts, once more if they were ended from outside.

    Returns:
        The result, or None if `cancelled` was set meanwhile.
    """
    begin_s = time.monotonic()
    watch = run_once(trial, start, on_progress, cancelled, silence_s)
    # Killed by the system or the user: says nothing about the setting.
    retried = watch is not None and watch.lost and not cancelled.is_set()
    if retried:
        watch = run_once(trial, start, on_progress, cancelled, silence_s)
    if watch is None:
        return None
    now_s = time.monotonic()
    return watch.result(now_s).model_copy(update={"retried": retried, "wall_s": now_s - begin_s})
