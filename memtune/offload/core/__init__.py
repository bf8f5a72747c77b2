"""Shared parts of offload: offloaded parameters, host copies, chunk and page layouts, update triggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.core.at_rest import (
        freed_memory,
        host_values,
        move_model,
        move_to_device,
        rest_off_device,
        ssd_values,
    )
    from memtune.offload.core.deferred_updates_plan import BlockTimes, deferred_blocks
    from memtune.offload.core.fsdp_shards import (
        GatheredBlocks,
        bytes_in_chunks,
        count_changes,
        is_gathered,
        sharded_like,
    )
    from memtune.offload.core.offloaded_parameter import (
        OffloadedParameter,
        Piece,
        adopt_together,
        allocate_together,
        free_together,
        in_chunks,
        place_in,
        put_back,
        restore_together,
        set_data,
    )
    from memtune.offload.core.optimizer_param import (
        OptimizerParameter,
        changed_type_error,
        model_order,
        optimizer_parameter,
        own_grad,
        set_own_grad,
        state_to_host,
        to_host_now,
    )
    from memtune.offload.core.parameter_layout import (
        ALIGNMENT,
        Chunks,
        Pages,
        aligned,
        loads_of,
        pack,
        paged,
        runs,
        timeline,
        until,
    )
    from memtune.offload.core.update_triggers import (
        PendingUpdates,
        Trigger,
        bucket_ends,
        not_one_by_one,
        resident_count,
        room_bytes,
        sentinel_index,
        waiting_room,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "ALIGNMENT",
    "BlockTimes",
    "Chunks",
    "GatheredBlocks",
    "OffloadedParameter",
    "OptimizerParameter",
    "Pages",
    "PendingUpdates",
    "Piece",
    "Trigger",
    "adopt_together",
    "aligned",
    "allocate_together",
    "bucket_ends",
    "bytes_in_chunks",
    "changed_type_error",
    "count_changes",
    "deferred_blocks",
    "free_together",
    "freed_memory",
    "host_values",
    "in_chunks",
    "is_gathered",
    "loads_of",
    "model_order",
    "move_model",
    "move_to_device",
    "not_one_by_one",
    "optimizer_parameter",
    "own_grad",
    "pack",
    "paged",
    "place_in",
    "put_back",
    "resident_count",
    "rest_off_device",
    "restore_together",
    "room_bytes",
    "runs",
    "sentinel_index",
    "set_data",
    "set_own_grad",
    "sharded_like",
    "ssd_values",
    "state_to_host",
    "timeline",
    "to_host_now",
    "until",
    "waiting_room",
]
