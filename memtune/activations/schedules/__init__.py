"""Execution of a region by a static schedule of compute, free and copy steps (Checkmate)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.schedules import codegen as codegen, scheduled_region as scheduled_region
    from memtune.activations.schedules.block_regions_pass import (
        BlockRegions as BlockRegions,
        block_regions_of as block_regions_of,
        find_block_schedule_error as find_block_schedule_error,
        run_blocks as run_blocks,
    )
    from memtune.activations.schedules.checkmate_planner import (
        Problem as Problem,
        Solution as Solution,
        solve_exactly as solve_exactly,
        solve_rounded as solve_rounded,
    )
    from memtune.activations.schedules.region_pass import (
        Region as Region,
        added_gradients as added_gradients,
        not_foreseen as not_foreseen,
        region_among as region_among,
        region_of as region_of,
    )
    from memtune.activations.schedules.schedule_pass import (
        elements_of as elements_of,
        run_schedule as run_schedule,
    )
    from memtune.activations.schedules.scheduled_region import ScheduledRegion as ScheduledRegion
else:
    __getattr__ = open_door(__name__)
