"""Reasons why blocks cannot be run a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from memtune.program import Kind, Phase, Step
from memtune.technique import CompileScope, Facts, Reason

NO_BLOCKS = Reason(
    "the model has no blocks to recompute", "say which they are: def blocks(model) in model.py", "MT303"
)


def why_not(step: Step, compiled: CompileScope, keeps: Callable[[str], bool] | None = None) -> Reason | None:
    """None if every block of `step` can be recomputed, and recomputing them gives up something.

    Args:
        step: The step without recompute.
        compiled: What of the model runs compiled.
        keeps: Ops whose outputs stay although their block runs again; None: no op's.
    """
    if not step.blocks:
        return NO_BLOCKS
    if compiled:
        return Reason("it sees which op runs through a dispatch mode", "execution.compile: false")
    talks = _exchange(step)
    if talks:
        return Reason(
            f"{talks} runs inside the blocks: a second run would exchange data between ranks again",
            "recompute: {kind: none}",
        )
    changed = _changed_inputs(step)
    if changed:
        return Reason(f"{changed} changes its input in place", "write x = x + y instead of x += y there")
    if not _frees_something(step, keeps):
        return Reason(
            "autograd saves nothing inside the blocks that could be recomputed", "recompute: {kind: none}"
        )
    return None


def no_blocks(facts: Facts) -> Reason | None:
    """Why a model without blocks is refused: recompute would do nothing without a word."""
    return None if facts.blocks else NO_BLOCKS


def in_one_graph(compiled: CompileScope) -> Reason | None:
    """None if blocks are called from code that is not compiled, so that what wraps them acts; else why
    not.
    """
    return (
        Reason("one graph holds all blocks", "execution: {compile: blocks}") if compiled == "model" else None
    )


def no_attention(step: Step) -> Reason | None:
    """None if a fused attention kernel runs inside some block of `step`; else why keeping its output is no
    use.
    """
    inside = [
        step.names[name]
        for name in np.unique(step.ops.name[(step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD)])
    ]
    if any(map(is_attention, inside)):
        return None
    if any("softmax" in name for name in inside):
        fix = "call F.scaled_dot_product_attention, or choose recompute: {kind: selective}"
        return Reason(
            "attention is not fused in the blocks: its backward needs all that its forward makes", fix
        )
    return Reason("no attention runs inside the blocks", "recompute: {kind: full}")


def _frees_something(step: Step, keeps: Callable[[str], bool] | None) -> bool:
    """Whether some block saves what an op of its own made, other than an op of `keeps`."""
    made_by = step.storages.producer[step.saves.storage]
    inside = made_by[(made_by >= 0) & (step.saves.block >= 0) & (step.ops.block[made_by] == step.saves.block)]
    if keeps is None:
        return bool(inside.size)
    return any(not keeps(step.names[name]) for name in np.unique(step.ops.name[inside]).tolist())


def _exchange(step: Step) -> str:
    """Name of the first collective that a block's own forward runs, '' for none; the seam's are made for
    being run again.
    """
    theirs = np.array([not name.startswith("memtune.") for name in step.names], bool)
    mine = (
        (step.ops.group > 0)
        & (step.ops.phase == Phase.FORWARD)
        & (step.ops.block >= 0)
        & theirs[step.ops.name]
    )
    return step.names[step.ops.name[int(mine.argmax())]] if mine.any() else ""


def _changed_inputs(step: Step) -> str:
    """Name of the first block that writes into what it was called with, '' for none; buffers are put back and
    do not count.
    """
    writes = (
        (step.uses.mode == 1)
        & (step.ops.phase[step.uses.op] == Phase.FORWARD)
        & (step.ops.block[step.uses.op] >= 0)
    )
    writes &= step.storages.kind[step.uses.storage] != Kind.BUFFER
    pairs = set(zip(step.calls.input_block.tolist(), step.calls.inputs.storage.tolist(), strict=True))
    made_in = np.where(step.storages.producer >= 0, step.ops.block[step.storages.producer], -1)
    for op, storage in zip(step.uses.op[writes].tolist(), step.uses.storage[writes].tolist(), strict=True):
        block = int(step.ops.block[op])
        if (block, storage) in pairs and made_in[storage] != block:
            return step.blocks[block]
    return ""


# Which ops do the expensive work of a forward: matrix products, convolutions and attention.
MATMULS = frozenset(
    f"aten.{name}"
    for name in (
        "mm.default",
        "addmm.default",
        "bmm.default",
        "baddbmm.default",
        "_scaled_mm.default",
        "linear.default",
        "convolution.default",
        "_convolution.default",
        "mkldnn_rnn_layer.default",
        "_cudnn_rnn.default",
        "_grouped_mm.default",
    )
)

_ATTENTION = (
    "aten._scaled_dot_product_",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "aten._cudnn_attention",
    "flash_attn._flash_attn_forward",
    "flash_attn._flash_attn_varlen_forward",  # as the flash-attn package registers them
)


def is_matmul_or_attention(op: Any) -> bool:
    """Whether `op` (an op, or its name) is a matrix product, a convolution, a recurrent layer or an attention
    forward.
    """
    return str(op) in MATMULS or is_attention(op)


def is_attention(op: Any) -> bool:
    """Whether `op` (an op, or its name) is the forward of a fused attention kernel."""
    name = str(op)
    return name.startswith(_ATTENTION) and "backward" not in name
