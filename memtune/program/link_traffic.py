"""Bytes on links in an optimizer step, over all its micro-batches."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from memtune.program.step import READS, Kind, Phase, Resource, Step, Tier

REPEATED: Final = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
"""Phases that run in each micro-batch."""


def traffic_bytes(step: Step, accumulate: int) -> npt.NDArray[np.int64]:
    """Return the bytes that each op of `step` moves in an optimizer step of `accumulate` micro-batches.

    Ops of the body count once per micro-batch. Reads of gradient sums count one time fewer, since the first
    micro-batch has no sums yet.
    """
    body = np.isin(step.ops.phase, REPEATED)
    times = np.where(body, accumulate, 1)
    times[body & _reads_sums(step)] -= 1
    found: npt.NDArray[np.int64] = step.ops.traffic_bytes * times
    return found


def _reads_sums(step: Step) -> npt.NDArray[np.bool_]:
    """Return (n,) True for reads of gradient sums of earlier micro-batches from SSD."""
    found = np.zeros(step.ops.n, bool)
    sums = (
        (step.storages.kind == Kind.GRADIENT)
        & (step.storages.tier == Tier.SSD)
        & (step.storages.producer < 0)
    )
    found[step.uses.op[sums[step.uses.storage] & (step.uses.mode == READS)]] = True
    found &= step.ops.resource == Resource.SSD_READ
    return found
