"""Hang detection."""

from __future__ import annotations

import pytest

from memtune.executors.base import Trial
from memtune.executors.monitor import Line, TrialMonitor


@pytest.mark.parametrize(("stage", "hangs"), [("step 1/5", True), ("compiling, step 1/5", False)])
def test_monitor_allows_silent_compilation(stage: str, hangs: bool) -> None:
    trial = Trial(number=0, workload="model.py", config={}, device="cpu", ranks=1, deadline_s=600)
    watch = TrialMonitor(trial, start_s=0.0, silence_s=60.0)
    watch.take(Line(0, {"stage": stage}, at=0.0), now_s=1.0)
    assert watch.over(100.0) is hangs
    assert watch.over(700.0), "the deadline of the trial holds all the same"
