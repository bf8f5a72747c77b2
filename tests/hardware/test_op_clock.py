"""The clock around every op: what computes, and what of the time is waited for."""

from __future__ import annotations

import pytest
import torch

from memtune.hardware.op_clock import OpClock


class Time:
    """A clock advanced by the test; each op takes one second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def test_long_gaps_are_waited_for_and_short_ones_are_not() -> None:
    time, x = Time(), torch.ones(8)
    with OpClock(torch.device("cpu"), time) as clock:
        for i in range(40):
            x = x + 1
            time.now += 0.25  # Python's own
            if i in (10, 20):
                time.now += 100.0  # `Work.wait`
    assert [each.name for each in clock.observed] == ["aten.add.Tensor"] * 40
    assert len(clock.gaps_s) == 39
    whole = time.now - 0.5
    assert clock.waiting() == pytest.approx(200 / whole, rel=0.2)


def test_ops_of_the_seam_do_not_compute() -> None:
    x = torch.ones(8)
    with OpClock(torch.device("cpu"), Time()) as clock:
        for _ in range(4):
            torch.ops.memtune.to_host(x)
            x = x * 2
    assert {each.name for each in clock.observed} == {"aten.mul.Tensor"}
    assert clock.others_s == pytest.approx(4 * 0.5)
    assert 0 < clock.waiting() < 1


def test_nothing_ran() -> None:
    with OpClock(torch.device("cpu"), Time()) as clock:
        pass
    assert clock.waiting() == 0.0
