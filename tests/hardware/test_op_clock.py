"""The clock around every op: ops that compute, and time spent waiting."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.hardware.op_clock import OpClock, UpdateClock


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


_UNDER_A_LIMIT = """
import resource, time, torch
from memtune.hardware.op_clock import clock_of
cpu = torch.device("cpu")
assert clock_of(cpu) is time.process_time
resource.setrlimit(resource.RLIMIT_CPU, (10**6, resource.getrlimit(resource.RLIMIT_CPU)[1]))
assert clock_of(cpu) is time.perf_counter
"""


def test_clock_of_a_cpu_is_precise_under_a_limit_on_cpu_time() -> None:
    """Such a limit makes Linux count a process' CPU time in ticks of 1 to 10 ms, even after it is lifted."""
    subprocess.run([sys.executable, "-c", _UNDER_A_LIMIT], check=True, timeout=120)


def test_op_clock_tells_ops_of_optimizers_from_others() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
    with OpClock(torch.device("cpu"), Time()) as clock:
        (weight * 2).sum().backward()
        optimizer.step()
        weight.detach().add_(1.0)
    assert [each.name for each in clock.observed if each.is_update] == ["aten.add_.Tensor"]
    assert sum(each.name == "aten.add_.Tensor" for each in clock.observed) == 2


class Raises(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].detach().add_(1.0)
        raise ArithmeticError


def test_op_clock_counts_no_updates_after_a_step_that_raised() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = Raises([weight], {})
    with OpClock(torch.device("cpu"), Time()) as clock:
        with pytest.raises(ArithmeticError):
            optimizer.step()
        weight.detach() * 2
    assert [(each.name, each.is_update) for each in clock.observed] == [
        ("aten.add_.Tensor", True),
        ("aten.mul.Tensor", False),
    ]


def test_update_clock_times_optimizers_alone_and_ends_with_its_context() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(8)
    with UpdateClock() as update:
        assert update.seconds == 0.0
        optimizer.step()
        once = update.seconds
        assert once > 0
    optimizer.step()
    assert update.seconds == once
