"""Blocks that run several times in one forward (ALBERT's shared layers): each call as a block of its own, and back again.

A pass that runs a block once more must do so per call, since each call has inputs, products and a backward of its own. What
tells calls apart is their order: between two calls of a block another part of the model runs. Two calls with nothing at all
between them are taken for one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.program import I32, Phase, Step


def split_calls(step: Step) -> tuple[Step, I32]:
    """`step` with one block per call, and (calls,) the block that each calls; `step` itself where every block runs once."""
    forward = np.flatnonzero(step.op_phase == Phase.FORWARD)
    call, block, first = _runs(step.op_block[forward])
    same = np.arange(len(step.blocks), dtype=np.int32)
    if len(block) <= len(np.unique(block)):
        return step, same
    backward = np.flatnonzero((step.op_phase == Phase.BACKWARD) & (step.op_node >= 0))
    backward = backward[np.argsort(step.op_node[backward], kind="stable")]  # in the order of the forward's nodes
    backward_call, backward_block, _ = _runs(step.op_block[backward])
    if not np.array_equal(backward_block, block):  # some call has no backward, or several: they cannot be told apart
        return step, same
    op_block = np.full(step.n_ops, -1, np.int32)
    op_block[forward], op_block[backward] = call, backward_call
    start = forward[first].astype(np.int32)
    made_again = (step.op_phase == Phase.RECOMPUTE) & (step.op_block >= 0)
    for op in np.flatnonzero(made_again)[::-1].tolist():  # the model's own checkpoint: of the call whose backward follows
        following = op_block[op + 1 :]
        mine = np.flatnonzero((following >= 0) & (step.op_block[op + 1 :] == step.op_block[op]))
        op_block[op] = following[mine[0]] if len(mine) else -1
    calls = replace(
        step,
        blocks=tuple(step.blocks[each] for each in block),
        op_block=op_block,
        save_block=_latest(step.save_block, step.save_before, block, start),
        input_block=_next(step.input_block, step.producer[step.input_storage], block, start),
    )
    return calls, block


def join_calls(step: Step, blocks: tuple[str, ...], block_of: I32) -> Step:
    """`step`, which has one block per call, with the blocks `blocks` again."""
    back = np.append(block_of, np.int32(-1))  # the last entry serves block -1
    return replace(
        step,
        blocks=blocks,
        op_block=back[step.op_block],
        save_block=back[step.save_block],
        input_block=back[step.input_block],
    )


def _runs(block: I32) -> tuple[I32, I32, I32]:
    """Calls along a row of blocks: (n,) call of each, (calls,) their blocks, (calls,) where they start."""
    begins = np.diff(block, prepend=np.int32(-1)) != 0
    begins &= block >= 0
    call = np.where(block >= 0, np.cumsum(begins) - 1, -1).astype(np.int32)
    first = np.flatnonzero(begins).astype(np.int32)
    return call, block[first].astype(np.int32), first


def _latest(of: I32, before: I32, block: I32, start: I32) -> I32:
    """(v,) the last call of each block in `of` that had begun by op `before`."""
    found = np.full(len(of), -1, np.int32)
    for call, (its_block, its_start) in enumerate(zip(block.tolist(), start.tolist(), strict=True)):
        found[(of == its_block) & (its_start <= before)] = call
    return found


def _next(of: I32, made_at: I32, block: I32, start: I32) -> I32:
    """(i,) the first call of each block in `of` that began after `made_at`."""
    found = np.full(len(of), -1, np.int32)
    for call in range(len(block) - 1, -1, -1):
        found[(of == block[call]) & (start[call] > made_at)] = call
    return found
