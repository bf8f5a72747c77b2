"""Host optimizer: gradient offload, native update, deferred and asynchronous updates, fused backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.optimizer import host_capacity as host_capacity
    from memtune.offload.optimizer.async_updates import AsyncUpdates as AsyncUpdates, Gradients as Gradients
    from memtune.offload.optimizer.deferred_updates import DeferredUpdates as DeferredUpdates
    from memtune.offload.optimizer.fused_backward import FusedBackward as FusedBackward
    from memtune.offload.optimizer.fused_backward_pass import (
        needed_after_ready as needed_after_ready,
        not_at_gradients as not_at_gradients,
        updates_at_gradients as updates_at_gradients,
    )
    from memtune.offload.optimizer.grad_offload import (
        GradientOffload as GradientOffload,
        resident_parameters as resident_parameters,
    )
    from memtune.offload.optimizer.grad_offload_pass import (
        ADD as ADD,
        COPY as COPY,
        READ as READ,
        SENTINEL as SENTINEL,
        UP as UP,
        UPDATE as UPDATE,
        WRITE as WRITE,
        InsertedOp as InsertedOp,
        InsertedOps as InsertedOps,
        OffloadTiming as OffloadTiming,
        free_buckets as free_buckets,
        host_gradients as host_gradients,
        insert_ops as insert_ops,
        no_sentinel as no_sentinel,
        overlap_optimizer as overlap_optimizer,
        sentinel_row as sentinel_row,
        sums_to_host as sums_to_host,
    )
    from memtune.offload.optimizer.host_capacity import available_bytes as available_bytes
    from memtune.offload.optimizer.host_optimizer import (
        HostOptimizer as HostOptimizer,
        Update as Update,
        refuse_added_parameters as refuse_added_parameters,
        write_during_update_error as write_during_update_error,
    )
    from memtune.offload.optimizer.host_optimizer_pass import (
        UPDATES as UPDATES,
        Native as Native,
        no_native_update as no_native_update,
        no_state_to_offload as no_state_to_offload,
        not_contiguous as not_contiguous,
        optimizer_on_host as optimizer_on_host,
        unknown_optimizer as unknown_optimizer,
        update_by as update_by,
        update_bytes as update_bytes,
        without_own_update as without_own_update,
    )
    from memtune.offload.optimizer.native_update import (
        BLOCK as BLOCK,
        DTYPES as DTYPES,
        Moments as Moments,
        NativeUpdate as NativeUpdate,
        master_of as master_of,
        no_native_update_for as no_native_update_for,
        on_update_thread as on_update_thread,
        zeros_in_order_of as zeros_in_order_of,
    )
    from memtune.offload.optimizer.resident_state_pass import (
        cannot_part as cannot_part,
        overlap_optimizer_partly as overlap_optimizer_partly,
        updated_first as updated_first,
    )
else:
    __getattr__ = open_door(__name__)
