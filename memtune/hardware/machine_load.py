"""Load of the machine by other processes, and a reference op: is a measured time comparable with others?"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from memtune.device import streams
from memtune.hardware.cpu_cores import usable_cores

BUSY = 0.15
"""Share of the machine's cores in use by others from which measured rates are not kept."""
_REFERENCE_SIZE, _REFERENCE_SIZE_ON_CPU = 2048, 256
_REFERENCE_RUNS = 5


class LoadMeter:
    """Measures the share of this process' cores that other processes use, from its construction on.

    A process that is bound to some cores sees the load of these only.

    Args:
        processes: Number of processes that work as this one does (the ranks of a trial on this machine).
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return seconds: busy of the usable cores, CPU time of this process, clock; None without /proc."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return None
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = 0
        for name, *fields in map(str.split, lines):
            if name in mine:
                user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic()

    def others(self) -> float:
        """Return the share of the cores that others used since the start; 0 if it is unknown.

        Of several processes that work alike, one that worked less sees the rest of the others' work here,
        and one that worked more a negative share: their mean is exact.
        """
        now = self._now()
        if self._start is None or now is None:
            return 0.0
        busy_s, own_s, elapsed_s = (b - a for a, b in zip(self._start, now, strict=True))
        cores = usable_cores()
        if elapsed_s <= 0.05:  # /proc/stat counts hundredths of a second
            return 0.0
        return (busy_s - own_s * self._processes) / (elapsed_s * cores)


def reference_s(device: torch.device) -> float:
    """Return the shortest time of a few runs of a fixed matrix product on `device`, in seconds."""
    size = _REFERENCE_SIZE_ON_CPU if device.type == "cpu" else _REFERENCE_SIZE
    a = torch.ones(size, size, device=device)
    best = float("inf")
    with torch.no_grad():
        for _ in range(_REFERENCE_RUNS):
            start = time.perf_counter()
            a @ a
            streams.synchronize(device)
            best = min(best, time.perf_counter() - start)
    return best
