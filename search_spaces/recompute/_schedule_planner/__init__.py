"""Plans schedules of single ops for a model or its blocks (`checkmate`, `planned`, `dtr`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.search_spaces.recompute._schedule_planner.attention_boundaries import (
        INSTEAD,
        BlockBoundaries,
        Boundaries,
        boundaries_in_blocks,
        boundaries_of,
    )
    from memtune.search_spaces.recompute._schedule_planner.block_options import Exact
    from memtune.search_spaces.recompute._schedule_planner.block_schedules import (
        BlockSchedules,
        BlockSchedulesPlan,
        BudgetBlocksPlan,
        cannot_run_blocks,
        explained_blocks,
        found_by_blocks,
        install_blocks,
        plan_by_blocks,
        rewritten_by_blocks,
        under_blocks,
        which_by_block,
    )
    from memtune.search_spaces.recompute._schedule_planner.checkmate_schedule import (
        CheckmateSchedule,
        schedule_for,
    )
    from memtune.search_spaces.recompute._schedule_planner.frozen_policy import NOT_THE_POLICYS, DynamicPolicy
    from memtune.search_spaces.recompute._schedule_planner.placement import (
        SCHEDULED,
        Place,
        SchedulePlan,
        cannot_freeze,
        comes_and_goes,
        not_asked_for,
        place_of,
    )
    from memtune.search_spaces.recompute._schedule_planner.schedule_search import (
        NOT_FASTER,
        BudgetSchedulePlan,
        FastestSchedule,
        enough_bytes,
        explained_schedule,
        fastest_by_blocks,
        fastest_schedule,
        install_schedule,
        plan_of,
        rewritten_by,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "INSTEAD",
    "NOT_FASTER",
    "NOT_THE_POLICYS",
    "SCHEDULED",
    "BlockBoundaries",
    "BlockSchedules",
    "BlockSchedulesPlan",
    "Boundaries",
    "BudgetBlocksPlan",
    "BudgetSchedulePlan",
    "CheckmateSchedule",
    "DynamicPolicy",
    "Exact",
    "FastestSchedule",
    "Place",
    "SchedulePlan",
    "boundaries_in_blocks",
    "boundaries_of",
    "cannot_freeze",
    "cannot_run_blocks",
    "comes_and_goes",
    "enough_bytes",
    "explained_blocks",
    "explained_schedule",
    "fastest_by_blocks",
    "fastest_schedule",
    "found_by_blocks",
    "install_blocks",
    "install_schedule",
    "not_asked_for",
    "place_of",
    "plan_by_blocks",
    "plan_of",
    "rewritten_by",
    "rewritten_by_blocks",
    "schedule_for",
    "under_blocks",
    "which_by_block",
]
