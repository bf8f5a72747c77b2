"""Copies of saved activations that are on their way to the host where another pass inserts ops."""

from __future__ import annotations

import numpy as np

from memtune.program import I32, Step

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
