"""Trials and their results: the only data exchanged between the search and the processes that run trials."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from memtune.executors.gradient_record import GradientRecord
from memtune.hardware import OpTime

Status = Literal["ok", "oom", "timeout", "crash", "unfit"]

CAPACITY_ERRORS = ("MT362", "MT366")
"""Environment errors that are the config's fault: it needs more SSD or host memory than there is."""
HOST_MEMORY_RAN_OUT = "the memory of the host had run out"
"""In the reason of a crash."""
AMOUNT_REFUSALS = (*CAPACITY_ERRORS, "MT337")
"""Refusals because of an amount: other knobs of the same techniques may fit."""

PEER_FAILURE = "MT377"
"""Error code of a rank whose collective failed because another rank had ended."""


class Trial(BaseModel):
    """One candidate to build and measure for real, as plain data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    workload: str
    """`path/to/model.py` or `path/to/model.py:name`."""
    config: dict[str, Any]
    """A full TunedConfig document: `settings`, and `plan` where a technique needs one."""
    device: str = "cpu"
    """Torch's device type."""
    ranks: int = 1
    budget_bytes: int | None = None
    """Device bytes per rank; exceeding them ends the trial as `oom`."""
    warmup_steps: int = 2
    """Not timed: the second step is the first with both activations and state, so it touches new memory."""
    steps: int = 3
    """Measured steps after the warm-up."""
    seed: int = 0
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; None for the workload's own."""
    deadline_s: float = 300.0
    fingerprint: bool = True
    """Hash the gradients of the first step."""
    gradient_steps: int = 0
    """Number of first steps of which to report every gradient (`TrialResult.gradients`)."""
    deterministic: bool = False
    """Use torch's deterministic algorithms where they exist."""
    clock_ops: bool = False
    """Run one more step with a clock around every op, whose times rank 0 reports; not with torch.compile."""
    dropout: bool = True
    """False disables dropout, so that runs that split their batch differently can be compared."""
    alone: bool = False
    """No other trial runs meanwhile, so it gets the whole machine instead of its share."""
    env: dict[str, str] = {}
    """Environment of the trial's processes in addition to the parent's (from `Technique.env`)."""


class Report(BaseModel):
    """Fields of a rank's report of a trial, and of the trial's result for all ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Status
    reason: str = ""
    """One line for display: what ran out, which rank failed with what, how long it hung."""
    code: str = ""
    """Code of the memtune error that ended it (`MT366`), otherwise empty."""
    raised_at: str = ""
    """Module and line in memtune where that error was raised."""
    exit_code: int = 0
    """Exit code of that error if a drive or the machine was at fault and not the config; otherwise 0."""
    peak_allocated_bytes: int | None = None
    """Over all steps; largest over ranks."""
    peak_reserved_bytes: int | None = None
    host_peak_bytes: int | None = None
    step_s_all: list[float] = []
    losses: list[float] = []
    """Global loss of each step, warm-up included."""
    gradients_sha256: str | None = None
    gradients: list[dict[str, GradientRecord]] = []
    """Of the first steps, by parameter; only if the trial requested it."""
    memory_by_kind: dict[str, int] = {}
    """Device bytes by kind at the peak of the rank with the largest one."""
    op_times: list[OpTime] = []
    """Times of ops by class and size on rank 0; only if the trial requested it."""
    audit: dict[str, Any] = {}
    link_bytes: dict[str, int] = {}
    """Bytes moved per step and rank by link: host_to_device, device_to_host, collective."""
    other_load: float = 0.0
    """Share of the machine's cores in use by others while steps were measured; largest over ranks."""
    rates: dict[str, float] = {}
    """Constants of `Hardware` that the ranks measured together; only if the trial requested `clock_ops`."""
    reference_s: float = 0.0
    """Time of a fixed product after the measured steps, largest over ranks: tells unequal machines."""


class TrialResult(Report):
    """Result of a trial. Out of memory, a crash and a hang are results like any other."""

    number: int
    log_tail: str = ""
    """Last lines of the failing rank's output."""
    step_s: float | None = None
    """Median over the measured steps of the slowest rank's time."""
    samples_per_s: float | None = None
    wall_s: float = 0.0
    retried: bool = False

    @property
    def refusal(self) -> str | None:
        """Return a key of the reason of a refusal or crash, without the numbers and names of its message.

        None if nothing was refused, or only an amount; host memory is one, and another process may kill any
        trial.
        """
        if self.status == "crash":
            is_own = not self.retried and HOST_MEMORY_RAN_OUT not in self.reason
            return self.crash_cause if is_own else None
        refused = self.status == "unfit" and self.code and self.code not in AMOUNT_REFUSALS
        return f"{self.code} {self.raised_at}" if refused else None

    @property
    def crash_cause(self) -> str | None:
        """Return the reason of a crash without addresses, sizes and ids, which differ between equal ones."""
        return re.sub(r"[0-9]+", "#", self.reason) if self.status == "crash" else None

    @property
    def spread_s(self) -> float:
        """Return half the range of the measured steps, the uncertainty of `step_s`."""
        return (max(self.step_s_all) - min(self.step_s_all)) / 2 if self.step_s_all else 0.0


class Progress(BaseModel):
    """A heartbeat of a running trial."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    stage: str
    """`starting`, `building`, `step 3/8`."""
    device_bytes: int | None = None


class Executor(Protocol):
    """Runs trials in fresh processes; `submit` returns at once, `wait` yields events."""

    name: str
    slots: int
    """Number of trials that run at the same time."""
    measures: bool
    """False if results are computed: gradients are not compared, and later searches learn nothing."""

    def submit(self, trial: Trial) -> None:
        """Start `trial`; never raises errors of the trial itself."""
        ...

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        """Yield events since the last call, waiting up to `timeout_s` for the first one."""
        ...

    def cancel(self, number: int) -> None:
        """End a running trial and all its processes; it yields no result."""
        ...

    def close(self) -> None:
        """End all running trials; no process survives."""
        ...
