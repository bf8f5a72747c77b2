"""Shared parts of offload: offloaded parameters, host copies, chunk and page layouts, update triggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.core.at_rest import (
        move_model as move_model,
        move_to_device as move_to_device,
        rest_off_device as rest_off_device,
    )
    from memtune.offload.core.deferred_updates_plan import (
        BlockTimes as BlockTimes,
        deferred_blocks as deferred_blocks,
    )
    from memtune.offload.core.fsdp_shards import (
        GatheredBlocks as GatheredBlocks,
        bytes_in_chunks as bytes_in_chunks,
        is_gathered as is_gathered,
        sharded_like as sharded_like,
    )
    from memtune.offload.core.offloaded_parameter import (
        OffloadedParameter as OffloadedParameter,
        Piece as Piece,
        adopt_together as adopt_together,
        allocate_together as allocate_together,
        free_together as free_together,
        freed_memory as freed_memory,
        host_values as host_values,
        in_chunks as in_chunks,
        place_in as place_in,
        put_back as put_back,
        restore_together as restore_together,
        set_data as set_data,
    )
    from memtune.offload.core.optimizer_param import (
        OptimizerParameter as OptimizerParameter,
        changed_type_error as changed_type_error,
        model_order as model_order,
        optimizer_parameter as optimizer_parameter,
        own_grad as own_grad,
        set_own_grad as set_own_grad,
        state_to_host as state_to_host,
        to_host_now as to_host_now,
    )
    from memtune.offload.core.parameter_layout import (
        ALIGNMENT as ALIGNMENT,
        Chunks as Chunks,
        Pages as Pages,
        aligned as aligned,
        loads_of as loads_of,
        pack as pack,
        paged as paged,
        runs as runs,
        timeline as timeline,
        until as until,
    )
    from memtune.offload.core.update_triggers import (
        PendingUpdates as PendingUpdates,
        Trigger as Trigger,
        bucket_ends as bucket_ends,
        inner_optimizers as inner_optimizers,
        not_one_by_one as not_one_by_one,
        resident_count as resident_count,
        room_bytes as room_bytes,
        sentinel_index as sentinel_index,
        waiting_room as waiting_room,
    )
else:
    __getattr__ = open_door(__name__)
