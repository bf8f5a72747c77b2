"""Predict time and memory of a program: simulation, allocator model, calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.predict.breakdown import PeakRow, at_peak, time_lines
    from memtune.autotune.predict.caching_allocator import AllocatorResult, AllocatorSettings, replay
    from memtune.autotune.predict.calibration import (
        SearchErrors,
        calibration_of,
        load_searches,
        oom_probability,
        residuals,
        store_search,
    )
    from memtune.autotune.predict.host_memory_check import HostShortage, host_memory_shortage, ssd_shortage
    from memtune.autotune.predict.machine_calibration import calibrate
    from memtune.autotune.predict.parallel_map import ParallelMap
    from memtune.autotune.predict.python_work import PythonWork
    from memtune.autotune.predict.simulation import Calibration, Prediction, simulate
    from memtune.autotune.predict.snapshot import Trace, read_trace
    from memtune.autotune.predict.tight_memory import TightSetting, rank_settings
    from memtune.autotune.predict.timeline import step_timeline
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "AllocatorResult",
    "AllocatorSettings",
    "Calibration",
    "HostShortage",
    "ParallelMap",
    "PeakRow",
    "Prediction",
    "PythonWork",
    "SearchErrors",
    "TightSetting",
    "Trace",
    "at_peak",
    "calibrate",
    "calibration_of",
    "host_memory_shortage",
    "load_searches",
    "oom_probability",
    "rank_settings",
    "read_trace",
    "replay",
    "residuals",
    "simulate",
    "ssd_shortage",
    "step_timeline",
    "store_search",
    "time_lines",
]
