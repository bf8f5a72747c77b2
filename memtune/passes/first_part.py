"""The first ops of a step alone: what decides about forward and backward need not look at the optimizer, most of a step's ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memtune.program import FOREVER, Phase, Step


def forward_and_backward(step: Step) -> Step:
    """`step` up to the op after backward, equal live bytes op by op; `step` itself where its storages are not in order.

    What lives on at the end is held to the last op.
    """
    training = np.flatnonzero(step.op_phase <= Phase.BACKWARD)
    n_ops = min(int(training.max(initial=-1)) + 2, step.n_ops)
    later = step.producer >= n_ops
    n_storages = step.n_storages - int(later.sum())
    if n_ops == step.n_ops or later[:n_storages].any():
        return step
    kept: dict[str, Any] = {name: column[:n_ops] for name, column in step.columns("op_").items()}
    for name in ("bytes", "tier", "kind", "producer", "ready_after", "owner"):
        kept[name] = getattr(step, name)[:n_storages]
    held, end = step.held_until[:n_storages], step.end[:n_storages]
    kept["held_until"] = np.where((end >= n_ops) & (held != FOREVER), n_ops - 1, held).astype(np.int32)
    n_uses = int(np.searchsorted(step.use_op, n_ops))
    kept |= {name: column[:n_uses] for name, column in step.columns("use_").items()}
    for name in ("save_until", "save_used_until"):
        kept[name] = np.minimum(getattr(step, name), n_ops - 1)
    return replace(step, **kept)
