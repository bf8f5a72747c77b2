"""Cores of the NUMA node that a drive is attached to, on Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_BLOCK: Final = Path("/sys/dev/block")
_NODES: Final = Path("/sys/devices/system/node")


def cores_of_drive(directory: Path, block: Path = _BLOCK, nodes: Path = _NODES) -> set[int] | None:
    """Return the cores of the node of `directory`'s drive that this process may use; None if it is unknown.

    Args:
        directory: A directory on the drive.
        block: The system's folder of block devices.
        nodes: The system's folder of NUMA nodes.
    """
    device = os.stat(directory).st_dev
    try:
        place = (block / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        # A partition has no node of its own; its drive's controller, a parent in sysfs, has.
        found = next(each / "numa_node" for each in (place, *place.parents) if (each / "numa_node").is_file())
        node = int(found.read_text())
        mine = (
            cores_in((nodes / f"node{node}" / "cpulist").read_text()) & os.sched_getaffinity(0)
            if node >= 0
            else set()
        )
    except (OSError, ValueError, StopIteration, AttributeError):  # no such device, no such file, not Linux
        return None
    return mine or None


def cores_in(text: str) -> set[int]:
    """Return a list such as `0-3,8` as a set."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)}
