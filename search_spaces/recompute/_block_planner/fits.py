"""Conditions under which blocks can run a second time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from memtune import refusals
from memtune.program import (
    WRITES,
    Kind,
    Phase,
    Step,
)
from memtune.technique import CompileScope, Facts, Reason

NO_BLOCKS = Reason(
    "the model has no blocks to recompute", "list them in def blocks(model) in model.py", "MT303"
)
FREES_NOTHING = Reason(
    "autograd saves nothing inside the blocks that could be recomputed", "recompute: {kind: none}"
)


def cannot_recompute(
    step: Step, compiled: CompileScope, keeps: Callable[[str], bool] | None = None, every: int = 1
) -> Reason | None:
    """Return why the blocks of `step` cannot be recomputed, or why that would free nothing; None if they can.

    Args:
        step: The step without recompute.
        compiled: The part of the model that is compiled.
        keeps: Ops whose outputs are kept although their block runs again; None: no op's.
        every: Blocks 0, `every`, 2 · `every`, … are recomputed.
    """
    if not step.blocks:
        return NO_BLOCKS
    if compiled:
        # Compiled code bypasses the dispatch mode that identifies ops in the second run.
        return Reason("it sees which op runs through a dispatch mode", "execution.compile: false")
    talks = _first_collective(step)
    if talks:
        return refusals.collective_runs_twice(talks)
    changed = _first_block_writing_inputs(step)
    if changed:
        return refusals.changes_input(changed)
    return None if _frees_something(step, keeps, every) else FREES_NOTHING


def no_blocks(facts: Facts) -> Reason | None:
    """Return the reason to refuse a model without blocks, where recompute would silently do nothing."""
    if facts.blocks:
        return None
    return holds_blocks_in_one_graph(facts.compiled) or NO_BLOCKS


def holds_blocks_in_one_graph(compiled: CompileScope) -> Reason | None:
    """Return a reason if compiled code calls blocks, so that wrapping a block has no effect; else None."""
    return refusals.one_graph() if compiled == "model" else None


def no_attention(step: Step) -> Reason | None:
    """Return why keeping attention's output frees nothing; None if some block runs fused attention."""
    inside = [
        step.names[name]
        for name in np.unique(step.ops.name[(step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD)])
    ]
    if any(map(is_attention, inside)):
        return None
    if any("softmax" in name for name in inside):
        fix = "call F.scaled_dot_product_attention, or choose recompute: {kind: selective}"
        return Reason(
            "attention is not fused in the blocks: its backward needs every intermediate of its forward", fix
        )
    return Reason("no attention runs inside the blocks", "recompute: {kind: full}")


def _frees_something(step: Step, keeps: Callable[[str], bool] | None, every: int) -> bool:
    """Return True if one block in `every` saves an output of its own ops other than those of `keeps`."""
    made_by = step.storages.producer[step.saves.storage]
    counted = (step.saves.block >= 0) & (step.saves.block % every == 0)
    inside = made_by[(made_by >= 0) & counted & (step.ops.block[made_by] == step.saves.block)]
    if keeps is None:
        return bool(inside.size)
    return any(not keeps(step.names[name]) for name in np.unique(step.ops.name[inside]).tolist())


def _first_collective(step: Step) -> str:
    """Return the name of the first collective that a block's own forward runs, "" if there is none."""
    # Collectives of `memtune.*` are built to run again and do not count.
    theirs = np.array([not name.startswith("memtune.") for name in step.names], bool)
    counted = (
        (step.ops.group > 0)
        & (step.ops.phase == Phase.FORWARD)
        & (step.ops.block >= 0)
        & theirs[step.ops.name]
    )
    return step.names[step.ops.name[int(counted.argmax())]] if counted.any() else ""


def _first_block_writing_inputs(step: Step) -> str:
    """Return the name of the first block that writes into its inputs, "" if there is none."""
    # Buffers are restored after the second run and do not count.
    writes = (
        (step.uses.mode == WRITES)
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


# Ops that do the expensive work of a forward, besides attention: matrix products, convolutions, recurrent
# layers.
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
    """Return True for a matrix product, convolution, recurrent layer or attention forward (op or name)."""
    return str(op) in MATMULS or is_attention(op)


def is_attention(op: Any) -> bool:
    """Return True for the forward of a fused attention kernel (an op or its name)."""
    name = str(op)
    return name.startswith(_ATTENTION) and "backward" not in name
