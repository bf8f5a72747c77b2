"""Blocks that run several times in one forward (ALBERT's shared layers, a GAN's discriminator): each call as
a block of its own.

A pass that runs a block once more, or moves what it saved, must do so per call, since each call has inputs,
products and a backward of its own. The recorder numbers the calls as it sees each begin; ops, saves and
inputs name theirs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.program.step import Step


def split_calls(step: Step) -> Step:
    """`step` with one block per call, in the order of the calls; `step` itself where no block runs twice."""
    if len(step.calls.block) == len(step.blocks):
        return step
    blocks = tuple(step.blocks[each] for each in step.calls.block)
    outputs = tuple(step.block_outputs[each] for each in step.calls.block) if step.block_outputs else ()
    return replace(step, blocks=blocks, block_outputs=outputs).with_calls(
        block=np.arange(len(blocks), dtype=np.int32)
    )


def join_calls(step: Step, like: Step) -> Step:
    """`step`, which has one block per call of `like`, with the blocks of `like` again."""
    if len(like.calls.block) == len(like.blocks):
        return step
    return replace(step, blocks=like.blocks, block_outputs=like.block_outputs).with_calls(
        block=like.calls.block
    )
