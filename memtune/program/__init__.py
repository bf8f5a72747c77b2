"""A training step as plain data, and the edits that passes make to it; numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.program import residency as residency
    from memtune.program.double_backward_pass import (
        ThirdRuns as ThirdRuns,
        is_differentiated_again as is_differentiated_again,
        read_by_second_order as read_by_second_order,
        saved_in_backward as saved_in_backward,
        third_runs as third_runs,
    )
    from memtune.program.edit import (
        Edit as Edit,
        PlacedOps as PlacedOps,
        accumulate_gradients as accumulate_gradients,
        held_in_backward as held_in_backward,
        hold_prefetched_copies as hold_prefetched_copies,
        pending_copy_sources as pending_copy_sources,
    )
    from memtune.program.host_updates import (
        UpdatesOnHost as UpdatesOnHost,
        one_by_one as one_by_one,
        own_update as own_update,
        owners_in_update as owners_in_update,
        updates_on_host as updates_on_host,
    )
    from memtune.program.lifecycle_steps import (
        checkpoint as checkpoint,
        evaluation as evaluation,
        first_step as first_step,
        updates_inside_backward as updates_inside_backward,
    )
    from memtune.program.memo import memoized as memoized
    from memtune.program.micro_batch_unroll import Key as Key, UnrolledRows as UnrolledRows
    from memtune.program.op_addresses import (
        ALLOCATES as ALLOCATES,
        BATCH_NORMS as BATCH_NORMS,
        EMPTY as EMPTY,
        INPUTS as INPUTS,
        MERGED_OPS as MERGED_OPS,
        SHAPE_ALONE as SHAPE_ALONE,
        OpAddress as OpAddress,
        OpAddresses as OpAddresses,
        by_name as by_name,
        calls_of as calls_of,
        from_names as from_names,
        nth_of_name as nth_of_name,
    )
    from memtune.program.op_builder import NewOps as NewOps
    from memtune.program.op_schedule import (
        Action as Action,
        OpGraph as OpGraph,
        Schedule as Schedule,
        ScheduleStep as ScheduleStep,
        build_schedule as build_schedule,
        find_schedule_error as find_schedule_error,
        forward_only as forward_only,
        parts_of as parts_of,
        plain_schedule as plain_schedule,
    )
    from memtune.program.parameter_columns import (
        ParameterColumns as ParameterColumns,
        columns_of as columns_of,
        is_in_expert as is_in_expert,
        split_expert_name as split_expert_name,
    )
    from memtune.program.pipeline_order import (
        PipelineSchedule as PipelineSchedule,
        StageAction as StageAction,
        Stages as Stages,
        idle_share as idle_share,
        slots_between as slots_between,
        stage_actions as stage_actions,
    )
    from memtune.program.residency import (
        DECAY as DECAY,
        WRITES_IN_FLIGHT as WRITES_IN_FLIGHT,
        Residency as Residency,
        Rule as Rule,
        Units as Units,
        cache_residency as cache_residency,
        lru_moves as lru_moves,
        order_of_use as order_of_use,
        smallest_window as smallest_window,
        ssd_reads_by_moment as ssd_reads_by_moment,
        ssd_spill_reads as ssd_spill_reads,
        window_residency as window_residency,
    )
    from memtune.program.row_replay import (
        NewOp as NewOp,
        RowIndex as RowIndex,
        RowMask as RowMask,
        RowReplay as RowReplay,
        RowRun as RowRun,
        Stop as Stop,
        set_lifetimes as set_lifetimes,
    )
    from memtune.program.sample_rows import batched_rows as batched_rows
    from memtune.program.saved_tensor_policy import (
        HEADER_BYTES as HEADER_BYTES,
        KEEP as KEEP,
        OFFLOAD as OFFLOAD,
        RECOMPUTE as RECOMPUTE,
        SPILL as SPILL,
        TO_HOST as TO_HOST,
        TO_SSD as TO_SSD,
        Compression as Compression,
        Hop as Hop,
        SavedTensorPolicy as SavedTensorPolicy,
        compress as compress,
    )
    from memtune.program.shard_columns import (
        FsdpUnits as FsdpUnits,
        Mask as Mask,
        Ragged as Ragged,
        Shards as Shards,
        add_storages as add_storages,
        adding_ops as adding_ops,
        complete_after as complete_after,
        gathers_of as gathers_of,
        members_of_units as members_of_units,
        moments_of_parameters as moments_of_parameters,
        optimizer_moments as optimizer_moments,
        raw_gradients as raw_gradients,
        resize_to_shards as resize_to_shards,
        rows_of_gradients as rows_of_gradients,
        sharded_storages as sharded_storages,
        shards_of as shards_of,
        units_of as units_of,
    )
    from memtune.program.step import (
        APART as APART,
        CHANNELS_FIRST as CHANNELS_FIRST,
        COMPLEX as COMPLEX,
        DONATES as DONATES,
        F64 as F64,
        FOREVER as FOREVER,
        I32 as I32,
        I64 as I64,
        ON_GPU_ONLY as ON_GPU_ONLY,
        OWN_GENERATOR as OWN_GENERATOR,
        READS as READS,
        REPEATED as REPEATED,
        U8 as U8,
        UNALIGNED as UNALIGNED,
        WRITES as WRITES,
        Call as Call,
        CallInputs as CallInputs,
        Calls as Calls,
        Hints as Hints,
        Kind as Kind,
        ModelFacts as ModelFacts,
        Ops as Ops,
        OptimizerFacts as OptimizerFacts,
        Parameter as Parameter,
        Phase as Phase,
        Precision as Precision,
        Program as Program,
        RankClass as RankClass,
        Recording as Recording,
        Resource as Resource,
        Saves as Saves,
        Step as Step,
        Storages as Storages,
        Table as Table,
        Tier as Tier,
        Uses as Uses,
        at_micro_batch as at_micro_batch,
        forward_and_backward as forward_and_backward,
        join_calls as join_calls,
        split_calls as split_calls,
        traffic_bytes as traffic_bytes,
    )
else:
    __getattr__ = open_door(__name__)
