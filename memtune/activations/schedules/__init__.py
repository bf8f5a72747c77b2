"""Execution of a region by a static schedule of compute, free and copy steps (Checkmate)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.schedules import codegen as codegen
    from memtune.activations.schedules import codegen_expr as codegen_expr
    from memtune.activations.schedules import scheduled_region as scheduled_region
    from memtune.activations.schedules.block_regions_pass import (
        BlockRegions,
        block_regions_of,
        find_block_schedule_error,
        run_blocks,
    )
    from memtune.activations.schedules.checkmate_planner import (
        Problem,
        Solution,
        solve_exactly,
        solve_rounded,
    )
    from memtune.activations.schedules.free_after_forward_planner import FreeAfterForwardPlanner
    from memtune.activations.schedules.partial_ops_pass import elements_of
    from memtune.activations.schedules.region_pass import (
        Region,
        added_gradients,
        not_foreseen,
        region_among,
        region_of,
    )
    from memtune.activations.schedules.schedule_pass import run_schedule
    from memtune.activations.schedules.scheduled_region import ScheduledRegion
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "BlockRegions",
    "FreeAfterForwardPlanner",
    "Problem",
    "Region",
    "ScheduledRegion",
    "Solution",
    "added_gradients",
    "block_regions_of",
    "codegen",
    "codegen_expr",
    "elements_of",
    "find_block_schedule_error",
    "not_foreseen",
    "region_among",
    "region_of",
    "run_blocks",
    "run_schedule",
    "scheduled_region",
    "solve_exactly",
    "solve_rounded",
]
