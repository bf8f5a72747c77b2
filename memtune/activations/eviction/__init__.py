"""Eviction and recomputation of tensors under a byte budget while the model runs (DTR, MegTaiChi, Coop)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.activations.eviction.evicting_region import (
        OnlineRegion as OnlineRegion,
        OnlineSettings as OnlineSettings,
    )
    from memtune.activations.eviction.eviction_pass import (
        RuntimeCosts as RuntimeCosts,
        least_budget_bytes as least_budget_bytes,
        online_policy as online_policy,
        peak_within as peak_within,
        with_peak as with_peak,
    )
    from memtune.activations.eviction.op_metadata import Costs as Costs, scratch_name as scratch_name
    from memtune.activations.eviction.policy import (
        COOP as COOP,
        DTR as DTR,
        DTR_HEURISTICS as DTR_HEURISTICS,
        MEGTAICHI as MEGTAICHI,
        HostLink as HostLink,
        Policy as Policy,
        Trace as Trace,
        coop_options as coop_options,
        dtr_options as dtr_options,
        megtaichi_options as megtaichi_options,
    )
    from memtune.activations.eviction.policy_schedule_planner import (
        PolicySchedule as PolicySchedule,
        freeze as freeze,
        least_bytes as least_bytes,
        region_trace as region_trace,
    )
else:
    __getattr__ = open_door(__name__)
