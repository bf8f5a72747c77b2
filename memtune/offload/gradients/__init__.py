"""Grad-ready times of a step, and checks that only memtune's optimizer writes gradients and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.gradients.block_grad_ready_pass import (
        BlockGradients as BlockGradients,
        Rows as Rows,
        average_on_device as average_on_device,
        averaged as averaged,
        bytes_in_copies as bytes_in_copies,
        offload_in_place as offload_in_place,
        weights_are_free as weights_are_free,
    )
    from memtune.offload.gradients.grad_clipping import clip_everywhere as clip_everywhere
    from memtune.offload.gradients.grad_ready_pass import (
        ReadyGradients as ReadyGradients,
        average_ready as average_ready,
        end_of_backward as end_of_backward,
        own_storage as own_storage,
        ready_after as ready_after,
        ready_gradients as ready_gradients,
        ready_or_reduced as ready_or_reduced,
        reduced_among as reduced_among,
    )
    from memtune.offload.gradients.grad_scaler import unscale_everywhere as unscale_everywhere
    from memtune.offload.gradients.offloaded_gradients import (
        OffloadedGradients as OffloadedGradients,
        Sums as Sums,
    )
    from memtune.offload.gradients.uncleared import warn_uncleared as warn_uncleared
    from memtune.offload.gradients.version_checks import (
        ExternalWrites as ExternalWrites,
        SentinelGradient as SentinelGradient,
        WatchedGradients as WatchedGradients,
        watch_loads as watch_loads,
    )
else:
    __getattr__ = open_door(__name__)
