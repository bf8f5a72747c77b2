"""Eviction and rematerialization of tensors under a byte budget while the model runs (DTR, MegTaiChi,
Coop).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
    from memtune.activations.eviction.eviction_pass import (
        RuntimeCosts,
        least_budget_bytes,
        online_policy,
        peak_within,
        with_peak,
    )
    from memtune.activations.eviction.op_metadata import Costs, scratch_name
    from memtune.activations.eviction.policy import (
        COOP,
        DTR,
        DTR_HEURISTICS,
        MEGTAICHI,
        Policy,
        Trace,
        coop_options,
        dtr_options,
        megtaichi_options,
    )
    from memtune.activations.eviction.policy_schedule_planner import (
        PolicySchedule,
        freeze,
        least_bytes,
        region_trace,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "COOP",
    "DTR",
    "DTR_HEURISTICS",
    "MEGTAICHI",
    "Costs",
    "OnlineRegion",
    "OnlineSettings",
    "Policy",
    "PolicySchedule",
    "RuntimeCosts",
    "Trace",
    "coop_options",
    "dtr_options",
    "freeze",
    "least_budget_bytes",
    "least_bytes",
    "megtaichi_options",
    "online_policy",
    "peak_within",
    "region_trace",
    "scratch_name",
    "with_peak",
]
