"""Merge the records and exits of ranks into one TrialResult: pure functions of plain data."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict, ValidationError

from memtune.executors.base import HOST_MEMORY_RAN_OUT, PEER_FAILURE, Report, Status, Trial, TrialResult

TAIL_LINES, REASON_CHARS = 40, 400
_HINTS = {
    signal.SIGBUS: "a bus error often means that /dev/shm is full",
    signal.SIGILL: "native code that this processor cannot run",
    signal.SIGXCPU: "a limit on processor time",
}
_OF_A_FAILURE = (
    *("code", "raised_at", "exit_code", "losses", "audit"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "host_peak_bytes", "memory_by_kind"),
)
"""Fields of the failing rank's record that the trial's result takes over."""
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


class RankRecord(Report):
    """Report of one rank at its end; validated, because it comes from a process that runs the user's code."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    samples_per_step: int | None = None
    """Samples of one optimizer step over all ranks; the trial's `global_batch` when None."""


@dataclass(frozen=True)
class RankExit:
    """A rank's process has ended."""

    rank: int
    code: int
    """Exit code, or minus the number of the signal that ended it."""
    tail: str = ""
    """The end of its output."""
    host_oom: bool = False
    """The kernel killed it for lack of host memory, or almost none was left."""


@dataclass(frozen=True)
class Failure:
    """Failure of a trial: the rank at fault, and its evidence."""

    rank: int
    status: Status
    reason: str
    record: RankRecord | None = None
    lost: bool = False
    """Ended from outside: worth another try in fresh processes."""
    root: bool = False
    """The cause: cannot be a consequence of another rank's failure, as a broken connection can."""


def read_record(rank: int, raw: object) -> RankRecord | Failure:
    """Return the validated record of `rank`, or a failure if it is malformed."""
    try:
        return RankRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the record"
        return Failure(rank, "crash", f"reported a result that cannot be read: {where}: {first['msg']}")


def failure_of_record(rank: int, record: RankRecord) -> Failure | None:
    """Return the failure that a rank reports itself, None if its record is good."""
    if record.status == "ok":
        return None
    # A connection that broke is the consequence of another rank's end.
    own = record.status in ("oom", "unfit") or record.code not in ("", PEER_FAILURE)
    return Failure(rank, record.status, record.reason or record.status, record, root=own)


def failure_of_end(ended: RankExit) -> Failure:
    """Return the failure of a rank that ended without a result."""
    if ended.code >= 0:
        last = last_line(ended.tail) or "nothing was printed"
        if ended.code == 0:
            last = f"does model.py end the process? Last line: {last}"
        return Failure(ended.rank, "crash", f"ended with exit code {ended.code} before its result: {last}")
    number = -ended.code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if ended.host_oom:
        reason = f"was killed ({name}) when {HOST_MEMORY_RAN_OUT}"
        return Failure(ended.rank, "crash", reason, root=True)
    if number in _FROM_OUTSIDE:
        return Failure(ended.rank, "crash", f"was ended from outside ({name})", lost=True, root=True)
    hint = _HINTS.get(signal.Signals(number)) if number in set(signal.Signals) else None
    return Failure(ended.rank, "crash", f"was ended by {name}" + (f": {hint}" if hint else ""), root=True)


def root_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure to show: the first to arrive, preferably one that cannot be a consequence."""
    # `min` keeps the first of equals, so among causes the earliest counts.
    return min(failures, key=lambda failure: not failure.root)


def last_line(text: str) -> str:
    """Return the last line of `text` that is not blank."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def failed(trial: Trial, failure: Failure, tail: str, wall_s: float) -> TrialResult:
    """Return the result of a trial that `failure` ended, with the peaks of the rank at fault, if known."""
    if failure.record is None:  # the reason is a verb: "was killed"
        rank_text = f"rank {failure.rank} "
    else:
        rank_text = f"rank {failure.rank}: " if trial.ranks > 1 else ""
    record = failure.record or RankRecord(status=failure.status)
    found = {name: getattr(record, name) for name in _OF_A_FAILURE}
    return TrialResult(
        number=trial.number,
        status=failure.status,
        reason=(rank_text + " ".join(failure.reason.split()))[:REASON_CHARS],
        log_tail="\n".join(tail.splitlines()[-TAIL_LINES:]),
        wall_s=wall_s,
        **found,
    )


def merge(
    trial: Trial, records: Mapping[int, RankRecord], wall_s: float, leftovers: Sequence[str] = ()
) -> TrialResult:
    """Merge the good records of all ranks into one result.

    Peaks are the largest over ranks, each step takes as long as on its slowest rank, losses are global
    already and come from rank 0, memory by kind is that of the rank with the largest peak, and bytes on links
    are those of the busiest rank.
    """
    ranks = [records[rank] for rank in sorted(records)]
    first, heaviest = ranks[0], max(ranks, key=lambda record: record.peak_allocated_bytes or 0)
    steps_s = [max(times) for times in zip(*(record.step_s_all for record in ranks), strict=False)]
    step_s = statistics.median(steps_s) if steps_s else None
    samples = first.samples_per_step or trial.global_batch
    audit = dict(first.audit)
    if leftovers:
        audit["killed_leftovers"] = list(leftovers)
    links = {link for record in ranks for link in record.link_bytes}
    return TrialResult(
        number=trial.number,
        status="ok",
        peak_allocated_bytes=_largest(record.peak_allocated_bytes for record in ranks),
        peak_reserved_bytes=_largest(record.peak_reserved_bytes for record in ranks),
        host_peak_bytes=_largest(record.host_peak_bytes for record in ranks),
        step_s=step_s,
        step_s_all=steps_s,
        samples_per_s=samples / step_s if samples and step_s else None,
        losses=first.losses,
        gradients=first.gradients,
        gradients_sha256=next((record.gradients_sha256 for record in ranks if record.gradients_sha256), None),
        memory_by_kind=heaviest.memory_by_kind,
        op_times=first.op_times,
        audit=audit,
        link_bytes={link: max(record.link_bytes.get(link, 0) for record in ranks) for link in sorted(links)},
        # Ranks that wait for others attribute these to other programs, and those the reverse.
        other_load=min(max(statistics.fmean(record.other_load for record in ranks), 0.0), 1.0),
        reference_s=max(record.reference_s for record in ranks),
        rates=first.rates,
        wall_s=wall_s,
    )
