"""Plan schedules of single ops for a model or its blocks (`checkmate`, `planned`, `dtr`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.search_spaces.recompute._schedule_planner.attention_boundaries import (
        ALTERNATIVE,
        BlockBoundaries,
        Boundaries,
        block_boundary_schedules,
        boundary_schedule,
    )
    from memtune.search_spaces.recompute._schedule_planner.block_schedules import (
        BlockSchedulesPlan,
        apply_block_schedules,
        block_plan_fields,
        cannot_schedule_blocks,
        install_blocks,
        rewrite_by_block_schedules,
    )
    from memtune.search_spaces.recompute._schedule_planner.checkmate_schedule import (
        CheckmateSchedule,
        schedule_for,
    )
    from memtune.search_spaces.recompute._schedule_planner.frozen_policy import BUDGET_KNOBS, DynamicPolicy
    from memtune.search_spaces.recompute._schedule_planner.region_placement import (
        MODEL_SCHEDULED,
        SCHEDULED,
        Placement,
        SchedulePlan,
        cannot_schedule_model,
        needs_own_budget,
        placement_of,
        schedules_nothing,
    )
    from memtune.search_spaces.recompute._schedule_planner.schedule_search import (
        NOT_FASTER,
        BudgetSchedulePlan,
        FastestSchedule,
        explain_schedule,
        fastest_schedule,
        install_schedule,
        rewrite_by_schedule,
        sufficient_bytes,
        to_schedule_plan,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "ALTERNATIVE",
    "BUDGET_KNOBS",
    "MODEL_SCHEDULED",
    "NOT_FASTER",
    "SCHEDULED",
    "BlockBoundaries",
    "BlockSchedulesPlan",
    "Boundaries",
    "BudgetSchedulePlan",
    "CheckmateSchedule",
    "DynamicPolicy",
    "FastestSchedule",
    "Placement",
    "SchedulePlan",
    "apply_block_schedules",
    "block_boundary_schedules",
    "block_plan_fields",
    "boundary_schedule",
    "cannot_schedule_blocks",
    "cannot_schedule_model",
    "explain_schedule",
    "fastest_schedule",
    "install_blocks",
    "install_schedule",
    "needs_own_budget",
    "placement_of",
    "rewrite_by_block_schedules",
    "rewrite_by_schedule",
    "schedule_for",
    "schedules_nothing",
    "sufficient_bytes",
    "to_schedule_plan",
]
