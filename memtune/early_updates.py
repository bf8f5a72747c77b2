"""What the mechanism and the pass of updates within backward both go by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Trigger = Literal["end_of_step", "per_gradient", "per_layer"]
"""When the host updates a parameter whose gradient has arrived."""
ONE_BY_ONE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"})
"""torch's optimizers whose step for several parameters is that for each of them: state by parameter, no state of a group's own
(torch/optim, `_init_group` of each)."""


def witness(n_bytes: Sequence[int]) -> int:
    """Index of the trained parameter whose gradient stays on the device until the step: the first of the smallest."""
    return min(range(len(n_bytes)), key=n_bytes.__getitem__)


def bucket_ends(n_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Indices of the gradients, in the order in which they land, with which a bucket is full; the last one may not be."""
    ends, held = [], 0
    for index, size in enumerate(n_bytes):
        held += size
        if held >= bucket_bytes:
            ends.append(index)
            held = 0
    return ends


def staying(n_bytes: Sequence[int], ratio: float) -> int:
    """How many trained parameters keep their optimizer state on the device: those used first, up to 1 - `ratio` of the bytes.

    At least one leaves.
    """
    room = (1.0 - ratio) * sum(n_bytes)
    for index, size in enumerate(n_bytes[:-1]):
        room -= size
        if room < 0:
            return index
    return max(len(n_bytes) - 1, 0)
