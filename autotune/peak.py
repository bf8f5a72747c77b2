"""What the bytes at a step's peak are: by kind and by module, repeated blocks taken together."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtune.program import Kind, Step, Tier

OUTSIDE = "(outside)"
"""What belongs to no module: the batch, the loss, messages between ranks."""
_NAMES = {
    **{Kind.PARAMETER: "weights", Kind.GRADIENT: "gradients", Kind.OPTIMIZER: "optimizer", Kind.BUFFER: "buffers"},
    **{Kind.WORKSPACE: "workspace", Kind.COMMUNICATION: "communication"},
}


@dataclass(frozen=True)
class PeakRow:
    """Some of the bytes at the peak."""

    module: str
    """Its qualified name, numbers of repeated blocks as `*`; '' is the model itself."""
    kind: str
    """weights, gradients, optimizer, buffers, workspace, communication, activations (kept for backward) or temporaries."""
    n_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {"module": self.module, "kind": self.kind, "bytes": self.n_bytes}


def at_peak(step: Step) -> tuple[PeakRow, ...]:
    """The device bytes at the first op where they are the most, largest row first; they sum up to `step.peak_bytes()`."""
    if not step.n_ops:
        return ()
    op = int(step.live_bytes().argmax())
    live = (np.maximum(step.producer, 0) <= op) & (step.end >= op) & (step.tier == Tier.DEVICE)
    saved = step.saved_by_autograd()
    rows: Counter[tuple[str, str]] = Counter()
    for storage in np.flatnonzero(live).tolist():
        rows[folded(_module(step, storage)), _kind(step, storage, bool(saved[storage]))] += int(step.bytes[storage])
    found = [PeakRow(module, kind, n_bytes) for (module, kind), n_bytes in rows.items() if n_bytes]
    return tuple(sorted(found, key=lambda row: (-row.n_bytes, row.module, row.kind)))


def folded(module: str) -> str:
    """`module` with every number in it as `*`, so that repeated blocks have one name: `h.3.mlp` is `h.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _kind(step: Step, storage: int, saved: bool) -> str:
    return _NAMES.get(Kind(step.kind[storage]), "activations" if saved else "temporaries")


def _module(step: Step, storage: int) -> str:
    owner, producer = int(step.owner[storage]), int(step.producer[storage])
    if owner >= 0:
        return step.parameters[owner].name.rpartition(".")[0]
    return step.modules[step.op_module[producer]] if producer >= 0 else OUTSIDE
