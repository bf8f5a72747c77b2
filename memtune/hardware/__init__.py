"""The machine as data: devices, links and rates, and the times of ops and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.hardware import calibration_cache as calibration_cache
    from memtune.hardware import cpu_probe as cpu_probe
    from memtune.hardware import flops as flops
    from memtune.hardware import mechanism_costs as mechanism_costs
    from memtune.hardware.calibration_cache import Calibration, Curve
    from memtune.hardware.cpu_cores import (
        core_sets,
        cpu_threads,
        numa_nodes,
        threads_per_rank,
        usable_cores,
        use_share_of_cores,
    )
    from memtune.hardware.known_devices import known_name, names
    from memtune.hardware.machine_load import BUSY, LoadMeter, reference_s
    from memtune.hardware.op_clock import OpClock, TimedOp, UpdateClock, clock_of
    from memtune.hardware.op_time import OpTime
    from memtune.hardware.op_timings import op_times
    from memtune.hardware.rate_probe import measure_rates
    from memtune.hardware.roofline import CLASSES, EVERY_CLASS, matmul_dtype, op_class, op_costs, op_s
    from memtune.hardware.spec import Device, Hardware, detect, find, gpu_name, with_measured
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "BUSY",
    "CLASSES",
    "EVERY_CLASS",
    "Calibration",
    "Curve",
    "Device",
    "Hardware",
    "LoadMeter",
    "OpClock",
    "OpTime",
    "TimedOp",
    "UpdateClock",
    "calibration_cache",
    "clock_of",
    "core_sets",
    "cpu_probe",
    "cpu_threads",
    "detect",
    "find",
    "flops",
    "gpu_name",
    "known_name",
    "matmul_dtype",
    "measure_rates",
    "mechanism_costs",
    "names",
    "numa_nodes",
    "op_class",
    "op_costs",
    "op_s",
    "op_times",
    "reference_s",
    "threads_per_rank",
    "usable_cores",
    "use_share_of_cores",
    "with_measured",
]
