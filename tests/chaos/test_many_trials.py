"""Many trials of a tiny model in one driver: nothing that a trial leaves may add up.

`MEMTUNE_TRIALS=500` runs as many; it prints the time per trial and the memory of the driver and of the fork
server.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from memtune.executors.base import Trial, TrialResult
from memtune.executors.local import LocalExecutor

TRIALS = int(os.environ.get("MEMTUNE_TRIALS", "12"))
FIRST = 6
"""Trials after which imports and pools of the allocator are complete."""
GROWTH_BYTES = 4 << 20
TEXT = """
import torch
from torch import nn
def model(): return nn.Linear(8, 8)
def batch(size): return torch.randn(size, 8)
def loss(model, x): return model(x).pow(2).mean()
"""


def held() -> tuple[int, int, int]:
    """Return resident bytes of this process, those of its fork server, and the open files of both."""
    processes = [psutil.Process(), *psutil.Process().children()]
    resident = [each.memory_info().rss for each in processes]
    return resident[0], sum(resident[1:]), sum(each.num_fds() for each in processes)


@pytest.mark.slow
@pytest.mark.timeout(10 * TRIALS + 120)
def test_trials_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(TEXT)
    executor = LocalExecutor(log_dir=tmp_path / "logs")
    seen, took = [], []
    for number in range(TRIALS):
        began = time.monotonic()
        executor.submit(Trial(number=number, workload=str(path), config={"settings": {}}))
        result = None
        while result is None:
            result = next((each for each in executor.wait(60) if isinstance(each, TrialResult)), None)
        took.append(time.monotonic() - began)
        assert result.status == "ok", result
        if number >= FIRST - 1:
            seen.append(held())
    executor.close()
    (driver, server, files), (*last_bytes, last_files) = seen[0], seen[-1]
    assert last_bytes[0] - driver < GROWTH_BYTES
    assert last_bytes[1] - server < GROWTH_BYTES
    assert last_files <= files
    median_s = sorted(took[1:])[len(took) // 2]
    print(
        f"{TRIALS} trials: {median_s:.3f} s each (median), driver {driver / 2**20:.1f} to"
        f" {last_bytes[0] / 2**20:.1f} MiB, fork server {server / 2**20:.1f} to"
        f" {last_bytes[1] / 2**20:.1f} MiB, {last_files} open files"
    )
