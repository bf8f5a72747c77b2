"""Recompute under double backward (`create_graph`: gradient penalties, second derivatives).

The first backward is differentiated itself, so it saves tensors of a block's second run (the recomputation)
that it reads, and the second backward reads the same tensors. The activation table returns each recomputed
tensor once and then frees it. When the second backward unpacks the block's own saved tensors again, the block
runs a third time, for all saves that autograd still holds; the third run also replaces tensors of the second
run that were never unpacked.

In a Step, backward under `create_graph` has phase RECOMPUTE, like all forward ops that run inside backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program.step import I32, Phase, Step

Mask = npt.NDArray[np.bool_]


def is_differentiated_again(step: Step) -> bool:
    """Return True if `loss` uses gradients that it made with `create_graph`: forward goes on after them."""
    # Recompute by the user's own checkpoints has the same phase, but runs after all of forward.
    again, forward = (np.flatnonzero(step.ops.phase == each) for each in (Phase.RECOMPUTE, Phase.FORWARD))
    return bool(len(again) and len(forward) and again[0] < forward[-1])


def saved_in_backward(step: Step, redirect: Mask, among: Mask) -> Mask:
    """Return (saves,) those of `among` that the first backward makes of a second run's tensors."""
    # `redirect` (uses,) are its reads of these tensors: autograd saves a tensor just before the op that
    # reads it.
    before = np.minimum(step.saves.packed_before, step.ops.n - 1)
    among = among & (step.ops.phase[before] != Phase.FORWARD)
    if not among.any():
        return among
    pairs = np.unique(step.uses.op[redirect].astype(np.int64) * step.storages.n + step.uses.storage[redirect])
    saves = step.saves.packed_before.astype(np.int64) * step.storages.n + step.saves.storage
    found: Mask = among & np.isin(saves, pairs)
    return found


def read_by_second_order(step: Step, again_saved: Mask, known: Mask) -> Mask:
    """Return (uses,) reads by the second backward of tensors that only the first backward saved."""
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
    """Third runs of blocks."""

    anchor: I32
    """(blocks,) op before which each block's third run starts, n_ops if it has none."""
    stop: I32
    """(blocks,) forward op before which the third run stops."""
    reads: Mask
    """(uses,) reads of the third run's tensors by the last backward."""
    saves: I32
    """(k,) saves that the third run recomputes."""
    asked: I32
    """(k,) op before which backward unpacks each of them for the second time."""
    first_until: I32
    """(k,) op after which the second run's tensor is freed, unless another reference holds it."""


def third_runs(step: Step, wanted: Mask, redirect: Mask) -> ThirdRuns | None:
    """Return the blocks that run a third time, None if there are none.

    Args:
        step: The step without recompute.
        wanted: (saves,) saves that the second run recomputes.
        redirect: (uses,) reads of the second run's tensors by the blocks' own autograd nodes.
    """
    if not is_differentiated_again(step):
        return None
    asked = np.where(step.saves.unpacked_before >= 0, step.saves.unpacked_before, 0)
    popped = wanted & (step.saves.unpacked_before >= 0) & (step.ops.phase[asked] == Phase.RECOMPUTE)
    freed = np.zeros(step.storages.n, bool)
    freed[step.saves.storage[popped]] = True
    second_reads = redirect & (step.ops.phase[step.uses.op] == Phase.BACKWARD)
    blocks = step.ops.block[step.uses.op]
    n_blocks = len(step.blocks)
    begins = _node_begins(step)
    anchor = np.full(n_blocks + 1, step.ops.n, np.int32)  # the last entry is for block -1
    rows = second_reads & freed[step.uses.storage]
    np.minimum.at(anchor, blocks[rows], begins[step.uses.op[rows]])
    runs = anchor < step.ops.n
    second_reads &= runs[blocks]
    saves = np.flatnonzero(
        wanted & runs[step.saves.block] & (step.saves.held_until >= anchor[step.saves.block])
    ).astype(np.int32)
    if not len(saves):
        return None
    stop = np.zeros(n_blocks, np.int32)
    np.maximum.at(stop, step.saves.block[saves], step.saves.packed_before[saves])
    first_read = np.full(step.storages.n, step.ops.n, np.int32)
    np.minimum.at(first_read, step.uses.storage[second_reads], begins[step.uses.op[second_reads]])
    read = first_read[step.saves.storage[saves]]
    second = np.where(read < step.ops.n, read, step.saves.used_until[saves])
    until = np.where(popped[saves], step.saves.unpacked_before[saves], anchor[step.saves.block[saves]])
    return ThirdRuns(anchor[:-1], stop, second_reads, saves, second.astype(np.int32), until.astype(np.int32))


def _node_begins(step: Step) -> I32:
    """Return (n,) the first op of each op's autograd node, before which the node unpacks all its saves."""
    node = step.ops.sequence_nr
    new = np.ones(step.ops.n, bool)
    new[1:] = (node[1:] != node[:-1]) | (node[1:] < 0)
    found: I32 = np.maximum.accumulate(np.where(new, np.arange(step.ops.n), 0)).astype(np.int32)
    return found
