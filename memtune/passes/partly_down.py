"""The pass of `zero_offload: {ratio: ...}`: some parameters keep their state on the device (ZeRO-Offload++, Twin-Flow)."""

from __future__ import annotations

from dataclasses import replace

from memtune.parameters import columns_of
from memtune.passes.gradients_down import Early, optimizer_beside_backward, staying_rows
from memtune.passes.host_optimizer import Native
from memtune.passes.stays import updated_first
from memtune.program import Step


def partly_beside_backward(step: Step, native: Native, early: Early, ranks: int, ratio: float) -> Step:
    """As `optimizer_beside_backward` for `ratio` of the bytes; the rest is updated on the device, by the optimizer's own ops.

    Args:
        step: One that `passes.stays.cannot_part` has nothing to say about.
        native: The update on the host.
        early: When gradients go down.
        ranks: That train.
        ratio: Below 1.
    """
    stays, block = staying_rows(step, ratio), columns_of(step.parameters).block
    parted, ops = updated_first(step, stays)
    parted = replace(parted, parameters=replace(columns_of(parted.parameters), block=block))
    return optimizer_beside_backward(parted, native, early, ranks, stays, ops)
