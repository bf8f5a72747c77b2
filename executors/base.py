"""A trial and its result: the only things that cross between the search and the processes that run trials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from memtune.executors.evidence import GradientRecord
from memtune.runtime.op_times import OpTime

Status = Literal["ok", "oom", "timeout", "crash", "unfit"]

NO_ROOM = ("MT362", "MT366")
"""Errors of the environment that are no fault of it: a config asks for more than there is on SSD or in host memory."""
OF_AMOUNTS = (*NO_ROOM, "MT337")
"""Refusals for how much there is of something: other knobs of the same techniques may do with it."""

ECHO = "MT377"
"""What a rank says whose collective failed because another one had ended."""


class Trial(BaseModel):
    """One candidate to be built and measured for real, as plain data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    workload: str
    """`path/to/model.py` or `path/to/model.py:name`."""
    config: dict[str, Any]
    """A whole TunedConfig document: `settings`, and `plan` where a technique needs one."""
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 1
    budget_bytes: int | None = None
    """Device bytes per rank; overrun ends the trial as `oom`."""
    warmup_steps: int = 2
    """Not timed: the second step is the first with activations beside optimizer state, so memory is still touched anew."""
    steps: int = 3
    """Measured steps after the warm-up."""
    seed: int = 0
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; the workload's own when None."""
    deadline_s: float = 300.0
    fingerprint: bool = True
    """Hash the gradients of the first step."""
    gradient_steps: int = 0
    """Of so many first steps every gradient is told of (`TrialResult.gradients`)."""
    deterministic: bool = False
    """Use torch's deterministic algorithms where there are any."""
    clock_ops: bool = False
    """One more step with a clock around every op; not beside torch.compile. Of several ranks the first one tells
    (`TrialResult.op_times`)."""
    dropout: bool = True
    """Off: drop nothing, so that runs that cut their batch differently can be compared."""
    env: dict[str, str] = {}
    """Environment of the trial's processes beyond the parent's (what `Technique.env` asks for)."""


class TrialResult(BaseModel):
    """What came of a trial. Out of memory, a crash and a hang are results like any other."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    status: Status
    reason: str = ""
    """One line for people: what ran out, which rank failed with what, how long it hung."""
    code: str = ""
    """Of the error of memtune's that ended it (`MT366`), empty for all else."""
    raised_at: str = ""
    """Where in memtune that error was raised, as module and line."""
    exit_code: int = 0
    """Of that error, where the config was not at fault but a drive or the machine; 0 for all else."""
    log_tail: str = ""
    """Last lines of the failing rank's output."""
    peak_allocated_bytes: int | None = None
    """Largest over ranks, over all steps."""
    peak_reserved_bytes: int | None = None
    host_peak_bytes: int | None = None
    step_s: float | None = None
    """Median over the measured steps of the slowest rank's time."""
    step_s_all: list[float] = []
    samples_per_s: float | None = None
    losses: list[float] = []
    """Global loss of each step, warm-up included."""
    gradients_sha256: str | None = None
    gradients: list[dict[str, GradientRecord]] = []
    """Of the first steps, by parameter; only where the trial was asked for it."""
    memory_by_kind: dict[str, int] = {}
    """Device bytes of the heaviest rank at its peak: parameters, gradients, optimizer, buffers, activations and temporaries."""
    op_times: list[OpTime] = []
    """How long ops of each class and size took on rank 0; only where the trial was asked for it."""
    audit: dict[str, Any] = {}
    link_bytes: dict[str, int] = {}
    """Bytes moved per step and rank by link: host_to_device, device_to_host, collective."""
    wall_s: float = 0.0
    retried: bool = False

    @property
    def refusal(self) -> str | None:
        """What all refusals of the live model for one reason have in common, whatever numbers and names their messages hold.

        None where nothing was refused, or only how much of something there is.
        """
        refused = self.status == "unfit" and self.code and self.code not in OF_AMOUNTS
        return f"{self.code} {self.raised_at}" if refused else None

    @property
    def spread_s(self) -> float:
        """Half the range of the measured steps: what `step_s` can be trusted to."""
        return (max(self.step_s_all) - min(self.step_s_all)) / 2 if self.step_s_all else 0.0


class Progress(BaseModel):
    """A sign of life from a running trial."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    stage: str
    """`starting`, `building`, `step 3/8`."""
    device_bytes: int | None = None


class Executor(Protocol):
    """Runs trials in fresh processes; `submit` returns at once, `wait` yields what happens until something finishes."""

    name: str
    slots: int
    """How many trials run at the same time."""

    def submit(self, trial: Trial) -> None:
        """Start `trial`; never raises for what the trial does."""
        ...

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        """What has happened since the last call, waiting up to `timeout_s` for the first event."""
        ...

    def cancel(self, number: int) -> None:
        """End a running trial and all its processes; it yields no result."""
        ...

    def close(self) -> None:
        """End everything that still runs; no process survives."""
        ...
