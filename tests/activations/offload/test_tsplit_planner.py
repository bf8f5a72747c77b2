"""The greedy planner against all choices: never above a feasible budget, and near the optimum."""

from __future__ import annotations

import random

import numpy as np
import pytest
from reference.tsplit import greedy_by_hand

from memtune.activations.offload.tsplit_planner import Action, Copy, Problem, Tensor, choices, greedy, solve

FORWARD = 12
"""Number of moments of a random step's forward, and of its backward."""


def one(first: int, stop: int, n_bytes: int, seconds: float, *, overlap_s: float = 0.0) -> Tensor:
    """Return a tensor that may be offloaded, whose copy is hidden for `overlap_s`."""
    return Tensor((Action(((first, stop, n_bytes),), (Copy(first, first + overlap_s, seconds),)),))


def steps(seed: int) -> Problem:
    """Up to eight tensors that may be kept, offloaded in full or in parts (three actions), some of them
    inside a module.
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
def test_solve_meets_feasible_budgets_near_the_optimum(seed: int) -> None:
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
def test_native_greedy_equals_the_reference(seed: int) -> None:
    problem = steps(seed)
    plain = int(problem.live_bytes.max())
    for share in (-1.0, 0.3, 0.6, 0.9, 1.0):
        for beyond in (False, True):
            budget = int(share * plain)
            assert greedy(problem, budget, beyond=beyond) == greedy_by_hand(problem, budget, beyond=beyond)


def test_native_greedy_refuses_inconsistent_columns() -> None:
    problem = Problem(np.asarray([5, 9], np.int64), (one(0, 3, 4, 1.0),))
    with pytest.raises(ValueError, match="a moment that is not there"):
        greedy(problem, 1, beyond=True)


def test_solve_is_optimal_for_equal_tensors() -> None:
    problem = Problem(np.full(10, 800, np.int64), tuple(one(2, 8, 100, 1.0) for _ in range(8)))
    live = problem.live_bytes.copy()
    live[:2] = live[8:] = 0
    problem = Problem(live, problem.tensors)
    for budget, moved in ((800, 0), (700, 1), (450, 4), (0, 8)):
        found = solve(problem, budget)
        assert (sum(found.choice), found.added_s) == (moved, pytest.approx(1.0 * moved))


def test_solve_prefers_a_hidden_copy_to_an_exposed_one() -> None:
    live = np.asarray([0, 300, 300, 0], np.int64)
    problem = Problem(live, (one(1, 3, 100, 0.5), one(1, 3, 200, 2.0, overlap_s=2.0)))
    assert solve(problem, 250).choice == (0, 1)


def test_link_carries_one_copy_at_a_time() -> None:
    """Each copy is hidden alone; together the first must be over when the second begins."""
    first, second = (Tensor((Action(((4, 8, 100),), (Copy(at, 3.0, 2.0),)),)) for at in (0.0, 0.5))
    problem = Problem(np.asarray([0] * 4 + [200] * 4, np.int64), (first, second))
    assert [problem.added_s(each) for each in ((1, 0), (0, 1), (1, 1))] == [0.0, 0.0, 1.5]
    assert solve(problem, 0).added_s == 1.5
    assert solve(problem, 100).added_s == 0.0


def test_solve_follows_the_peak_that_splitting_moves() -> None:
    """Parts free bytes between forward and backward but need more in moment 1, which only another tensor can
    free.
    """
    module = Tensor((Action(((1, 2, -80), (2, 4, 200))),))
    other = one(1, 2, 100, 5.0)
    problem = Problem(np.asarray([0, 190, 300, 300, 0], np.int64), (module, other))
    assert solve(problem, 300).choice == (0, 0)
    assert solve(problem, 280).choice == (1, 0)
    assert solve(problem, 200).choice == (1, 1)


def test_solve_undoes_superfluous_actions() -> None:
    """The small one is cheapest per byte and taken first; the large one is needed anyway, and suffices."""
    live = np.asarray([0, 110, 0], np.int64)
    problem = Problem(live, (one(1, 2, 10, 0.05), one(1, 2, 100, 1.0)))
    assert solve(problem, 10).choice == (0, 1)
