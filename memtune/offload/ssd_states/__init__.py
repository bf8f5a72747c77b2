"""Optimizer state, parameters and gradients on SSD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.ssd_states.ssd_lock_free import LockFreeOnSsd
    from memtune.offload.ssd_states.ssd_optimizer import HostPieces, SsdOptimizer
    from memtune.offload.ssd_states.ssd_optimizer_pass import (
        OffloadedParameters,
        gradients_on_ssd,
        optimizer_in_host_pieces,
        optimizer_on_ssd,
        swept_from_ssd,
    )
    from memtune.offload.ssd_states.ssd_overlapped_optimizer import SsdOverlappedOptimizer
    from memtune.offload.ssd_states.ssd_overlapped_pass import (
        not_overlappable,
        optimizer_on_ssd_overlapped,
    )
    from memtune.offload.ssd_states.ssd_parameters import StepEndUpdates, TieredOffloader
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "HostPieces",
    "LockFreeOnSsd",
    "OffloadedParameters",
    "SsdOptimizer",
    "SsdOverlappedOptimizer",
    "StepEndUpdates",
    "TieredOffloader",
    "gradients_on_ssd",
    "not_overlappable",
    "optimizer_in_host_pieces",
    "optimizer_on_ssd",
    "optimizer_on_ssd_overlapped",
    "swept_from_ssd",
]
