"""Check a candidate's host memory and SSD space against those of the node, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from memtune.autotune.predict.prediction import Prediction
from memtune.technique import Reason, Target
from memtune.units import format_bytes


@dataclass(frozen=True)
class HostShortage(Reason):
    """More host memory is needed than a node has."""

    needed_bytes: int = 0
    """On the host, by all ranks of the node."""
    peak_bytes: int = 0
    """Allocated on the device."""


def host_memory_shortage(prediction: Prediction, target: Target, there_bytes: int | None) -> Reason | None:
    """Return why the host of a node cannot hold its ranks' memory.

    None if it can, or if its memory is unknown.

    Args:
        prediction: Of one rank.
        target: Determines how many ranks share a host.
        there_bytes: Free on that host; None if unknown.
    """
    reason = _shortage(
        prediction.host_peak_bytes,
        target,
        there_bytes,
        "of host memory",
        "available",
        "offload less, or to SSD: offload: {states: {kind: zero_infinity}}",
    )
    if reason is None:
        return None
    needed_bytes = target.hardware.local_ranks(target.ranks) * prediction.host_peak_bytes
    return HostShortage(
        reason.text, reason.fix, needed_bytes=needed_bytes, peak_bytes=prediction.peak_allocated_bytes
    )


def ssd_shortage(
    prediction: Prediction, target: Target, free_bytes: int | None, *, keeps_steps: bool = False
) -> Reason | None:
    """Return why the SSDs of a node cannot hold its ranks' data.

    None if they can, or if their space is unknown.

    Args:
        prediction: Of one rank.
        target: Determines how many ranks share the SSDs.
        free_bytes: On all of them together; None if unknown.
        keeps_steps: A resumed run needs space for its own data and that of the run before, until its first
            step is stored.
    """
    needed_bytes = prediction.ssd_peak_bytes
    fix = "free space in the offload directory (memtune clean), or move less to SSD"
    if keeps_steps:
        fix = "free space in the offload directory (memtune clean), or resume: checkpoint"
        return _shortage(
            2 * needed_bytes,
            target,
            free_bytes,
            "on SSD",
            "free",
            fix,
            ", half of it to go on from a run that ended",
        )
    return _shortage(needed_bytes, target, free_bytes, "on SSD", "free", fix)


def _shortage(
    rank_bytes: int,
    target: Target,
    there_bytes: int | None,
    where: str,
    is_there: str,
    fix: str,
    why: str = "",
) -> Reason | None:
    """Return why a node does not have `rank_bytes` for each of its ranks."""
    ranks = target.hardware.local_ranks(target.ranks)
    needed = ranks * rank_bytes
    if there_bytes is None or needed <= there_bytes:
        return None
    each = f" for {ranks} ranks of {format_bytes(rank_bytes)} each" if ranks > 1 else ""
    return Reason(
        f"needs {format_bytes(needed)} {where}{each}{why}, and {format_bytes(there_bytes)} are {is_there}",
        fix,
    )
