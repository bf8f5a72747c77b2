"""Optimizer state, parameters and gradients on SSD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.ssd_states.ssd_lock_free import LockFreeOnSsd as LockFreeOnSsd
    from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer as SsdOptimizer
    from memtune.offload.ssd_states.ssd_optimizer_pass import (
        OffloadedParameters as OffloadedParameters,
        gradients_on_ssd as gradients_on_ssd,
        optimizer_in_host_pieces as optimizer_in_host_pieces,
        optimizer_on_ssd as optimizer_on_ssd,
        swept_from_ssd as swept_from_ssd,
    )
    from memtune.offload.ssd_states.ssd_overlapped_optimizer import (
        SsdOverlappedOptimizer as SsdOverlappedOptimizer,
    )
    from memtune.offload.ssd_states.ssd_overlapped_pass import (
        not_overlappable as not_overlappable,
        optimizer_on_ssd_overlapped as optimizer_on_ssd_overlapped,
    )
else:
    __getattr__ = open_door(__name__)
