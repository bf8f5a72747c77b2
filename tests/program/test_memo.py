"""Steps that passes remember: counted once each, the longest unused are forgotten first, and are made again
when asked for.
"""

from __future__ import annotations

import pytest
from support.synthetic_steps import make_step

from memtune.program import memo as module
from memtune.program.memo import Memory, remembered
from memtune.program.step import Program, RankClass, Step


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    fresh = Memory()
    monkeypatch.setattr(module, "MEMORY", fresh)
    monkeypatch.setattr(module, "MAX_ROWS", 100)
    return fresh


def test_what_was_longest_unused_is_forgotten_and_made_again(memory: Memory) -> None:
    made: list[int] = []

    @remembered
    def double(step: Step, times: int = 1) -> Step:
        made.append(step.ops.n)
        return make_step(2 * step.ops.n * times, 1)

    ten, fifteen, twelve = (make_step(ops, 1) for ops in (10, 15, 12))
    first = double(ten)
    assert double(ten) is first
    assert double(ten, times=1) is not first  # asked for in another way; the argument is counted once
    assert memory.n_rows == 10 + 20 + 20
    double(fifteen)
    assert memory.n_rows == 50 + 15 + 30
    assert double(ten) is first  # young again
    double(twelve)
    assert memory.n_rows == 30 + 12 + 24
    assert made == [10, 10, 15, 12]
    assert double(ten) is first
    double(fifteen)
    assert made[4:] == [15]


def test_what_a_list_gets_later_counts_and_a_step_of_two_programs_counts_once(memory: Memory) -> None:
    @remembered
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
    ways.holds(
        Program((RankClass(1, make_step(40, 1)),), 2), two
    )  # what is used now stays, the other one goes
    assert memory.n_rows == 70
    assert ways(one) == []
    assert memory.n_rows == 70


def test_steps_in_a_tuple_or_a_list_count(memory: Memory) -> None:
    """What is made of each rank, say."""

    @remembered
    def of_ranks(step: Step) -> tuple[Step, ...]:
        return make_step(20, 1), make_step(30, 1)

    @remembered
    def of_steps(steps: tuple[Step, ...]) -> int:
        return sum(each.ops.n for each in steps)

    made = of_ranks(make_step(10, 1))
    assert memory.n_rows == 60
    assert of_steps(made) == 50
    assert memory.n_rows == 60
    of_ranks(make_step(11, 1))
    assert of_ranks(make_step(10, 1)) is not made
    assert memory.n_rows <= 100
