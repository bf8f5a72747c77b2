"""Load, memory, link rates and temperature of this machine and its GPUs as one line, read without torch."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from memtune.units import format_bytes

_EVERY_S = 2.0
_QUERY = "utilization.gpu,memory.used,memory.total,temperature.gpu"
_NVIDIA = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
_PCIE = ["nvidia-smi", "dmon", "-s", "t", "-c", "1"]
_SECTOR_BYTES = 512
_LEAST_RATE = 1 << 20
"""Bytes/s below which a link counts as idle and is left out."""


class MachineLine:
    """Reads the machine in a thread of its own every two seconds; what cannot be read is left out."""

    def __init__(self) -> None:
        self.text = ""
        self._over = threading.Event()
        self._ticks: tuple[float, float] | None = None
        self._bytes: dict[str, int] = {}
        self._read_s = 0.0
        self._has_gpus = shutil.which(_NVIDIA[0]) is not None

    def start(self) -> None:
        """Begin reading."""
        threading.Thread(target=self._follow, name="memtune-machine", daemon=True).start()

    def stop(self) -> None:
        """End reading."""
        self._over.set()

    def _follow(self) -> None:
        while True:
            self.text = " · ".join(self._parts())
            if self._over.wait(_EVERY_S):
                return

    def _parts(self) -> Iterator[str]:
        if self._has_gpus:
            yield from gpu_parts(_output(_NVIDIA), _output(_PCIE))
        now, before = _cpu_ticks(), self._ticks
        self._ticks = now
        if now is not None and before is not None and now[1] > before[1]:
            yield f"cores {(now[0] - before[0]) / (now[1] - before[1]):.0%}"
        if (memory := memory_part(_read("/proc/meminfo"))) is not None:
            yield memory
        moved, earlier = link_bytes(_read("/proc/net/dev"), _read("/proc/diskstats"), _drives()), self._bytes
        now_s, earlier_s = time.monotonic(), self._read_s
        self._bytes, self._read_s = moved, now_s
        for link in (each for each in moved if each in earlier):
            rate = (moved[link] - earlier[link]) / (now_s - earlier_s)
            if rate >= _LEAST_RATE:
                yield f"{link} {format_bytes(round(rate))}/s"
        degrees = [
            int(text) / 1000
            for path in sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
            if (text := _read(path).strip()).isdigit()
        ]
        if degrees:
            yield f"{max(degrees):.0f} °C"


def gpu_parts(query: str, pcie: str = "") -> Iterator[str]:
    """Yield `gpu0 97% 41.2 GiB/79.6 GiB PCIe in 1.2 GiB/s out 340 MiB/s 61 °C` for each GPU."""
    rows = [line.split() for line in pcie.splitlines() if not line.startswith("#")]
    rates = {row[0]: row[1:3] for row in rows if len(row) >= 3 and all(each.isdigit() for each in row[:3])}
    for index, line in enumerate(query.strip().splitlines()):
        busy, used, total, degrees, *_ = (*(each.strip() for each in line.split(",")), "", "", "", "")
        parts = [f"{busy}%"] if busy.isdigit() else []
        if used.isdigit() and total.isdigit():
            parts.append(f"{format_bytes(int(used) << 20)}/{format_bytes(int(total) << 20)}")
        if (rate := rates.get(str(index))) is not None:
            into, out = (format_bytes(int(each) * 10**6) for each in rate)
            parts.append(f"PCIe in {into}/s out {out}/s")
        parts += [f"{degrees} °C"] if degrees.isdigit() else []
        if parts:
            yield f"gpu{index} {' '.join(parts)}"


def link_bytes(interfaces: str, disks: str, drives: set[str]) -> dict[str, int]:
    """Return the bytes since boot: over networks, loopback included, read from and written to `drives`."""
    found: dict[str, int] = {}
    received = [
        rest.split()[0] for _, _, rest in (line.partition(":") for line in interfaces.splitlines()) if rest
    ]
    if received:
        found["network"] = sum(int(each) for each in received if each.isdigit())
    # The kernel's iostats: name, and sectors read and written, are columns 3, 6 and 10.
    rows = [row for row in (line.split() for line in disks.splitlines()) if len(row) > 9 and row[2] in drives]
    if rows:
        found["drives read"] = _SECTOR_BYTES * sum(int(row[5]) for row in rows)
        found["drives write"] = _SECTOR_BYTES * sum(int(row[9]) for row in rows)
    return found


def _drives() -> set[str]:
    """Return the names of physical drives, without their partitions and without loop devices."""
    return {path.parent.name for path in Path("/sys/block").glob("*/device")}


def memory_part(meminfo: str) -> str | None:
    """Return `host 12.1 GiB/23.5 GiB` of /proc/meminfo; None if it cannot be read."""
    fields = {
        name: rest.split()[0]
        for name, _, rest in (line.partition(":") for line in meminfo.splitlines())
        if rest.split()
    }
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        return None
    total, free = (int(fields[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return f"host {format_bytes(total - free)}/{format_bytes(total)}"


def _cpu_ticks() -> tuple[float, float] | None:
    """Return busy and all clock ticks of all cores since the start of the machine."""
    fields = _read("/proc/stat").split("\n", 1)[0].split()[1:9]
    if len(fields) < 8:
        return None
    ticks = list(map(float, fields))
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_EVERY_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
