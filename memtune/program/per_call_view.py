"""View of a Step with one block per call, for blocks that run several times in one forward.

Examples are ALBERT's shared layers and a GAN's discriminator. Each call has its own inputs, outputs and
backward, so passes that recompute a block or offload its saved tensors work per call. The recorder numbers
calls in the order in which they begin; rows of ops, saves and inputs refer to them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.program.step import Step


def split_calls(step: Step) -> Step:
    """Return `step` with one block per call, in call order; `step` itself if no block runs twice."""
    if len(step.calls.block) == len(step.blocks):
        return step
    blocks = tuple(step.blocks[each] for each in step.calls.block)
    outputs = tuple(step.block_outputs[each] for each in step.calls.block) if step.block_outputs else ()
    return replace(step, blocks=blocks, block_outputs=outputs).with_calls(
        block=np.arange(len(blocks), dtype=np.int32)
    )


def join_calls(step: Step, like: Step) -> Step:
    """Return `step`, which has one block per call of `like`, with the blocks of `like` restored."""
    if len(like.calls.block) == len(like.blocks):
        return step
    return replace(step, blocks=like.blocks, block_outputs=like.block_outputs).with_calls(
        block=like.calls.block
    )
