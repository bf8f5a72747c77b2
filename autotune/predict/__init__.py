"""Predict time and memory of a program: simulation, allocator model, calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.predict.breakdown import (
        PeakRow as PeakRow,
        at_peak as at_peak,
        time_lines as time_lines,
    )
    from memtune.autotune.predict.caching_allocator import (
        AllocatorResult as AllocatorResult,
        AllocatorSettings as AllocatorSettings,
        event_stream as event_stream,
        replay as replay,
    )
    from memtune.autotune.predict.calibration import (
        Calibration as Calibration,
        SearchErrors as SearchErrors,
        calibration_of as calibration_of,
        load_searches as load_searches,
        oom_probability as oom_probability,
        residuals as residuals,
        store_search as store_search,
    )
    from memtune.autotune.predict.host_memory_check import (
        HostShortage as HostShortage,
        host_memory_shortage as host_memory_shortage,
        ssd_shortage as ssd_shortage,
    )
    from memtune.autotune.predict.machine_calibration import calibrate as calibrate
    from memtune.autotune.predict.parallel_map import ParallelMap as ParallelMap
    from memtune.autotune.predict.prediction import Prediction as Prediction
    from memtune.autotune.predict.python_work import PythonWork as PythonWork
    from memtune.autotune.predict.simulation import simulate as simulate
    from memtune.autotune.predict.snapshot import Trace as Trace, read_trace as read_trace
    from memtune.autotune.predict.tight_memory import (
        AS_CONFIGURED as AS_CONFIGURED,
        TightSetting as TightSetting,
        rank_settings as rank_settings,
    )
    from memtune.autotune.predict.timeline import step_timeline as step_timeline
else:
    __getattr__ = open_door(__name__)
