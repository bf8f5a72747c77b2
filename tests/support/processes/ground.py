"""Real processes: every test runs `rank.py` below a supervisor and checks which processes are left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtune.executors.base import Trial
from memtune.executors.supervisor import marked, send

RANK = (sys.executable, str(Path(__file__).with_name("rank.py")))


def until(holds: Callable[[], Any], patience_s: float = 60.0) -> Any:
    """Wait until `holds` returns a true value; return it."""
    stop = time.monotonic() + patience_s
    while not (value := holds()):
        assert time.monotonic() < stop, f"still not so after {patience_s} s"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def ground(tmp_path, monkeypatch):
    """A place for one test: trials in it, the pids its ranks noted, and no process left in the end."""
    monkeypatch.setenv("MEMTUNE_TEST_GROUND", str(tmp_path))
    marker = f"MEMTUNE_TEST_GROUND={tmp_path}"

    def trial(do: str, number: int = 1, ranks: int = 1, deadline_s: float = 60.0, **config: Any) -> Trial:
        config = {"do": do, "folder": str(tmp_path), **config}
        return Trial(number=number, workload="none", config=config, ranks=ranks, deadline_s=deadline_s)

    def pid(name: str) -> int:
        return int(until((tmp_path / name).exists) and (tmp_path / name).read_text())

    def left() -> list[int]:
        return [each for each in marked(marker) if each != os.getpid()]

    yield SimpleNamespace(
        trial=trial,
        pid=pid,
        left=left,
        path=tmp_path,
        logs=tmp_path / "logs",
        command=RANK,
        alive=alive,
        until=until,
    )
    outlived = left()
    send(outlived, signal.SIGKILL)
    assert outlived == []
