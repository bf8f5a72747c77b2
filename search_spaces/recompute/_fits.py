"""Reasons why blocks cannot be run a second time."""

from __future__ import annotations

import numpy as np

from memtune.program import Kind, Phase, Step
from memtune.technique import Reason


def why_not(step: Step, compiled: bool) -> Reason | None:
    """None if every block of `step` can be recomputed."""
    if not step.blocks:
        return Reason("the model has no blocks to recompute", "say which they are: def blocks(model) in model.py")
    if compiled:
        return Reason("recompute runs blocks again in eager mode", "execution.compile: false")
    changed = _changed_inputs(step)
    if changed:
        return Reason(f"{changed} changes its input in place", "write x = x + y instead of x += y there")
    return None


def _changed_inputs(step: Step) -> str:
    """Name of the first block that writes into what it was called with, '' for none; buffers are put back and do not count."""
    writes = (step.use_mutates == 1) & (step.op_phase[step.use_op] == Phase.FORWARD) & (step.op_block[step.use_op] >= 0)
    writes &= step.kind[step.use_storage] != Kind.BUFFER
    pairs = set(zip(step.input_block.tolist(), step.input_storage.tolist(), strict=True))
    made_in = np.where(step.producer >= 0, step.op_block[step.producer], -1)
    for op, storage in zip(step.use_op[writes].tolist(), step.use_storage[writes].tolist(), strict=True):
        block = int(step.op_block[op])
        if (block, storage) in pairs and made_in[storage] != block:
            return step.blocks[block]
    return ""
