"""Install the optimizer and the parameter offloader of techniques that load block by block."""

from __future__ import annotations

from memtune.offload.core import is_gathered
from memtune.offload.optimizer import HostOptimizer
from memtune.offload.parameters import (
    Overlap,
    OverlappedOffloader,
    ParameterOffloader,
)
from memtune.program import (
    window_residency,
)
from memtune.runtime import Context


def apply_layers(context: Context, slots: int, overlap: Overlap | None = None) -> None:
    """Move the optimizer to the host, then the blocks' parameters, with `slots` blocks on the device at once.

    Args:
        context: Context of the model.
        slots: Width of the window.
        overlap: As in `stream_parameters`.
    """
    residency = window_residency(len(context.blocks), slots, gathered=is_gathered(context.model))
    optimizer = HostOptimizer(context, "native")
    if overlap is None:
        store = ParameterOffloader(context, residency, optimizer)
    else:
        store = OverlappedOffloader(context, residency, optimizer, overlap.deferred, at_end=overlap.at_end)
    context.checks["offload.states"] = store.check
