"""More pipeline stages than ranks: stages share a device and swap weights (Mobius, Harmony)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.multiplexed.mobius_planner import StageCosts, fastest_stages, memory_bytes
    from memtune.offload.multiplexed.multiplexed_stages import stages_in_turn
    from memtune.offload.multiplexed.multiplexed_stages_pass import in_turn
    from memtune.offload.multiplexed.stage_partition_planner import Partitions
    from memtune.offload.multiplexed.stage_placement_planner import TurnBytes, TurnCosts, cross_mapping
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "Partitions",
    "StageCosts",
    "TurnBytes",
    "TurnCosts",
    "cross_mapping",
    "fastest_stages",
    "in_turn",
    "memory_bytes",
    "stages_in_turn",
]
