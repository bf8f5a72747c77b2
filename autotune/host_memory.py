"""Whether a candidate's share of the host's memory and of the drives is there, said before anything runs."""

from __future__ import annotations

from memtune.autotune.simulate import Prediction
from memtune.technique import Reason, Target
from memtune.units import format_bytes


def too_little(prediction: Prediction, target: Target, there_bytes: int | None) -> Reason | None:
    """Why the host of a node cannot hold what its ranks keep there, as predicted; None where it can, or nothing is known.

    Args:
        prediction: Of one rank.
        target: Says how many ranks share a host.
        there_bytes: Free on that host; None: not known.
    """
    return _lacks(
        prediction.host_peak_bytes, target, there_bytes, "of host memory", "available",
        "offload less, or to SSD: offload: {states: {kind: zero_infinity}}",
    )  # fmt: skip


def no_room_on_ssd(prediction: Prediction, target: Target, free_bytes: int | None, *, keeps_steps: bool = False) -> Reason | None:
    """Why the drives of a node have no room for what its ranks put there; None where they have, or nothing is known.

    Args:
        prediction: Of one rank.
        target: Says how many ranks share the drives.
        free_bytes: On all of them together; None: not known.
        keeps_steps: A run that goes on from one that ended has its bytes there beside that one's, until its first step is kept.
    """
    needed_bytes, fix = prediction.ssd_peak_bytes, "free space in the offload directory (memtune clean), or move less to SSD"
    if keeps_steps:
        fix = "free space in the offload directory (memtune clean), or resume: checkpoint"
        return _lacks(2 * needed_bytes, target, free_bytes, "on SSD", "free", fix, ", half of it to go on from a run that ended")
    return _lacks(needed_bytes, target, free_bytes, "on SSD", "free", fix)


def _lacks(
    rank_bytes: int, target: Target, there_bytes: int | None, where: str, is_there: str, fix: str, why: str = ""
) -> Reason | None:
    """Why a node does not have `rank_bytes` for each of its ranks."""
    ranks = target.hardware.local_ranks(target.ranks)
    needed = ranks * rank_bytes
    if there_bytes is None or needed <= there_bytes:
        return None
    each = f" for {ranks} ranks of {format_bytes(rank_bytes)} each" if ranks > 1 else ""
    return Reason(f"needs {format_bytes(needed)} {where}{each}{why}, and {format_bytes(there_bytes)} are {is_there}", fix)
