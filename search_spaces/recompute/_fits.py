"""Reasons why blocks cannot be run a second time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from memtune.errors import ApplyError
from memtune.program import Kind, Phase, Step
from memtune.runtime.activations import Region
from memtune.runtime.context import Context
from memtune.search_spaces.recompute._keeps import is_attention
from memtune.technique import CompileScope, Reason


def why_not(step: Step, compiled: CompileScope, keeps: Callable[[str], bool] | None = None) -> Reason | None:
    """None if every block of `step` can be recomputed, and recomputing them gives up something.

    Args:
        step: The step without recompute.
        compiled: What of the model runs compiled.
        keeps: Ops whose outputs stay although their block runs again; None: no op's.
    """
    if not step.blocks:
        return Reason("the model has no blocks to recompute", "say which they are: def blocks(model) in model.py")
    if compiled:
        return Reason("it sees which op runs through a dispatch mode", "execution.compile: false")
    talks = _exchange(step)
    if talks:
        return Reason(
            f"{talks} runs inside the blocks: a second run would exchange data between ranks again", "recompute: {kind: none}"
        )
    changed = _changed_inputs(step)
    if changed:
        return Reason(f"{changed} changes its input in place", "write x = x + y instead of x += y there")
    if not _frees_something(step, keeps):
        return Reason("autograd saves nothing inside the blocks that could be recomputed", "recompute: {kind: none}")
    return None


def blocks_of(context: Context, kind: str) -> Sequence[Region]:
    """The blocks that `kind` claims.

    Raises:
        ApplyError: The model has none, so it would do nothing without a word.
    """
    if not context.activations.regions:
        raise ApplyError(
            f"recompute: {{kind: {kind}}} finds nothing to recompute.", evidence="The model has no repeated blocks.",
            fix="say which they are: def blocks(model) in model.py; or recompute: {kind: none}", code="MT303",
        )  # fmt: skip
    return context.activations.regions


def in_one_graph(compiled: CompileScope) -> Reason | None:
    """None if blocks are called from code that is not compiled, so that what wraps them acts; else why not."""
    return Reason("one graph holds all blocks", "execution: {compile: blocks}") if compiled == "model" else None


def no_attention(step: Step) -> Reason | None:
    """None if a fused attention kernel runs inside some block of `step`; else why keeping its output is no use."""
    inside = [step.names[name] for name in np.unique(step.op_name[(step.op_block >= 0) & (step.op_phase == Phase.FORWARD)])]
    if any(map(is_attention, inside)):
        return None
    if any("softmax" in name for name in inside):
        fix = "call F.scaled_dot_product_attention, or choose recompute: {kind: selective}"
        return Reason("attention is not fused in the blocks: its backward needs all that its forward makes", fix)
    return Reason("no attention runs inside the blocks", "recompute: {kind: full}")


def _frees_something(step: Step, keeps: Callable[[str], bool] | None) -> bool:
    """Whether some block saves what an op of its own made, other than an op of `keeps`."""
    made_by = step.producer[step.save_storage]
    inside = made_by[(made_by >= 0) & (step.save_block >= 0) & (step.op_block[made_by] == step.save_block)]
    if keeps is None:
        return bool(inside.size)
    return any(not keeps(step.names[name]) for name in np.unique(step.op_name[inside]).tolist())


def _exchange(step: Step) -> str:
    """Name of the first collective that a block's own forward runs, '' for none; the seam's are made for being run again."""
    theirs = np.array([not name.startswith("memtune.") for name in step.names], bool)
    mine = (step.op_group > 0) & (step.op_phase == Phase.FORWARD) & (step.op_block >= 0) & theirs[step.op_name]
    return step.names[step.op_name[int(mine.argmax())]] if mine.any() else ""


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
