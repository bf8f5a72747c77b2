"""Which of the ops that ran are the ops of a tape."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memtune.runtime.op_facts import Facts, Key, key_of
from memtune.runtime.tape import Tape


def places_of(tape: Tape, ran: Sequence[Facts], n_forward: int) -> list[int] | str:
    """For each op of the tape its number among those that ran, or why there is none.

    What ran and is not on the tape is passed over: what autograd does with gradients when they are there.

    Args:
        tape: The captured region.
        ran: Every op of one forward and backward, in order.
        n_forward: How many of them were the forward's.
    """
    found: list[int] = []
    at, end = 0, len(ran)
    for op, call in enumerate(tape.calls):
        wanted = _alike(key_of(call.func, call.args, call.kwargs))
        while at < end and (ran[at].about.func is not call.func or _alike(ran[at].key) != wanted):
            at += 1
        if at == end or (at < n_forward) != (op < tape.graph.n_forward):
            return f"{call.func} did not run where it does now"
        found.append(at)
        at += 1
    return found


def _alike(key: Key) -> Key:
    """What of a key is the same on fake tensors: not every type, nor the size of what a kernel saves for itself."""
    return tuple(each[0] if isinstance(each, tuple) and each and isinstance(each[-1], torch.dtype) else each for each in key[:4])
