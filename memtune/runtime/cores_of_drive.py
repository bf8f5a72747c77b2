"""Which cores are on the memory node that a drive is attached to, as Linux says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_BLOCK: Final = Path("/sys/dev/block")
_NODES: Final = Path("/sys/devices/system/node")


def cores_beside(directory: Path, block: Path = _BLOCK, nodes: Path = _NODES) -> set[int] | None:
    """Cores of the node of the drive that holds `directory`, among those this process may use; None where nothing says.

    Args:
        directory: On the drive.
        block: Where the system shows its block devices.
        nodes: Where it shows its memory nodes.
    """
    device = os.stat(directory).st_dev
    try:
        place = (block / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        found = next(each / "numa_node" for each in (place, *place.parents) if (each / "numa_node").is_file())
        node = int(found.read_text())
        mine = cores_in((nodes / f"node{node}" / "cpulist").read_text()) & os.sched_getaffinity(0) if node >= 0 else set()
    except (OSError, ValueError, StopIteration, AttributeError):  # no such device, no such file, not Linux
        return None
    return mine or None


def cores_in(text: str) -> set[int]:
    """`0-3,8` as a set."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)}
