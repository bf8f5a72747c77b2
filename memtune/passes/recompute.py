"""The pass of `runtime.activations`' recompute claims: run blocks' forwards again in backward, but for what is kept.

It mirrors Rules 1 to 5 there: what autograd saved inside a block becomes the product of a second run, which starts
before the first backward node that needs it and stops after the last tensor that was saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.program import FOREVER, I32, Kind, Phase, Step

Mask = npt.NDArray[np.bool_]


def recompute_blocks(step: Step, blocks: list[int], keep: Callable[[str], bool] | None = None) -> Step:
    """`step` with the given blocks recomputed.

    Args:
        step: As recorded, without any recomputation.
        blocks: Rows of `step.blocks`.
        keep: Which ops' outputs are kept, by op name; None keeps none.
    """
    chosen = np.zeros(len(step.blocks) + 1, bool)  # the last entry serves block -1
    chosen[blocks] = True
    forward = (step.op_phase == Phase.FORWARD) & chosen[step.op_block]
    made_in = np.where(step.producer >= 0, step.op_block[step.producer], -1)
    made_in[(step.producer < 0) | ~forward[step.producer]] = -1  # (m,) block that made it in forward, if chosen
    kept_op = _kept_ops(step, forward, keep)

    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.op_block[forward], np.flatnonzero(forward).astype(np.int32))

    number = (step.save_block >= 0) & chosen[step.save_block] & (made_in[step.save_storage] == step.save_block)
    number &= ~kept_op[step.producer[step.save_storage]]
    if not number.any():
        return step
    n_blocks = len(step.blocks)
    stop = np.zeros(n_blocks, np.int32)
    np.maximum.at(stop, step.save_block[number], step.save_before[number])
    release = np.full(n_blocks, -1, np.int32)
    np.maximum.at(release, step.save_block[number], step.save_until[number])
    again = forward & ~kept_op & (np.arange(step.n_ops) < stop[step.op_block])
    anchor = _first_need(step, number, n_blocks)

    edit = Edit(step)
    if keep is not None:  # until the block has run nobody knows which of them the second run will ask for
        tried = np.flatnonzero((step.producer >= 0) & (forward & _by_name(step, keep))[step.producer]).astype(np.int32)
        edit.hold_through(tried, end[step.op_block[step.producer[tried]]])
    active = np.flatnonzero(release >= 0).astype(np.int32)
    buffers = _changed_buffers(step, forward, active)
    copies = _save_buffers(edit, step, buffers, anchor)
    ops = np.flatnonzero(again).astype(np.int32)
    where = step.op_block[ops]
    _, new = edit.copy_ops(ops, anchor[where], Phase.RECOMPUTE, end[where])
    _put_back_buffers(edit, step, buffers, copies, anchor)

    # Backward of the same block now reads the second run's products.
    redirect = (step.op_phase[step.use_op] == Phase.BACKWARD) & (new[step.use_storage] >= 0)
    redirect &= step.op_block[step.use_op] == made_in[step.use_storage]
    edit.use_storage = np.where(redirect, new[edit.use_storage], edit.use_storage).astype(np.int32)
    edit.save_storage = np.where(number, new[edit.save_storage], edit.save_storage).astype(np.int32)
    edit.save_until = np.where(number, edit.save_used_until, edit.save_until).astype(np.int32)  # handed out once
    edit.save_before = np.where(number, anchor[edit.save_block], edit.save_before).astype(np.int32)
    _hold_kept_and_inputs(edit, step, kept_op & (np.arange(step.n_ops) < stop[step.op_block]), made_in, end, release)
    return edit.done()


def _kept_ops(step: Step, forward: Mask, keep: Callable[[str], bool] | None) -> Mask:
    """(n,) forward ops whose outputs are kept; not those that something writes into later (Rule 5)."""
    if keep is None:
        return np.zeros(step.n_ops, bool)
    kept = forward & _by_name(step, keep)
    writes = (step.use_mutates == 1) & (step.op_phase[step.use_op] == Phase.FORWARD)
    writes &= step.use_op != step.producer[step.use_storage]
    spoiled = step.producer[step.use_storage[writes]]
    kept[spoiled[spoiled >= 0]] = False
    return kept


def _by_name(step: Step, keep: Callable[[str], bool]) -> Mask:
    by_name = np.asarray([keep(name) for name in step.names], bool)
    found: Mask = by_name[step.op_name]
    return found


def _first_need(step: Step, number: Mask, n_blocks: int) -> I32:
    """(blocks,) first op of the first backward node that needs a product of the second run."""
    wanted = np.zeros(step.n_storages, bool)
    wanted[step.save_storage[number]] = True
    reads = (step.op_phase[step.use_op] == Phase.BACKWARD) & wanted[step.use_storage]
    ops = step.use_op[reads]
    starts = node_start(step)
    anchor = np.full(n_blocks, step.n_ops, np.int32)
    inside = step.op_block[ops] >= 0
    np.minimum.at(anchor, step.op_block[ops[inside]], starts[ops[inside]])
    return anchor


def node_start(step: Step) -> I32:
    """(n,) first op of the autograd node that each backward op belongs to; the op itself for all others."""
    same = np.concatenate([[False], (step.op_node[1:] == step.op_node[:-1]) & (step.op_node[1:] >= 0)])
    starts = np.where(same, -1, np.arange(step.n_ops))
    found: I32 = np.maximum.accumulate(starts).astype(np.int32)
    return found


def _changed_buffers(step: Step, forward: Mask, active: I32) -> tuple[I32, I32]:
    """Blocks and buffers (block[i], storage[i]) that a block's forward writes into (Rule 4)."""
    writes = (step.use_mutates == 1) & forward[step.use_op] & (step.kind[step.use_storage] == Kind.BUFFER)
    writes &= np.isin(step.op_block[step.use_op], active)
    pairs = np.unique(np.stack([step.op_block[step.use_op[writes]], step.use_storage[writes]], 1), axis=0)
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)


def _save_buffers(edit: Edit, step: Step, buffers: tuple[I32, I32], anchor: I32) -> I32:
    block, storage = buffers
    ops = edit.add_ops(
        "aten.clone.default", before=anchor[block], phase=Phase.RECOMPUTE, block=block, traffic_bytes=2 * step.bytes[storage]
    )
    edit.add_uses(ops, storage)
    return edit.add_storages(step.bytes[storage], producer=ops)


def _put_back_buffers(edit: Edit, step: Step, buffers: tuple[I32, I32], copies: I32, anchor: I32) -> None:
    block, storage = buffers
    if not len(block):
        return
    ops = edit.add_ops(
        "aten.copy_.default", before=anchor[block], phase=Phase.RECOMPUTE, block=block, traffic_bytes=2 * step.bytes[storage]
    )
    edit.add_uses(ops, storage, mutates=True)
    last = np.asarray([ops[np.flatnonzero(block == b)[-1]] for b in block], np.int32)
    edit.add_uses(last, copies)  # the copies are let go together, after the last one is put back


def _hold_kept_and_inputs(
    edit: Edit, step: Step, kept_op: Mask, made_in: I32, end: I32, release: I32
) -> None:
    """What the second run needs stays until the block's last recomputed tensor has been used."""
    kept = np.flatnonzero((step.producer >= 0) & kept_op[step.producer]).astype(np.int32)
    of_kept = made_in[kept]
    inputs = (release[step.input_block] >= 0) & (step.held_until[step.input_storage] != FOREVER)
    inputs &= made_in[step.input_storage] != step.input_block
    block = np.concatenate([step.input_block[inputs], of_kept])
    storage = np.concatenate([step.input_storage[inputs], kept])
    order = np.argsort(block, kind="stable")
    block, storage = block[order].astype(np.int32), storage[order].astype(np.int32)
    edit.add_saves(storage, before=end[block] + 1, until=release[block], block=block)
