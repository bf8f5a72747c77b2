"""What an updater asks of its drive first."""

from __future__ import annotations

import mmap
import socket
from pathlib import Path
from typing import Any

from memtune.offload.near_storage.update_worker import Updater

NUMEL = 5000


def test_the_drive_takes_reads_before_weights_and_weights_before_moments(tmp_path: Path) -> None:
    """The mechanism: weights go back first. Those of a later sub-group pass the moments of an earlier one
    that still wait.
    """
    groups = [{"name": f"part {i}", "numel": NUMEL, "moments": 2 * NUMEL, "segments": []} for i in range(2)]
    told = {
        "directory": str(tmp_path),
        "slot_bytes": 4096,
        "slots": 1,
        "buffers": 2,
        "buffer_numel": 3 * NUMEL,
        "sub_groups": groups,
        "keep": False,
    }
    here, there = socket.socketpair()
    with here, there, mmap.mmap(-1, 4096 + 2 * 3 * NUMEL * 4) as memory:
        updater = Updater(told, memory, here)
        move, urgency = updater._file.move, []

        def moved(write: bool, extent: Any, flat: Any, priority: int) -> Any:
            urgency.append((priority, "write" if write else "read", extent.name))
            return move(write, extent, flat, priority)

        updater._file.move = moved  # type: ignore[method-assign]
        for order in (
            ["write", 0, 0],
            ["later", 0, 0],
            ["write", 1, 1],
            ["later", 1, 1],
            ["settle"],
            ["read", 0, 0],
            ["settle"],
        ):
            updater.obey(order)
        told_after = there.recv(1 << 16)
        assert told_after.count(b"settled") == 2
        assert [(what, name.partition(" of ")[0]) for _, what, name in sorted(urgency)] == [
            ("read", "the optimizer state"),
            ("read", "the weights"),
            ("write", "the weights"),
            ("write", "the weights"),
            ("write", "the optimizer state"),
            ("write", "the optimizer state"),
        ]
        weights, moments = (
            max(each for each, what, name in urgency if part in name) for part in ("weights", "state")
        )
        assert weights < moments
        del updater  # and its views of the memory
