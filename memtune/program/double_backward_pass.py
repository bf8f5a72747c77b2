"""Backward that is differentiated itself (`create_graph`: gradient penalties, second derivatives), as
recomputation meets it.

Rule 1. That backward saves what it reads of a block's second run; the derivative of backward finds the same
tensors. Rule 2. `activations.recompute.activation_table` hands out each product once. The second backward
through the block's own nodes asks for products
        that are gone, so the block runs a third time, for all that autograd still holds; what nobody had
        asked for after the second run is replaced then.

In a Step, backward under `create_graph` has phase RECOMPUTE, as all that runs forward ops inside of backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program.step import I32, Phase, Step

Mask = npt.NDArray[np.bool_]


def saved_in_backward(step: Step, redirect: Mask, among: Mask) -> Mask:
    """(saves,) which of `among` a backward that is differentiated itself saves of a second run's products
    (Rule 1).

    Autograd saves what an op reads just before the op runs; `redirect` (uses,) are the reads.
    """
    before = np.minimum(step.saves.packed_before, step.ops.n - 1)
    among = among & (step.ops.phase[before] != Phase.FORWARD)
    if not among.any():
        return among
    pairs = np.unique(step.uses.op[redirect].astype(np.int64) * step.storages.n + step.uses.storage[redirect])
    saves = step.saves.packed_before.astype(np.int64) * step.storages.n + step.saves.storage
    found: Mask = among & np.isin(saves, pairs)
    return found


def read_by_second_order(step: Step, again_saved: Mask, known: Mask) -> Mask:
    """(uses,) what the derivative of a backward reads of what that backward saved, where nobody else saved
    the same tensor.
    """
    if not again_saved.any():
        return np.zeros(step.uses.n, bool)
    first, last = np.full(step.storages.n, step.ops.n, np.int32), np.full(step.storages.n, -1, np.int32)
    np.minimum.at(first, step.saves.storage[again_saved], step.saves.packed_before[again_saved])
    np.maximum.at(last, step.saves.storage[again_saved], step.saves.held_until[again_saved])
    last[step.saves.storage[~known]] = -1
    reads = (step.ops.phase[step.uses.op] == Phase.BACKWARD) & (step.uses.op > first[step.uses.storage])
    found: Mask = reads & (step.uses.op <= last[step.uses.storage])
    return found


@dataclass(frozen=True)
class ThirdRuns:
    """Blocks that run a third time."""

    anchor: I32
    """(blocks,) op before which each does, n_ops for never."""
    stop: I32
    """(blocks,) it stops before this forward op."""
    reads: Mask
    """(uses,) what the last backward reads of the third run's products."""
    saves: I32
    """(k,) rows of what the third run makes again."""
    asked: I32
    """(k,) op before which backward asks for each the second time."""
    first_until: I32
    """(k,) op after which the second run's tensor is let go, but for what else holds it."""


def third_runs(step: Step, wanted: Mask, redirect: Mask, again_saved: Mask) -> ThirdRuns | None:
    """Which blocks run a third time, None where none does (Rule 2).

    Args:
        step: The step without recomputation.
        wanted: (saves,) what the second run makes again.
        redirect: (uses,) reads of the second run's products by the blocks' own nodes.
        again_saved: (saves,) what backward saved of them.
    """
    if not again_saved.any():
        return None
    asked = np.where(step.saves.unpacked_before >= 0, step.saves.unpacked_before, 0)
    popped = wanted & (step.saves.unpacked_before >= 0) & (step.ops.phase[asked] == Phase.RECOMPUTE)
    gone = np.zeros(step.storages.n, bool)
    gone[step.saves.storage[popped]] = True
    late = redirect & (step.ops.phase[step.uses.op] == Phase.BACKWARD)
    blocks = step.ops.block[step.uses.op]
    n_blocks = len(step.blocks)
    begins = _node_begins(step)
    anchor = np.full(n_blocks + 1, step.ops.n, np.int32)  # the last entry serves block -1
    rows = late & gone[step.uses.storage]
    np.minimum.at(anchor, blocks[rows], begins[step.uses.op[rows]])
    runs = anchor < step.ops.n
    late &= runs[blocks]
    saves = np.flatnonzero(
        wanted & runs[step.saves.block] & (step.saves.held_until >= anchor[step.saves.block])
    ).astype(np.int32)
    if not len(saves):
        return None
    stop = np.zeros(n_blocks, np.int32)
    np.maximum.at(stop, step.saves.block[saves], step.saves.packed_before[saves])
    first_read = np.full(step.storages.n, step.ops.n, np.int32)
    np.minimum.at(first_read, step.uses.storage[late], begins[step.uses.op[late]])
    read = first_read[step.saves.storage[saves]]
    second = np.where(read < step.ops.n, read, step.saves.used_until[saves])
    until = np.where(popped[saves], step.saves.unpacked_before[saves], anchor[step.saves.block[saves]])
    return ThirdRuns(anchor[:-1], stop, late, saves, second.astype(np.int32), until.astype(np.int32))


def _node_begins(step: Step) -> I32:
    """(n,) first of the ops in a row that one autograd node runs: a node asks for all it saved before the
    first.
    """
    node = step.ops.sequence_nr
    new = np.ones(step.ops.n, bool)
    new[1:] = (node[1:] != node[:-1]) | (node[1:] < 0)
    found: I32 = np.maximum.accumulate(np.where(new, np.arange(step.ops.n), 0)).astype(np.int32)
    return found
