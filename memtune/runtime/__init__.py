"""Foundation of all mechanisms: context, custom operators, transfers, memory tiers, hooks and the training
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.runtime import (
        memory_tiers as memory_tiers,
        node_topology as node_topology,
        rng_state as rng_state,
        seam as seam,
        training_step as training_step,
        transfer as transfer,
    )
    from memtune.runtime.context import Context as Context, Snapshot as Snapshot
    from memtune.runtime.dropout import no_dropout as no_dropout
    from memtune.runtime.events import GradReady as GradReady
    from memtune.runtime.forward_switch import ForwardSwitch as ForwardSwitch
    from memtune.runtime.memory_tiers import (
        DEVICE as DEVICE,
        HOST as HOST,
        SSD as SSD,
        TIERS as TIERS,
        Tier as Tier,
        current_tier as current_tier,
        local as local,
        locals_of as locals_of,
        mark as mark,
        mark_storage as mark_storage,
        members_of as members_of,
        memory_of as memory_of,
        storages_of as storages_of,
        tier as tier,
        tier_of as tier_of,
        tier_of_storage as tier_of_storage,
    )
    from memtune.runtime.node_topology import (
        Nodes as Nodes,
        count_collective as count_collective,
        ranks_per_node as ranks_per_node,
    )
    from memtune.runtime.op_recorder import (
        EagerRecorder as EagerRecorder,
        OpRecorder as OpRecorder,
        OpVisitor as OpVisitor,
        WatchingMode as WatchingMode,
    )
    from memtune.runtime.op_schema import (
        BY_ELEMENT as BY_ELEMENT,
        BY_ELEMENT_ON_GPU as BY_ELEMENT_ON_GPU,
        READ_OUTS as READ_OUTS,
        READS_GRAD_MODE as READS_GRAD_MODE,
        draws as draws,
        draws_nothing as draws_nothing,
        element_bytes as element_bytes,
        grad_mode_on as grad_mode_on,
        group_size as group_size,
        is_dense as is_dense,
        is_uncounted as is_uncounted,
        may_be_by_element as may_be_by_element,
        may_write as may_write,
        mutated as mutated,
        one_pass_bytes as one_pass_bytes,
        part_of as part_of,
        tensors_in as tensors_in,
        without_modes as without_modes,
    )
    from memtune.runtime.placement import RemoteParameters as RemoteParameters
    from memtune.runtime.rng_state import (
        NoteGenerators as NoteGenerators,
        PythonDraws as PythonDraws,
        RandomState as RandomState,
        autocast_now as autocast_now,
        generator_of as generator_of,
        generators_of as generators_of,
        generators_of_files as generators_of_files,
        is_autocast_on as is_autocast_on,
        is_python_generator as is_python_generator,
        no_autocast_contexts as no_autocast_contexts,
        observe_kept as observe_kept,
        seed_generators as seed_generators,
        undone_draws as undone_draws,
    )
    from memtune.runtime.seam import (
        SEAM as SEAM,
        SeamOp as SeamOp,
        all_gather_single as all_gather_single,
        copy_to_device_together as copy_to_device_together,
        fake_to_host as fake_to_host,
        groups as groups,
        is_observed as is_observed,
        link_of as link_of,
        reduce_scatter_single as reduce_scatter_single,
        register as register,
        to_host_together as to_host_together,
    )
    from memtune.runtime.shown_grad import (
        ShowsGrad as ShowsGrad,
        class_of as class_of,
        count_changes as count_changes,
        grad_version as grad_version,
        hide_grad_of as hide_grad_of,
        hide_spent as hide_spent,
        is_data_used as is_data_used,
        is_tracked as is_tracked,
        plain_type as plain_type,
        show_as_spent as show_as_spent,
        show_grad_of as show_grad_of,
        shows_grad as shows_grad,
        spent_as_none as spent_as_none,
        track_data as track_data,
        untrack_data as untrack_data,
        version_of_data as version_of_data,
    )
    from memtune.runtime.training_hooks import (
        BackwardEnd as BackwardEnd,
        EarlyUpdates as EarlyUpdates,
        ForwardWrapper as ForwardWrapper,
        PartialStep as PartialStep,
        ReplacedForward as ReplacedForward,
        UncopiedHook as UncopiedHook,
        after_step as after_step,
        before_step as before_step,
        call_when_grad_ready as call_when_grad_ready,
        is_own_step as is_own_step,
        keep_groups as keep_groups,
        replace_step as replace_step,
        unhooked as unhooked,
        weakly as weakly,
        with_hooks as with_hooks,
    )
    from memtune.runtime.training_step import (
        LossFunction as LossFunction,
        Order as Order,
        SyncContext as SyncContext,
        accumulate as accumulate,
        prepare_model as prepare_model,
        train_step as train_step,
        upload as upload,
    )
    from memtune.runtime.transfer import (
        COUNTERS as COUNTERS,
        host_like as host_like,
        in_huge_pages as in_huge_pages,
        page_locked as page_locked,
        without_grad as without_grad,
    )
    from memtune.runtime.user_compile import BetweenGraphs as BetweenGraphs
else:
    __getattr__ = open_door(__name__)
