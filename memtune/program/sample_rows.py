"""Storages and forward ops with a part for each sample: sizes of several micro-batches run as one.

Storages that forward computes from the batch have samples; those from weights and shapes alone have none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program.step import WRITES, Kind, Phase, Step


@dataclass(frozen=True, eq=False)
class BatchedRows:
    """Storages and forward ops of a step that have samples."""

    storages: npt.NDArray[np.bool_]
    ops: npt.NDArray[np.bool_]
    """(n,) True for ops that compute for each sample."""
    traffic: npt.NDArray[np.float64]
    """(n,) share of an op's bytes that belong to samples."""


@functools.lru_cache(maxsize=8)
def batched_rows(step: Step) -> BatchedRows:
    """Return the storages and forward ops of `step` that have samples."""
    storages, uses = step.storages, step.uses
    found = storages.kind == Kind.BATCH
    ops = np.zeros(step.ops.n, bool)
    forward = np.flatnonzero(step.ops.phase == Phase.FORWARD)
    starts = np.searchsorted(uses.op, [forward, forward + 1])
    made = np.argsort(storages.producer, kind="stable")
    made_starts = np.searchsorted(storages.producer[made], [forward, forward + 1])
    share = np.zeros(step.ops.n)
    rows = zip(forward.tolist(), *starts.tolist(), *made_starts.tolist(), strict=True)
    for op, begin, end, first, last in rows:
        used, outputs = uses.storage[begin:end], made[first:last]
        if not found[used].any() and not found[outputs].any():
            continue
        ops[op] = True
        found[outputs] = True
        # A weight that the op reads stays one; what it writes has samples.
        found[used[uses.mode[begin:end] == WRITES]] = True
        every = np.concatenate([used, outputs])
        n_bytes = storages.bytes[every]
        share[op] = n_bytes[found[every]].sum() / max(n_bytes.sum(), 1)
    return BatchedRows(found, ops, share)
