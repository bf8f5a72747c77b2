"""Multiplexed pipeline stages: more stages than ranks, loaded in sequence (Mobius, Harmony-PP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.multiplexed.mobius_planner import (
        StageCosts as StageCosts,
        fastest_stages as fastest_stages,
        memory_bytes as memory_bytes,
    )
    from memtune.offload.multiplexed.multiplexed_stages import (
        apply_multiplexed_stages as apply_multiplexed_stages,
    )
    from memtune.offload.multiplexed.multiplexed_stages_pass import multiplexed_steps as multiplexed_steps
    from memtune.offload.multiplexed.stage_partition_planner import Partitions as Partitions
    from memtune.offload.multiplexed.stage_placement_planner import (
        BlockBytes as BlockBytes,
        BlockCosts as BlockCosts,
        cross_mapping as cross_mapping,
    )
else:
    __getattr__ = open_door(__name__)
