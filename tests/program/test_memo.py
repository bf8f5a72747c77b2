"""Memoized passes: each step counts once, and the least recently used results are dropped and recomputed."""

from __future__ import annotations

import pytest
from support.synthetic_steps import make_step

from memtune.program import memo as module
from memtune.program.memo import StepCache, memoized
from memtune.program.step import Program, RankClass, Step


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StepCache:
    fresh = StepCache()
    monkeypatch.setattr(module, "STEP_CACHE", fresh)
    monkeypatch.setattr(module, "MAX_ROWS", 100)
    return fresh


def test_memoized_drops_least_recently_used_result(memory: StepCache) -> None:
    made: list[int] = []

    @memoized
    def double(step: Step, times: int = 1) -> Step:
        made.append(step.ops.n)
        return make_step(2 * step.ops.n * times, 1)

    ten, fifteen, twelve = (make_step(ops, 1) for ops in (10, 15, 12))
    first = double(ten)
    assert double(ten) is first
    assert double(ten, times=1) is not first  # another key; the argument is counted once
    assert memory.n_rows == 10 + 20 + 20
    double(fifteen)
    assert memory.n_rows == 50 + 15 + 30
    assert double(ten) is first  # now the most recently used
    double(twelve)
    assert memory.n_rows == 30 + 12 + 24
    assert made == [10, 10, 15, 12]
    assert double(ten) is first
    double(fifteen)
    assert made[4:] == [15]


def test_memoized_counts_later_additions_and_shared_steps_once(memory: StepCache) -> None:
    @memoized
    def ways(program: Program) -> list[Program]:
        return []

    step, after = make_step(30, 1), make_step(60, 1)
    one, two = (Program((RankClass(ranks, step),), 2) for ranks in (1, 2))
    ways(one), ways(two)
    assert memory.n_rows == 30
    kept = ways(one)
    kept.append(Program((RankClass(1, after),), 2))
    ways.holds(kept[0], one)
    assert memory.n_rows == 90
    ways.holds(Program((RankClass(1, make_step(40, 1)),), 2), two)  # the entry of `one` is dropped
    assert memory.n_rows == 70
    assert ways(one) == []
    assert memory.n_rows == 70


def test_memoized_counts_steps_in_tuples_and_lists(memory: StepCache) -> None:

    @memoized
    def of_ranks(step: Step) -> tuple[Step, ...]:
        return make_step(20, 1), make_step(30, 1)

    @memoized
    def of_steps(steps: tuple[Step, ...]) -> int:
        return sum(each.ops.n for each in steps)

    made = of_ranks(make_step(10, 1))
    assert memory.n_rows == 60
    assert of_steps(made) == 50
    assert memory.n_rows == 60
    of_ranks(make_step(11, 1))
    assert of_ranks(make_step(10, 1)) is not made
    assert memory.n_rows <= 100
