"""Foundation of all mechanisms: context, custom operators, transfers, memory tiers, hooks and the training
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.runtime import grouped_copies as grouped_copies
    from memtune.runtime import memory_tiers as memory_tiers
    from memtune.runtime import node_topology as node_topology
    from memtune.runtime import rng_state as rng_state
    from memtune.runtime import training_step as training_step
    from memtune.runtime import transfer as transfer
    from memtune.runtime.backward_callbacks import (
        BackwardEnd,
        EarlyUpdates,
        PartialStep,
        unfinished_step_error,
    )
    from memtune.runtime.context import Context, Snapshot
    from memtune.runtime.data_alias import (
        is_data_used,
        plain_type,
        track_data,
        untrack_data,
        version_of_data,
    )
    from memtune.runtime.dropout import no_dropout
    from memtune.runtime.events import GradReady
    from memtune.runtime.grouped_copies import (
        copy_to_device_together,
        groups,
        is_observed,
        to_host_together,
    )
    from memtune.runtime.memory_tiers import (
        DEVICE,
        HOST,
        SSD,
        TIERS,
        Tier,
        current_tier,
        local,
        locals_of,
        mark,
        mark_storage,
        members_of,
        storages_of,
        tier,
        tier_of,
        tier_of_storage,
    )
    from memtune.runtime.module_hooks import (
        ForwardWrapper,
        ReplacedForward,
        UncopiedHook,
        after_step,
        before_step,
        keep_groups,
        replace_step,
        weakly,
        with_hooks,
    )
    from memtune.runtime.node_topology import Nodes, count_collective, ranks_per_node
    from memtune.runtime.op_schema import (
        BY_ELEMENT,
        BY_ELEMENT_ON_GPU,
        READ_OUTS,
        READS_GRAD_MODE,
        WatchingMode,
        draws,
        draws_nothing,
        element_bytes,
        grad_mode_on,
        group_size,
        is_dense,
        is_uncounted,
        may_be_by_element,
        may_write,
        mutated,
        one_pass_bytes,
        part_of,
        tensors_in,
        without_grad,
        without_modes,
    )
    from memtune.runtime.placement import RemoteParameters
    from memtune.runtime.rng_state import (
        NoteGenerators,
        RandomState,
        autocast_now,
        generator_of,
        generators_of,
        is_autocast_on,
        no_autocast_contexts,
        observe_kept,
        seed_generators,
    )
    from memtune.runtime.seam import (
        SEAM,
        SeamOp,
        all_gather_single,
        fake_to_host,
        link_of,
        reduce_scatter_single,
        register,
    )
    from memtune.runtime.training_step import (
        LossFunction,
        Order,
        SyncContext,
        accumulate,
        prepare_model,
        train_step,
        upload,
    )
    from memtune.runtime.transfer import COUNTERS, host_like, in_huge_pages, page_locked
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "BY_ELEMENT",
    "BY_ELEMENT_ON_GPU",
    "COUNTERS",
    "DEVICE",
    "HOST",
    "READS_GRAD_MODE",
    "READ_OUTS",
    "SEAM",
    "SSD",
    "TIERS",
    "BackwardEnd",
    "Context",
    "EarlyUpdates",
    "ForwardWrapper",
    "GradReady",
    "LossFunction",
    "Nodes",
    "NoteGenerators",
    "Order",
    "PartialStep",
    "RandomState",
    "RemoteParameters",
    "ReplacedForward",
    "SeamOp",
    "Snapshot",
    "SyncContext",
    "Tier",
    "UncopiedHook",
    "WatchingMode",
    "accumulate",
    "after_step",
    "all_gather_single",
    "autocast_now",
    "before_step",
    "copy_to_device_together",
    "count_collective",
    "current_tier",
    "draws",
    "draws_nothing",
    "element_bytes",
    "fake_to_host",
    "generator_of",
    "generators_of",
    "grad_mode_on",
    "group_size",
    "grouped_copies",
    "groups",
    "host_like",
    "in_huge_pages",
    "is_autocast_on",
    "is_data_used",
    "is_dense",
    "is_observed",
    "is_uncounted",
    "keep_groups",
    "link_of",
    "local",
    "locals_of",
    "mark",
    "mark_storage",
    "may_be_by_element",
    "may_write",
    "members_of",
    "memory_tiers",
    "mutated",
    "no_autocast_contexts",
    "no_dropout",
    "node_topology",
    "observe_kept",
    "one_pass_bytes",
    "page_locked",
    "part_of",
    "plain_type",
    "prepare_model",
    "ranks_per_node",
    "reduce_scatter_single",
    "register",
    "replace_step",
    "rng_state",
    "seed_generators",
    "storages_of",
    "tensors_in",
    "tier",
    "tier_of",
    "tier_of_storage",
    "to_host_together",
    "track_data",
    "train_step",
    "training_step",
    "transfer",
    "unfinished_step_error",
    "untrack_data",
    "upload",
    "version_of_data",
    "weakly",
    "with_hooks",
    "without_grad",
    "without_modes",
]
