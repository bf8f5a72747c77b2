"""Grad-ready times of a step, and checks that only memtune's optimizer writes gradients and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.gradients.block_grad_ready_pass import (
        BlockGradients,
        adding,
        average_on_device,
        averaged,
        bytes_in_copies,
        offload_in_place,
        weights_are_free,
    )
    from memtune.offload.gradients.grad_clipping import clip_everywhere
    from memtune.offload.gradients.grad_ready_pass import (
        ReadyGradients,
        Rows,
        average_ready,
        end_of_backward,
        own_storage,
        parameter_bytes,
        ready_after,
        ready_gradients,
        ready_or_reduced,
        reduced_among,
    )
    from memtune.offload.gradients.grad_scaler import unscale_everywhere
    from memtune.offload.gradients.version_checks import (
        ExternalWrites,
        SentinelGradient,
        WatchedGradients,
        watch_loads,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "BlockGradients",
    "ExternalWrites",
    "ReadyGradients",
    "Rows",
    "SentinelGradient",
    "WatchedGradients",
    "adding",
    "average_on_device",
    "average_ready",
    "averaged",
    "bytes_in_copies",
    "clip_everywhere",
    "end_of_backward",
    "offload_in_place",
    "own_storage",
    "parameter_bytes",
    "ready_after",
    "ready_gradients",
    "ready_or_reduced",
    "reduced_among",
    "unscale_everywhere",
    "watch_loads",
    "weights_are_free",
]
