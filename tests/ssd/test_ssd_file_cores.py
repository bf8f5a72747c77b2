"""Cores of a drive's NUMA node, from a tree like Linux's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtune.ssd.ssd_file import cores_in, cores_of_drive


@pytest.mark.parametrize(("text", "cores"), [("0-2,5\n", {0, 1, 2, 5}), ("7", {7}), ("", set())])
def test_cores_in_parses_ranges(text: str, cores: set[int]) -> None:
    assert cores_in(text) == cores


@pytest.mark.parametrize("node", [0, -1, None])
def test_node_of_a_drive_is_found_in_its_parents(tmp_path: Path, node: int | None) -> None:
    device = os.stat(tmp_path).st_dev
    drive = tmp_path / "devices" / "pci" / "nvme" / "part"
    drive.mkdir(parents=True)
    block, nodes = tmp_path / "block", tmp_path / "nodes"
    block.mkdir()
    (block / f"{os.major(device)}:{os.minor(device)}").symlink_to(drive)
    (nodes / "node0").mkdir(parents=True)
    mine = min(os.sched_getaffinity(0))
    (nodes / "node0" / "cpulist").write_text(f"{mine}\n")
    if node is not None:
        (drive.parents[1] / "numa_node").write_text(f"{node}\n")
    assert cores_of_drive(tmp_path, block, nodes) == ({mine} if node == 0 else None)
