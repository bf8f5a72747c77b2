"""Processes that end right after a collective end well: `memtune.parallel.ranks.shutdown`."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDS = 12
SCRIPT = f"""
import os, sys
import torch, torch.distributed as dist
from memtune.parallel.ranks import shutdown

bad = 0
for _ in range({ENDS}):  # torch is loaded once
    if (child := os.fork()) == 0:
        break
    bad += os.waitpid(child, 0)[1] != 0
else:
    print(bad, flush=True)
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "waits":
    shutdown.drain_at_exit()

def last():
    tensors = [torch.ones(1) for _ in range(20000)]
    work = dist.all_reduce_coalesced(tensors, async_op=True)
    work.wait()

last()
"""


def crashes(how: str) -> int:
    """Return the number of `ENDS` processes that die at their end."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, how], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
def test_process_exits_cleanly_while_gloo_frees_tensors() -> None:
    """Without the wait a part of them dies of SIGABRT: 24 of 40 on a busy machine."""
    assert crashes("waits") == 0
