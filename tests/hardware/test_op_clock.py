"""The clock around every op: ops that compute, and time spent waiting."""

from __future__ import annotations

import resource
import time

import pytest
import torch

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.hardware.op_clock import OpClock, clock_of


class Time:
    """A clock advanced by the test; each op takes one second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def test_waiting_counts_long_gaps_only() -> None:
    time, x = Time(), torch.ones(8)
    with OpClock(torch.device("cpu"), time) as clock:
        for i in range(40):
            x = x + 1
            time.now += 0.25  # Python overhead
            if i in (10, 20):
                time.now += 100.0  # `Work.wait`
    assert [each.name for each in clock.observed] == ["aten.add.Tensor"] * 40
    assert len(clock.gaps_s) == 39
    whole = time.now - 0.5
    assert clock.waiting() == pytest.approx(200 / whole, rel=0.2)


def test_op_clock_does_not_observe_seam_ops() -> None:
    x = torch.ones(8)
    with OpClock(torch.device("cpu"), Time()) as clock:
        for _ in range(4):
            torch.ops.memtune.to_host(x)
            x = x * 2
    assert {each.name for each in clock.observed} == {"aten.mul.Tensor"}
    assert clock.others_s == pytest.approx(4 * 0.5)
    assert 0 < clock.waiting() < 1


def test_waiting_without_ops_is_zero() -> None:
    with OpClock(torch.device("cpu"), Time()) as clock:
        pass
    assert clock.waiting() == 0.0


def test_clock_of_a_cpu_is_precise_under_a_limit_on_cpu_time() -> None:
    """Such a limit makes Linux count the process' CPU time in ticks of 1 to 10 ms."""
    cpu, soft_and_hard = torch.device("cpu"), resource.getrlimit(resource.RLIMIT_CPU)
    assert clock_of(cpu) is time.process_time
    resource.setrlimit(resource.RLIMIT_CPU, (10**6, soft_and_hard[1]))
    try:
        assert clock_of(cpu) is time.perf_counter
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, soft_and_hard)
