"""The planner over blocks, compared with all possible choices."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings, strategies as st

from memtune.search_spaces.recompute._block_planner.frontier import Frontier, Problem, solve


@st.composite
def problems(draw: st.DrawFn, most_blocks: int = 4) -> Problem:
    blocks, options = draw(st.integers(1, most_blocks)), draw(st.integers(1, 4))
    bytes_of = st.lists(st.integers(0, 40), min_size=blocks * options, max_size=blocks * options)
    held, more = (np.asarray(draw(bytes_of), np.int64).reshape(blocks, options) for _ in range(2))
    seconds = np.asarray(draw(bytes_of), float).reshape(blocks, options)
    class_of = np.asarray(draw(st.lists(st.integers(0, 1), min_size=blocks, max_size=blocks)), np.int32)
    for each in np.unique(class_of):
        held[class_of == each] = held[class_of == each][0]
        seconds[class_of == each] = seconds[class_of == each][0]
    return Problem(held, held + more, seconds, class_of, draw(st.integers(0, 60)), draw(st.integers(0, 60)))


def simulated(problem: Problem, choice: tuple[int, ...]) -> tuple[int, float]:
    """Return peak and seconds of a choice, by going through the step moment by moment."""
    held, peak, blocks = 0, problem.rest_bytes, range(len(choice))
    for i in blocks:
        peak = max(peak, held + int(problem.own_bytes[i, choice[i]]))
        held += int(problem.held_bytes[i, choice[i]])
    peak = max(peak, held + problem.after_bytes)
    return peak, sum(float(problem.seconds[i, choice[i]]) for i in blocks)


def every_choice(problem: Problem) -> list[tuple[int, float]]:
    return [
        simulated(problem, each)
        for each in product(range(problem.held_bytes.shape[1]), repeat=len(problem.class_of))
    ]


@settings(deadline=None, max_examples=150)
@given(problems())
def test_frontier_has_the_fastest_choice_for_each_budget(problem: Problem) -> None:
    frontier, known = solve(problem), every_choice(problem)
    for budget in range(min(peak for peak, _ in known) - 1, max(peak for peak, _ in known) + 2):
        fastest = min((seconds for peak, seconds in known if peak <= budget), default=None)
        row = frontier.row_within(budget)
        assert (row < 0) == (fastest is None)
        if fastest is not None:
            assert frontier.seconds[row] == fastest
            assert frontier.peak_bytes[row] <= budget


@settings(deadline=None, max_examples=100)
@given(problems(8))
def test_plans_cost_their_reported_peak_and_seconds(problem: Problem) -> None:
    frontier = solve(problem)
    for row in range(len(frontier)):
        choice = frontier.choice(row)
        peak, seconds = simulated(problem, tuple(choice.tolist()))
        assert peak <= frontier.peak_bytes[row]
        assert seconds == frontier.seconds[row]
        assert problem.cost(choice) == (peak, seconds)


@settings(deadline=None, max_examples=100)
@given(problems(8), st.integers(1, 12))
def test_more_bytes_never_cost_more_time_and_less_never_more_bytes(problem: Problem, width: int) -> None:
    frontier = solve(problem, width)  # however few plans are kept on the way
    rows = [frontier.row_within(budget) for budget in range(400)]
    assert rows == sorted(rows)
    assert (np.diff(frontier.peak_bytes) > 0).all()
    assert (np.diff(frontier.seconds) < 0).all()


def alike(blocks: int, options: int, seed: int) -> Problem:
    """Return equal blocks, as a transformer has: gradients appear as activations are freed."""
    random = np.random.default_rng(seed)
    held = np.sort(random.integers(10**7, 10**9, options))[::-1]
    seconds = np.sort(random.random(options)) * 1e-2
    seconds[0] = 0
    own = held[0] + random.integers(0, 10**8, options) + 10**7 * np.arange(blocks)[::-1, None]
    tiled = (np.tile(each, (blocks, 1)) for each in (held, seconds))
    held_bytes, block_s = tiled
    return Problem(held_bytes, own, block_s, np.zeros(blocks, np.int32), 10**9, 10**8)


def middle(frontier: Frontier) -> int:
    return frontier.row_within(int(frontier.peak_bytes[[0, -1]].mean()))


def test_equal_blocks_differ_only_in_runs_and_later_ones_hold_more() -> None:
    for seed in range(5):
        problem = alike(24, 8, seed)
        frontier = solve(problem)
        choice = frontier.choice(middle(frontier))
        held = problem.held_bytes[np.arange(24), choice]
        assert (np.diff(held) >= 0).all()
        assert len(np.unique(choice)) <= 4


def test_frontier_has_the_one_choice_that_uses_up_a_budget() -> None:
    problem = Problem(
        np.tile([8, 4, 2], (6, 1)),
        np.tile([8, 8, 8], (6, 1)),
        np.tile([0.0, 1.0, 3.0], (6, 1)),
        np.zeros(6, np.int32),
        10,
        0,
    )
    frontier = solve(problem)
    assert frontier.choice(frontier.row_within(6 * 4 + 10)).tolist() == [1] * 6


def test_frontier_of_a_thousand_blocks_is_close_to_the_convex_bound() -> None:
    """No plan beats the mix of options on the lower hull of one block's, which many equal blocks come close
    to.
    """
    blocks, options = 1000, 12
    random = np.random.default_rng(3)
    held = np.tile(np.sort(random.integers(10, 10**6, options))[::-1], (blocks, 1)).astype(np.int64)
    seconds = np.tile(np.append(0.0, np.sort(random.random(options - 1))), (blocks, 1))
    problem = Problem(held, held, seconds, np.zeros(blocks, np.int32), 0, 0)
    frontier = solve(problem)
    for budget in np.linspace(held[0].min() * blocks * 1.01, held[0].max() * blocks, 7).astype(int):
        mean = budget / blocks
        bound = (
            min(
                seconds[0, i]
                + (seconds[0, j] - seconds[0, i]) * (held[0, i] - mean) / (held[0, i] - held[0, j])
                for i in range(options)
                for j in range(options)
                if held[0, j] <= mean <= held[0, i] and i != j
            )
            * blocks
        )
        assert frontier.seconds[frontier.row_within(int(budget))] <= bound + 0.01 * seconds[0, -1] * blocks
