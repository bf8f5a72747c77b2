"""Machines that mislead: network mounts, clocks that jump, cores that are taken."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from memtune.autotune.search.search_events import EventLog, Note, read_events
from memtune.autotune.search.study_store import StudyFolder
from memtune.executors.base import Trial
from memtune.executors.core_wait import core_wait_s
from memtune.executors.monitor import TrialMonitor


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "ext4"])
def test_study_on_a_network_mount_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: mounts)
    assert StudyFolder(tmp_path / "study").network() == (None if kind == "ext4" else kind)


def test_clock_jump_changes_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLog(tmp_path / "log") as log:
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 7200)
        log.write(Note(text="the clock was set back"))
    with EventLog(tmp_path / "log"):
        pass
    elapsed_s = [each.elapsed_s for each in read_events(tmp_path / "log")]
    assert elapsed_s == sorted(elapsed_s)
    assert elapsed_s[-1] < 600


def test_time_without_a_core_is_not_counted() -> None:
    trial = Trial(number=1, workload="none", config={}, ranks=1, deadline_s=10.0)
    watch = TrialMonitor(trial, start_s=0.0)
    assert not watch.over(9.0)
    watch.core_wait_s = 5.0
    assert not watch.over(14.0)
    assert watch.over(15.0)
    assert core_wait_s(1) >= 0.0
