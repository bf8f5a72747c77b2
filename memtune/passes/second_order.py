"""Backward that is differentiated itself (`create_graph`: gradient penalties, second derivatives), as recomputation meets it.

Rule 1. That backward saves what it reads of a block's second run; the derivative of backward finds the same tensors.
Rule 2. `runtime.activations` hands out each product once. The second backward through the block's own nodes asks for products
        that are gone, so the block runs a third time, for all that autograd still holds; what nobody had asked for after the
        second run is replaced then.

In a Step, backward under `create_graph` has phase RECOMPUTE, as all that runs forward ops inside of backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program import I32, Phase, Step

Mask = npt.NDArray[np.bool_]


def saved_in_backward(step: Step, redirect: Mask, among: Mask) -> Mask:
    """(saves,) which of `among` a backward that is differentiated itself saves of a second run's products (Rule 1).

    Autograd saves what an op reads just before the op runs; `redirect` (uses,) are the reads.
    """
    before = np.minimum(step.save_before, step.n_ops - 1)
    among = among & (step.op_phase[before] != Phase.FORWARD)
    if not among.any():
        return among
    pairs = np.unique(step.use_op[redirect].astype(np.int64) * step.n_storages + step.use_storage[redirect])
    saves = step.save_before.astype(np.int64) * step.n_storages + step.save_storage
    found: Mask = among & np.isin(saves, pairs)
    return found


def read_by_second_order(step: Step, again_saved: Mask, known: Mask) -> Mask:
    """(uses,) what the derivative of a backward reads of what that backward saved, where nobody else saved the same tensor."""
    if not again_saved.any():
        return np.zeros(len(step.use_op), bool)
    first, last = np.full(step.n_storages, step.n_ops, np.int32), np.full(step.n_storages, -1, np.int32)
    np.minimum.at(first, step.save_storage[again_saved], step.save_before[again_saved])
    np.maximum.at(last, step.save_storage[again_saved], step.save_until[again_saved])
    last[step.save_storage[~known]] = -1
    reads = (step.op_phase[step.use_op] == Phase.BACKWARD) & (step.use_op > first[step.use_storage])
    found: Mask = reads & (step.use_op <= last[step.use_storage])
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
    asked = np.where(step.save_asked >= 0, step.save_asked, 0)
    popped = wanted & (step.save_asked >= 0) & (step.op_phase[asked] == Phase.RECOMPUTE)
    gone = np.zeros(step.n_storages, bool)
    gone[step.save_storage[popped]] = True
    late = redirect & (step.op_phase[step.use_op] == Phase.BACKWARD)
    blocks = step.op_block[step.use_op]
    n_blocks = len(step.blocks)
    begins = _node_begins(step)
    anchor = np.full(n_blocks + 1, step.n_ops, np.int32)  # the last entry serves block -1
    rows = late & gone[step.use_storage]
    np.minimum.at(anchor, blocks[rows], begins[step.use_op[rows]])
    runs = anchor < step.n_ops
    late &= runs[blocks]
    saves = np.flatnonzero(wanted & runs[step.save_block] & (step.save_until >= anchor[step.save_block])).astype(np.int32)
    if not len(saves):
        return None
    stop = np.zeros(n_blocks, np.int32)
    np.maximum.at(stop, step.save_block[saves], step.save_before[saves])
    first_read = np.full(step.n_storages, step.n_ops, np.int32)
    np.minimum.at(first_read, step.use_storage[late], begins[step.use_op[late]])
    read = first_read[step.save_storage[saves]]
    second = np.where(read < step.n_ops, read, step.save_used_until[saves])
    until = np.where(popped[saves], step.save_asked[saves], anchor[step.save_block[saves]])
    return ThirdRuns(anchor[:-1], stop, late, saves, second.astype(np.int32), until.astype(np.int32))


def _node_begins(step: Step) -> I32:
    """(n,) first of the ops in a row that one autograd node runs: a node asks for all it saved before the first."""
    node = step.op_node
    new = np.ones(step.n_ops, bool)
    new[1:] = (node[1:] != node[:-1]) | (node[1:] < 0)
    found: I32 = np.maximum.accumulate(np.where(new, np.arange(step.n_ops), 0)).astype(np.int32)
    return found
