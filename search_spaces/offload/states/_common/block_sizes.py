"""Bytes of each block, from which layer-major orders and deferred updates are solved."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from memtune.program import (
    Kind,
    Step,
    Tier,
    columns_of,
)


class BlockBytes(NamedTuple):
    """Bytes of each block, and of all else on the device."""

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    saved: tuple[int, ...]
    """Bytes that one micro-batch saves for its backward."""
    boundary: int
    """Largest input of a block in one micro-batch."""
    other: int
    """All other bytes at the peak of a plain step: an upper bound."""


@functools.lru_cache(maxsize=32)
def block_bytes(step: Step) -> BlockBytes:
    """Return the bytes of the blocks of `step`."""
    columns, n_blocks = columns_of(step.parameters), len(step.blocks)
    n_bytes, inside = columns.n_bytes, columns.block >= 0
    weights = np.bincount(columns.block[inside], n_bytes[inside], n_blocks).astype(np.int64)
    trained = inside & (columns.gradient >= 0)
    gradients = np.bincount(columns.block[trained], n_bytes[trained], n_blocks).astype(np.int64)
    given = [step.calls.inputs.storage[step.calls.inputs.call == i] for i in range(n_blocks)]
    boundary = max(int(step.storages.bytes[each[step.storages.producer[each] >= 0]].sum()) for each in given)
    saved = tuple(step.saved_bytes(i) for i in range(n_blocks))
    is_state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.tier == Tier.DEVICE)
    state = int(step.storages.bytes[is_state].sum())
    # The rest of the peak is in no block: embeddings, loss, the batch.
    other = step.peak_bytes() - int(weights.sum() + gradients.sum()) - sum(saved) - state
    return BlockBytes(tuple(weights.tolist()), tuple(gradients.tolist()), saved, boundary, max(other, 0))
