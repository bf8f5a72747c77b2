"""Offload of saved tensors to host memory or SSD, and their prefetch in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.offload import offloaded_tensor as offloaded_tensor
    from memtune.activations.offload.activation_offload_pass import (
        copy_end_ops as copy_end_ops,
        move_activations as move_activations,
    )
    from memtune.activations.offload.compression import (
        accepts as accepts,
        float_bytes as float_bytes,
        is_cast_weight as is_cast_weight,
        plain_scratch_bytes as plain_scratch_bytes,
    )
    from memtune.activations.offload.compression_scratch_pass import add_plain_scratch as add_plain_scratch
    from memtune.activations.offload.offloaded_tensor import (
        OffloadedTensor as OffloadedTensor,
        SavedStorage as SavedStorage,
        View as View,
        id_of as id_of,
        is_written_part as is_written_part,
    )
    from memtune.activations.offload.pipeline_slots import OwnOutputs as OwnOutputs, Slots as Slots
    from memtune.activations.offload.pipeline_slots_pass import (
        SlotMoves as SlotMoves,
        StageSpill as StageSpill,
    )
    from memtune.activations.offload.prefetch import Prefetcher as Prefetcher
    from memtune.activations.offload.selection_plan import (
        ByteShare as ByteShare,
        OffloadClaim as OffloadClaim,
        claimable_bytes as claimable_bytes,
        claimable_rows as claimable_rows,
    )
    from memtune.activations.offload.ssd_spill import SSDSpill as SSDSpill
    from memtune.activations.offload.tsplit_planner import (
        Action as Action,
        Copy as Copy,
        PlanResult as PlanResult,
        Problem as Problem,
        Tensor as Tensor,
        solve as solve,
    )
else:
    __getattr__ = open_door(__name__)
