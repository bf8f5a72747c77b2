"""Priorities of an updater's transfers."""

from __future__ import annotations

import mmap
import socket
from pathlib import Path
from typing import Any

from memtune.offload.near_storage.update_worker import Updater

NUMEL = 5000


def test_updater_orders_reads_before_weights_before_moments(tmp_path: Path) -> None:
    """Writes of a later sub-group's weights pass an earlier one's moments that still wait."""
    groups = [{"name": f"part {i}", "numel": NUMEL, "moments": 2 * NUMEL, "segments": []} for i in range(2)]
    spec = {
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
        updater = Updater(spec, memory, here)
        move, urgency = updater._file.move, []

        def moved(write: bool, extent: Any, flat: Any, priority: int) -> Any:
            urgency.append((priority, "write" if write else "read", extent.name))
            return move(write, extent, flat, priority)

        updater._file.move = moved  # type: ignore[method-assign]
        for order in (
            ["write_weights", 0, 0],
            ["write_moments", 0, 0],
            ["write_weights", 1, 1],
            ["write_moments", 1, 1],
            ["settle"],
            ["read", 0, 0],
            ["settle"],
        ):
            updater.execute(order)
        replies = there.recv(1 << 16)
        assert replies.count(b"settled") == 2
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
