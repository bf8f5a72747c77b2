"""Optimizer state, parameters and gradients on SSD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.ssd_states.ssd_lock_free import LockFreeOnSsd
    from memtune.offload.ssd_states.ssd_optimizer import HostPieces, SsdOptimizer
    from memtune.offload.ssd_states.ssd_optimizer_pass import (
        Away,
        gradients_on_ssd,
        optimizer_in_host_pieces,
        optimizer_on_ssd,
        swept_from_ssd,
    )
    from memtune.offload.ssd_states.ssd_overlapped_optimizer import SsdBesideBackward
    from memtune.offload.ssd_states.ssd_overlapped_pass import (
        not_beside_backward,
        optimizer_on_ssd_beside_backward,
    )
    from memtune.offload.ssd_states.ssd_parameters import AtTheEnd, KeptParameters
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "AtTheEnd",
    "Away",
    "HostPieces",
    "KeptParameters",
    "LockFreeOnSsd",
    "SsdBesideBackward",
    "SsdOptimizer",
    "gradients_on_ssd",
    "not_beside_backward",
    "optimizer_in_host_pieces",
    "optimizer_on_ssd",
    "optimizer_on_ssd_beside_backward",
    "swept_from_ssd",
]
