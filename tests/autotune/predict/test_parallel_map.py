"""Items done by this process and its forked copies: the same results whatever becomes of a copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings, strategies as st

from memtune.autotune.predict import parallel_map as side_by_side
from memtune.autotune.predict.parallel_map import ParallelMap

MANY = list(range(500))


def squared_with_pid(item: int) -> tuple[int, int]:
    time.sleep(0.001)
    return item * item, os.getpid()


def squares(found: list[tuple[int, int]]) -> list[int]:
    return [square for square, _ in found]


def children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children()
        if each.name().startswith("python") or "pytest" in each.name()
    ]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=600), st.integers(1, 12), st.integers(1, 3))
def test_parallel_map_returns_results_in_order(items: list[int], groups: int, processes: int) -> None:
    with ParallelMap(
        lambda item: item * 3, lambda item: item % groups, processes, worth_s=0.0
    ) as side_by_side:
        for _ in range(2):
            assert side_by_side.map(items) == [item * 3 for item in items]


def test_parallel_map_keeps_groups_on_one_process() -> None:
    before = len(children())
    with ParallelMap(squared_with_pid, lambda item: item % 10 or None, 2, worth_s=0.0) as side_by_side:
        for _ in range(3):
            found = side_by_side.map(MANY)
            assert squares(found) == [item * item for item in MANY]
            by_group = defaultdict(set)
            for item, (_, pid) in zip(MANY, found, strict=True):
                by_group[item % 10].add(pid)
            assert all(len(pids) == 1 for pids in by_group.values())
            assert by_group[0] == {os.getpid()}
            assert len(set.union(*by_group.values())) == 2
        assert len(children()) == before + 1
    assert len(children()) == before


def test_parallel_map_makes_copies_once_they_are_worthwhile() -> None:
    def work(item: int) -> int:
        until_s = time.process_time() + 0.002
        while time.process_time() < until_s:
            pass
        return os.getpid()

    with ParallelMap(work, lambda item: item, 2, worth_s=0.1) as both:
        assert set(both.map(range(20))) == {os.getpid()}
        pids = both.map(range(100))
        assert set(pids[:20]) == {os.getpid()}  # the work of both calls counts
        assert len(set(pids)) == 2


def test_parallel_map_survives_dead_copy() -> None:
    def deadly(item: int) -> int:
        if item == 7 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return item + 1

    here = os.getpid()
    with ParallelMap(deadly, lambda item: item % 20, 3, worth_s=0.0) as side_by_side:
        for _ in range(3):
            assert side_by_side.map(MANY) == [item + 1 for item in MANY]


def test_parallel_map_gives_up_hanging_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "LEAST_S", 0.2)
    here = os.getpid()
    with ParallelMap(
        lambda item: item if os.getpid() == here else time.sleep(600), lambda item: item % 4, 2, worth_s=0.0
    ) as both:
        assert both.map(MANY) == MANY
        assert both.map(MANY) == MANY
        assert not [
            each for each in children() if each.status() != psutil.STATUS_ZOMBIE and "sleep" in each.name()
        ]


def test_parallel_map_raises_errors_of_function(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(item: int) -> float:
        return 1 / (item - 411)

    with (
        ParallelMap(fails, lambda item: item % 50, 2, worth_s=0.0) as side_by_side,
        pytest.raises(ZeroDivisionError),
    ):
        side_by_side.map(MANY)
    assert capfd.readouterr().err == ""


DRIVER = """
import os, sys, time
from memtune.autotune.predict.parallel_map import ParallelMap
here = os.getpid()
def work(item):
    if os.getpid() != here:
        open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600 if os.getpid() != here else 0.001)
with ParallelMap(work, lambda item: item, 2, worth_s=0.0) as both:
    both.map(range(1000))
"""


def test_parallel_map_copies_end_with_killed_process(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(told)])
    until = time.monotonic() + 60
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    copy = psutil.Process(int(told.read_text()))
    process.kill()
    process.wait()
    copy.wait(20)
