"""Host optimizer: gradient offload, native update, deferred and asynchronous updates, fused backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.optimizer import host_capacity as host_capacity
    from memtune.offload.optimizer.async_updates import Gradients, Sweeps
    from memtune.offload.optimizer.deferred_updates import DeferredUpdates
    from memtune.offload.optimizer.fused_backward import FusedBackward
    from memtune.offload.optimizer.fused_backward_pass import (
        needed_after_ready,
        not_at_gradients,
        updates_at_gradients,
    )
    from memtune.offload.optimizer.grad_offload import GradientOffload, resident_parameters
    from memtune.offload.optimizer.grad_offload_pass import (
        ADD,
        COPY,
        READ,
        SENTINEL,
        UP,
        UPDATE,
        WRITE,
        InsertedOp,
        InsertedOps,
        OffloadTiming,
        free_buckets,
        host_gradients,
        insert_ops,
        no_sentinel,
        overlap_optimizer,
        sentinel_row,
        sums_to_host,
    )
    from memtune.offload.optimizer.host_capacity import available_bytes
    from memtune.offload.optimizer.host_optimizer import (
        HostOptimizer,
        Update,
        add_gradient,
        refuse_added_parameters,
        write_during_update_error,
    )
    from memtune.offload.optimizer.host_optimizer_pass import (
        UPDATES,
        Native,
        no_native_update,
        not_contiguous,
        optimizer_on_host,
        unknown_optimizer,
        update_by,
        update_bytes,
        without_own_update,
    )
    from memtune.offload.optimizer.native_update import (
        BLOCK,
        DTYPES,
        Moments,
        NativeUpdate,
        master_of,
        no_native_update_for,
        on_update_thread,
        zeros_in_order_of,
    )
    from memtune.offload.optimizer.resident_state_pass import (
        cannot_part,
        overlap_optimizer_partly,
        updated_first,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "ADD",
    "BLOCK",
    "COPY",
    "DTYPES",
    "READ",
    "SENTINEL",
    "UP",
    "UPDATE",
    "UPDATES",
    "WRITE",
    "DeferredUpdates",
    "FusedBackward",
    "GradientOffload",
    "Gradients",
    "HostOptimizer",
    "InsertedOp",
    "InsertedOps",
    "Moments",
    "Native",
    "NativeUpdate",
    "OffloadTiming",
    "Sweeps",
    "Update",
    "add_gradient",
    "available_bytes",
    "cannot_part",
    "free_buckets",
    "host_capacity",
    "host_gradients",
    "insert_ops",
    "master_of",
    "needed_after_ready",
    "no_native_update",
    "no_native_update_for",
    "no_sentinel",
    "not_at_gradients",
    "not_contiguous",
    "on_update_thread",
    "optimizer_on_host",
    "overlap_optimizer",
    "overlap_optimizer_partly",
    "refuse_added_parameters",
    "resident_parameters",
    "sentinel_row",
    "sums_to_host",
    "unknown_optimizer",
    "update_by",
    "update_bytes",
    "updated_first",
    "updates_at_gradients",
    "without_own_update",
    "write_during_update_error",
    "zeros_in_order_of",
]
