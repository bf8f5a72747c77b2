"""Install the optimizer and the parameter offloader of techniques that load block by block."""

from __future__ import annotations

from memtune.offload.core import is_gathered
from memtune.offload.optimizer import HostOptimizer
from memtune.offload.parameters import (
    BlockGradients,
    BlockUnits,
    BlockUpdates,
    OffloadedBlocks,
    Overlap,
    ParameterOffloader,
    largest_block_bytes,
)
from memtune.program import window_residency
from memtune.runtime import Context


def apply_layers(context: Context, slots: int, overlap: Overlap | None = None) -> None:
    """Move the optimizer to the host, then blocks' parameters, with `slots` blocks on the device at once."""
    residency = window_residency(len(context.blocks), slots, gathered=is_gathered(context.model))
    optimizer = HostOptimizer(context, "native")
    blocks = OffloadedBlocks(context, optimizer)
    units = BlockUnits(context, blocks)
    # Overlapped, the copies of a block's gradients overlap with the next block.
    room_bytes = 0 if overlap is None else largest_block_bytes(context, blocks)
    gradients = BlockGradients(context, blocks, room_bytes=room_bytes)
    updates = BlockUpdates(context, optimizer, blocks, gradients, overlap, units)
    store = ParameterOffloader(context, residency, blocks, units, gradients, updates, optimizer.check)
    context.checks["offload.states"] = store.check
