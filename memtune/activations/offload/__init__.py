"""Offload of saved tensors to host memory or SSD, and their prefetch in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.offload import offloaded_tensor as offloaded_tensor
    from memtune.activations.offload.activation_offload_pass import copy_end_ops, move_activations
    from memtune.activations.offload.byte_quota import ByteShare
    from memtune.activations.offload.compression import accepts, float_bytes, is_cast_weight
    from memtune.activations.offload.offloaded_tensor import (
        OffloadedTensor,
        SavedStorage,
        View,
        id_of,
        is_written_part,
    )
    from memtune.activations.offload.pipeline_slots import OwnOutputs, Slots
    from memtune.activations.offload.pipeline_slots_pass import SlotMoves, StageSpill
    from memtune.activations.offload.prefetch import Prefetcher
    from memtune.activations.offload.selection_plan import OffloadClaim, claimable_bytes, claimable_rows
    from memtune.activations.offload.ssd_spill import SSDSpill
    from memtune.activations.offload.tsplit_planner import Action, Copy, PlanResult, Problem, Tensor, solve
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "Action",
    "ByteShare",
    "Copy",
    "OffloadClaim",
    "OffloadedTensor",
    "OwnOutputs",
    "PlanResult",
    "Prefetcher",
    "Problem",
    "SSDSpill",
    "SavedStorage",
    "SlotMoves",
    "Slots",
    "StageSpill",
    "Tensor",
    "View",
    "accepts",
    "claimable_bytes",
    "claimable_rows",
    "copy_end_ops",
    "float_bytes",
    "id_of",
    "is_cast_weight",
    "is_written_part",
    "move_activations",
    "offloaded_tensor",
    "solve",
]
