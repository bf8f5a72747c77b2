"""Break down the bytes at a step's peak by kind and by module; repeated blocks are merged."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtune.program import Kind, Step, Tier

OUTSIDE = "(outside)"
"""Storages of no module: the batch, the loss, messages between ranks."""
_NAMES = {
    **{
        Kind.PARAMETER: "weights",
        Kind.GRADIENT: "gradients",
        Kind.OPTIMIZER: "optimizer",
        Kind.BUFFER: "buffers",
    },
    **{Kind.WORKSPACE: "workspace", Kind.COMMUNICATION: "communication"},
}


@dataclass(frozen=True)
class PeakRow:
    """Bytes at the peak of one module and kind."""

    module: str
    """Qualified name, numbers of repeated blocks as `*`; '' for the model itself."""
    kind: str
    """weights, gradients, optimizer, buffers, workspace, communication, activations (kept for backward) or
    temporaries.
    """
    n_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {"module": self.module, "kind": self.kind, "bytes": self.n_bytes}


def at_peak(step: Step) -> tuple[PeakRow, ...]:
    """Return the device bytes at the first op at the peak, largest row first.

    They add up to `step.peak_bytes()`.
    """
    if not step.ops.n:
        return ()
    op = int(step.live_bytes().argmax())
    live = (
        (np.maximum(step.storages.producer, 0) <= op)
        & (step.freed_after >= op)
        & (step.storages.tier == Tier.DEVICE)
    )
    saved = step.saved_by_autograd()
    rows: Counter[tuple[str, str]] = Counter()
    for storage in np.flatnonzero(live).tolist():
        rows[folded(_module(step, storage)), kind_of(step, storage, bool(saved[storage]))] += int(
            step.storages.bytes[storage]
        )
    found = [PeakRow(module, kind, n_bytes) for (module, kind), n_bytes in rows.items() if n_bytes]
    return tuple(sorted(found, key=lambda row: (-row.n_bytes, row.module, row.kind)))


def folded(module: str) -> str:
    """Return `module` with numbers replaced by `*`, as in `h.*.mlp`, so that repeated blocks share a name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def kind_of(step: Step, storage: int, saved: bool) -> str:
    """Return the name of a storage's kind; `saved` tells whether autograd saves it."""
    return _NAMES.get(Kind(step.storages.kind[storage]), "activations" if saved else "temporaries")


def _module(step: Step, storage: int) -> str:
    owner, producer = int(step.storages.owner[storage]), int(step.storages.producer[storage])
    if owner >= 0:
        return step.parameters[owner].name.rpartition(".")[0]
    return step.modules[step.ops.module[producer]] if producer >= 0 else OUTSIDE
