"""The greedy planner against every choice there is.

Never above a budget that one meets, and how much slower than the best.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from reference.tsplit import greedy_by_hand

from memtune.activations.offload.tsplit_planner import Action, Copy, Problem, Tensor, choices, greedy, solve

FORWARD = 12
"""Moments of a random step's forward; its backward has as many."""


def one(first: int, stop: int, n_bytes: int, seconds: float, *, overlap_s: float = 0.0) -> Tensor:
    """A tensor that may go to the host, whose copy is `overlap_s` hidden."""
    return Tensor((Action(((first, stop, n_bytes),), (Copy(first, first + overlap_s, seconds),)),))


def steps(seed: int) -> Problem:
    """Up to eight tensors that stay, move whole or move in parts (three actions), some of them inside a
    module.
    """
    draw = random.Random(seed)
    live = np.asarray([draw.randrange(50) * 10 for _ in range(2 * FORWARD)], np.int64)
    tensors: list[Tensor] = []
    for _ in range(draw.choice((3, 5, 6, 7 if seed % 8 else 8))):
        inside = tensors and tensors[-1].part_of < 0 and draw.random() < 0.25
        first, stop = draw.randrange(FORWARD - 2), draw.randrange(FORWARD + 1, 2 * FORWARD - 1)
        n_bytes, parts = draw.randrange(1, 40) * 10, draw.choice((2, 4))
        seconds = n_bytes / 100 * draw.choice((0.3, 1.0, 3.0))
        back = Copy(float(stop), float(stop), seconds)
        whole = Action(((first + 2, stop, n_bytes),), (Copy(float(first), first + 2.0, seconds),), (back,))
        less = n_bytes - n_bytes // parts
        micro = tuple(Copy(first + i / parts, first + 2.0, seconds / parts) for i in range(parts))
        frees = ((first, first + 2, less), (first + 2, stop, n_bytes), (stop, stop + 1, less))
        tensors.append(
            Tensor((whole, Action(frees, micro, (back,), draw.random())), len(tensors) - 1 if inside else -1)
        )
        live[first : stop + 1] += n_bytes
    return Problem(live, tuple(tensors))


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", range(24))
def test_within_every_budget_that_some_choice_meets_and_near_the_best(seed: int) -> None:
    problem = steps(seed)
    every = [(int(problem.live_under(each).max()), problem.added_s(each)) for each in choices(problem)]
    smallest, plain = min(peak for peak, _ in every), int(problem.live_bytes.max())
    assert problem.floor_bytes <= smallest
    for share in (0.0, 0.2, 0.5, 0.8):
        budget = smallest + int(share * (plain - smallest))
        found = solve(problem, budget)
        best = min(seconds for peak, seconds in every if peak <= budget)
        assert found.is_within
        assert found.peak_bytes == int(problem.live_under(found.choice).max()) <= budget
        assert problem.is_possible(found.choice)
        assert best <= found.added_s + 1e-12
        assert found.added_s <= 3 * best + 1e-12
    assert not solve(problem, smallest - 1).is_within


@pytest.mark.drawn(10)
@pytest.mark.parametrize("seed", range(100, 124))
def test_takes_the_actions_that_the_planner_by_hand_takes(seed: int) -> None:
    problem = steps(seed)
    plain = int(problem.live_bytes.max())
    for share in (-1.0, 0.3, 0.6, 0.9, 1.0):
        for beyond in (False, True):
            budget = int(share * plain)
            assert greedy(problem, budget, beyond=beyond) == greedy_by_hand(problem, budget, beyond=beyond)


def test_columns_that_do_not_belong_together_are_refused() -> None:
    problem = Problem(np.asarray([5, 9], np.int64), (one(0, 3, 4, 1.0),))
    with pytest.raises(ValueError, match="a moment that is not there"):
        greedy(problem, 1, beyond=True)


def test_equal_to_the_best_where_tensors_are_alike() -> None:
    problem = Problem(np.full(10, 800, np.int64), tuple(one(2, 8, 100, 1.0) for _ in range(8)))
    live = problem.live_bytes.copy()
    live[:2] = live[8:] = 0
    problem = Problem(live, problem.tensors)
    for budget, moved in ((800, 0), (700, 1), (450, 4), (0, 8)):
        found = solve(problem, budget)
        assert (sum(found.choice), found.added_s) == (moved, pytest.approx(1.0 * moved))


def test_a_hidden_copy_goes_before_a_smaller_one_that_is_waited_for() -> None:
    live = np.asarray([0, 300, 300, 0], np.int64)
    problem = Problem(live, (one(1, 3, 100, 0.5), one(1, 3, 200, 2.0, overlap_s=2.0)))
    assert solve(problem, 250).choice == (0, 1)


def test_two_copies_do_not_share_the_link() -> None:
    """Each is hidden alone; together the first has to be over when the second begins."""
    first, second = (Tensor((Action(((4, 8, 100),), (Copy(at, 3.0, 2.0),)),)) for at in (0.0, 0.5))
    problem = Problem(np.asarray([0] * 4 + [200] * 4, np.int64), (first, second))
    assert [problem.added_s(each) for each in ((1, 0), (0, 1), (1, 1))] == [0.0, 0.0, 1.5]
    assert solve(problem, 0).added_s == 1.5
    assert solve(problem, 100).added_s == 0.0


def test_splitting_moves_the_peak_and_the_plan_follows_it() -> None:
    """Parts free what lies between forward and backward but need more in moment 1, which only another tensor
    can give.
    """
    module = Tensor((Action(((1, 2, -80), (2, 4, 200))),))
    other = one(1, 2, 100, 5.0)
    problem = Problem(np.asarray([0, 190, 300, 300, 0], np.int64), (module, other))
    assert solve(problem, 300).choice == (0, 0)
    assert solve(problem, 280).choice == (1, 0)
    assert solve(problem, 200).choice == (1, 1)


def test_what_later_actions_made_superfluous_is_undone() -> None:
    """The small one is cheapest per byte and taken first; the large one is needed all the same and enough."""
    live = np.asarray([0, 110, 0], np.int64)
    problem = Problem(live, (one(1, 2, 10, 0.05), one(1, 2, 100, 1.0)))
    assert solve(problem, 10).choice == (0, 1)
