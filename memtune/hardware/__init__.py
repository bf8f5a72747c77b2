"""The machine as data: devices, links and rates, and the times of ops and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.hardware import (
        calibration_cache as calibration_cache,
        cpu_probe as cpu_probe,
        flops as flops,
        mechanism_costs as mechanism_costs,
    )
    from memtune.hardware.calibration_cache import Calibration as Calibration, Curve as Curve
    from memtune.hardware.cpu_cores import (
        core_sets as core_sets,
        cpu_threads as cpu_threads,
        numa_nodes as numa_nodes,
        threads_per_rank as threads_per_rank,
        usable_cores as usable_cores,
        use_share_of_cores as use_share_of_cores,
    )
    from memtune.hardware.known_devices import known_name as known_name, names as names
    from memtune.hardware.machine_load import BUSY as BUSY, LoadMeter as LoadMeter, reference_s as reference_s
    from memtune.hardware.op_clock import (
        OpClock as OpClock,
        TimedOp as TimedOp,
        UpdateClock as UpdateClock,
        clock_of as clock_of,
    )
    from memtune.hardware.op_time import OpTime as OpTime, half_decade as half_decade
    from memtune.hardware.op_timings import op_times as op_times
    from memtune.hardware.rate_probe import measure_rates as measure_rates
    from memtune.hardware.roofline import (
        CLASSES as CLASSES,
        EVERY_CLASS as EVERY_CLASS,
        matmul_dtype as matmul_dtype,
        op_class as op_class,
        op_costs as op_costs,
        op_s as op_s,
    )
    from memtune.hardware.spec import (
        Device as Device,
        Hardware as Hardware,
        detect as detect,
        find as find,
        gpu_name as gpu_name,
        with_measured as with_measured,
    )
else:
    __getattr__ = open_door(__name__)
