"""Load, memory and temperature of this machine and its GPUs as one line, read without torch."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from memtune.units import format_bytes

_EVERY_S = 2.0
_QUERY = "utilization.gpu,memory.used,memory.total,temperature.gpu"
_NVIDIA = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]


class MachineLine:
    """Reads the machine in a thread of its own every two seconds; what cannot be read is left out."""

    def __init__(self) -> None:
        self.text = ""
        self._over = threading.Event()
        self._before: tuple[float, float] | None = None
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
            yield from gpu_parts(_output(_NVIDIA))
        now, before = _cpu_ticks(), self._before
        self._before = now
        if now is not None and before is not None and now[1] > before[1]:
            yield f"cores {(now[0] - before[0]) / (now[1] - before[1]):.0%}"
        if (memory := memory_part(_read("/proc/meminfo"))) is not None:
            yield memory
        degrees = [
            int(text) / 1000
            for path in sorted(Path("/sys/class/thermal").glob("thermal_zone*/temp"))
            if (text := _read(path).strip()).isdigit()
        ]
        if degrees:
            yield f"{max(degrees):.0f} °C"


def gpu_parts(csv: str) -> Iterator[str]:
    """Yield `gpu0 97 % 41.2 GiB/79.6 GiB 61 °C` for each line of nvidia-smi's answer."""
    for index, line in enumerate(csv.strip().splitlines()):
        fields = [each.strip() for each in line.split(",")]
        if len(fields) != 4 or not all(each.isdigit() for each in fields):
            continue
        busy, used, total, degrees = map(int, fields)
        memory = f"{format_bytes(used << 20)}/{format_bytes(total << 20)}"
        yield f"gpu{index} {busy}% {memory} {degrees} °C"


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
