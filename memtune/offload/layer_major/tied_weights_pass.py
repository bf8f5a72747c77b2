"""Tied weights, used before and after the blocks: their gradient has two parts, which layer-major order adds
separately.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program import Phase, Step, columns_of, raw_gradients


@dataclass(frozen=True)
class TiedGradient:
    """The gradient of one tied weight."""

    parameter: int
    after: int
    """Storage of the part from its use after the blocks."""
    before: int
    """Storage of the part from its use before the blocks."""
    adder: int
    """The op that adds the two."""


def shared_weights(step: Step, before: npt.NDArray[Any], after: npt.NDArray[Any]) -> list[int]:
    """Return the trained parameters that forward rows `before` the blocks and `after` them use."""
    columns = columns_of(step.parameters)
    used = columns.trainable.copy()
    for rows in (before, after):
        inside = np.zeros(step.ops.n, bool)
        inside[rows] = True
        used &= np.isin(columns.storage, step.uses.storage[inside[step.uses.op]])
    found: list[int] = np.flatnonzero(used).tolist()
    return found


@functools.lru_cache(maxsize=8)
def summed_parts(step: Step, parameter: int) -> TiedGradient | None:
    """Return the parts of the gradient of `parameter`; None unless it is one sum of two."""
    raw = int(raw_gradients(step)[parameter])
    adder = int(step.storages.producer[raw]) if raw >= 0 else -1
    if adder < 0 or step.names[step.ops.name[adder]] != "aten.add.Tensor":
        return None
    parts = step.uses.storage[step.uses.op == adder].tolist()
    made = [int(step.storages.producer[each]) for each in parts]
    if len(parts) != 2 or min(made) < 0 or any(step.ops.phase[each] != Phase.BACKWARD for each in made):
        return None
    # Backward reaches the later use first.
    after, before = sorted(parts, key=lambda each: int(step.storages.producer[each]))
    return TiedGradient(parameter, after, before, adder)


def ready_after(step: Step, part: int) -> int:
    """Return the op after which `part` is ready: the last one of the backward function that makes it."""
    made = int(step.storages.producer[part])
    together = (step.ops.sequence_nr == step.ops.sequence_nr[made]) & (step.ops.phase == Phase.BACKWARD)
    return int(np.flatnonzero(together)[-1]) if step.ops.sequence_nr[made] >= 0 else made
