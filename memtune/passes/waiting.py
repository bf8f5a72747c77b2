"""Copies of saved activations that are on their way to the host, or there, where another pass inserts ops."""

from __future__ import annotations

import numpy as np

from memtune.edit import Edit
from memtune.program import I32, Step, Tier

TO_HOST = "memtune.to_host.default"


def waiting_sources(step: Step, firsts: I32) -> tuple[I32, I32]:
    """Which of the ops `firsts` are copies to the host, and what the copy before each holds until then, pair by pair.

    Whatever is put before such an op still sees that: a source is let go just before the next copy starts.
    """
    pairs: list[tuple[int, int]] = []
    copies = np.flatnonzero(step.op_name == step.names.index(TO_HOST)) if TO_HOST in step.names else np.empty(0, np.intp)
    for number, op in enumerate(firsts.tolist()):
        place = int(np.searchsorted(copies, op))
        if 0 < place < len(copies) and copies[place] == op:
            sources = step.use_storage[step.use_op == copies[place - 1]]
            pairs += [(number, storage) for storage in sources[step.held_until[sources] == op - 1].tolist()]
    found = np.asarray(pairs, np.int32).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def hold_until_asked(edit: Edit, step: Step, after: I32, rows: I32) -> None:
    """Copies on the host that came back ahead, and stay until the op behind one of `after` asks for them, are there for `rows`.

    Args:
        edit: Of `step`, with `rows` in it.
        step: Before the edit.
        after: (n,) behind which op each new one stands.
        rows: (n,) the new ops.
    """
    if TO_HOST not in step.names:
        return
    held = (step.held_until >= 0) & (step.held_until < step.n_ops)
    made = np.flatnonzero(held & (step.tier == Tier.HOST) & (step.producer >= 0))
    made = made[step.op_name[step.producer[made]] == step.names.index(TO_HOST)].astype(np.int32)
    last = np.full(step.n_ops, -1, np.int32)
    np.maximum.at(last, after, rows)
    there = made[last[step.held_until[made]] >= 0]
    edit.hold_through(there, last[step.held_until[there]])
