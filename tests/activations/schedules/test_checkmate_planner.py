"""Checkmate's program against an exhaustive search, known optima, and a slow accounting."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings, strategies as st
from reference.exhaustive import exhaustive_cost

from memtune.activations.schedules.checkmate_planner import (
    Problem,
    Solution,
    live_bytes,
    solve_exactly,
    solve_rounded,
)


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> Problem:
    """Random graphs of up to `most` nodes with one budget.

    Some nodes take scratch, some must not run again.
    """
    n = draw(st.integers(2, most))
    numbers = st.integers(1, 4)
    reads = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2)))) if i else ()
        for i in range(n)
    )
    cost, n_bytes, scratch = (tuple(draw(st.lists(numbers, min_size=n, max_size=n))) for _ in range(3))
    once = frozenset(draw(st.sets(st.integers(0, n - 1), max_size=1)))
    budget = draw(st.integers(4, 4 + 2 * n))
    return Problem(
        tuple(map(float, cost)), n_bytes, reads, (budget,) * n, tuple(each - 1 for each in scratch), once
    )


def slow_peak(problem: Problem, solution: Solution) -> int:
    """Return the largest number of live bytes: of nodes that have run and are needed later, before their next
    run.
    """
    order = solution.order()
    needed = [[*problem.reads[node], node] for node in order]
    peak = 0
    for at, node in enumerate(order):
        live = 0
        for each in range(problem.n):
            since = max((i for i in range(at + 1) if order[i] == each), default=None)
            if since is None:
                continue
            until = next((i for i in range(since + 1, len(order)) if order[i] == each), len(order))
            last = max((i for i in range(since, until) if each in needed[i]), default=since)
            live += problem.bytes[each] if last >= at else 0
        peak = max(peak, live + problem.scratch(node))
    return peak


def check(problem: Problem, solution: Solution) -> None:
    """Check that every run finds its inputs, and that the accounting equals the slow one."""
    for stage, nodes in enumerate(solution.computes):
        there = set(solution.kept[stage])
        for node in nodes:
            assert there.issuperset(problem.reads[node])
            there.add(node)
        if stage + 1 < problem.n:
            assert there.issuperset(solution.kept[stage + 1])
    assert all(solution.order().count(node) == 1 for node in problem.once)
    assert solution.cost_s == sum(problem.cost_s[node] for node in solution.order())
    peak = max(map(max, live_bytes(problem, solution.computes, solution.kept)))
    assert peak == slow_peak(problem, solution)
    assert solution.over_bytes == peak - problem.budget_bytes[0]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_exact_solution_equals_exhaustive_search(problem: Problem) -> None:
    found, best = solve_exactly(problem), exhaustive_cost(problem)
    assert (found is None) == (best is None)
    if found is not None:
        check(problem, found)
        assert found.proven
        assert found.over_bytes <= 0
        assert found.cost_s == best


# Running 3 before 2 in stage 6 would cost 10: a schedule outside of the paper's space, where a stage's nodes
# run in order.
OUT_OF_ORDER = Problem(
    (1.0,) * 8,
    (3, 4, 1, 4, 1, 1, 4, 1),
    ((), (0,), (0,), (0, 1), (0,), (1,), (2,), (3,)),
    (11,) * 8,
    (0,) * 8,
)


@settings(max_examples=3, deadline=None)
@given(problems(8).filter(lambda problem: problem.n == 8))
@example(OUT_OF_ORDER)
def test_exact_solution_equals_exhaustive_search_on_eight_nodes(problem: Problem) -> None:
    found = solve_exactly(problem)
    assert (None if found is None else found.cost_s) == exhaustive_cost(problem)


def chain(n: int, budget: int) -> Problem:
    """n forward nodes of one byte in a row.

    The i-th from the last backward reads the gradient before and its forward's input.
    """
    reads: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(n)]
    for i in reversed(range(n)):
        reads.append(tuple(sorted({*((i - 1,) if i else ()), *((2 * n - 2 - i,) if i < n - 1 else ())})))
    return Problem((1.0,) * 2 * n, (1,) * 2 * n, tuple(reads), (budget,) * 2 * n)


def reversal(n: int) -> Problem:
    """n values in a row, each made of the one before and asked for from the last to the first.

    Only they take memory.
    """
    reads: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(n)]
    for i in reversed(range(n)):
        reads.append((i, 2 * n - 2 - i) if i < n - 1 else (i,))
    return Problem((1.0,) * 2 * n, (1,) * n + (0,) * n, tuple(reads), (0,) * 2 * n)


@cache
def revolve(length: int, slots: int) -> float:
    """Runs that a reversal takes with so many slots, by the recursion of Griewank and Walther (2000,
    revolve).

    The k-th value stays; those behind it are reversed with one slot less, then those before it. A value is
    made next to its argument, so that coming to the second and further takes two slots.
    """
    if length == 0:
        return 0
    ways = (
        k + revolve(length - k, slots - 1) + revolve(k - 1, slots)
        for k in range(1, length + 1)
        if slots >= min(k, 2)
    )
    return min(ways, default=float("inf"))


@pytest.mark.parametrize(("n", "slots"), [(4, 2), (6, 2), (6, 3), (8, 3), (7, 4), (9, 3), (5, 5)])
def test_exact_cost_of_chains_equals_revolve(n: int, slots: int) -> None:
    found = solve_exactly(replace(reversal(n), budget_bytes=(slots,) * 2 * n))
    assert found is not None
    assert found.proven
    assert found.cost_s == n + revolve(n, slots)


def test_nodes_that_run_once_are_kept_for_their_readers() -> None:
    reads = ((), (0,), (0,), (0,), (0,), (0,), (0,), (1,))
    problem = Problem((1.0,) * 8, (1,) * 8, reads, (4,) * 8, (0,) * 6 + (3, 0), once=frozenset({0}))
    check(problem, solve_rounded(problem))  # 7 wants 1 again, long after the last that reads 0 itself


@settings(max_examples=15, deadline=None)
@given(problems(8))
def test_rounding_is_near_the_optimum(problem: Problem) -> None:
    rounded, exact = solve_rounded(problem), solve_exactly(problem)
    check(problem, rounded)
    if rounded.over_bytes <= 0:
        assert exact is not None
        assert rounded.cost_s <= 1.10 * exact.cost_s + 1e-9


# No threshold of the relaxation leads to a schedule of these within the budget.
OUT_OF_REACH = (
    Problem(
        (3.0, 4.0, 1.0, 4.0, 3.0, 4.0),
        (8, 9, 7, 3, 1, 5),
        ((), (0,), (1,), (0, 2), (1, 3), (0,)),
        (20,) * 6,
        (1, 0, 3, 2, 2, 1),
    ),
    Problem(
        (2.0, 2.0, 4.0, 1.0, 1.0, 2.0, 1.0),
        (8, 9, 5, 9, 2, 1, 4),
        ((), (0,), (1,), (1,), (1, 2), (3, 4), (2, 5)),
        (22,) * 7,
        (1, 3, 1, 2, 0, 2, 0),
    ),
    Problem(
        (3.0, 3.0, 3.0, 3.0, 2.0, 1.0),
        (8, 9, 8, 8, 6, 4),
        ((), (0,), (1,), (2,), (1,), (0, 2)),
        (23,) * 6,
        (2, 2, 0, 1, 0, 0),
        frozenset({4}),
    ),
)


@settings(max_examples=30, deadline=None)
@given(problems(7))
@example(OUT_OF_REACH[0])
@example(OUT_OF_REACH[1])
@example(OUT_OF_REACH[2])
def test_rounding_finds_a_schedule_wherever_one_exists(problem: Problem) -> None:
    """Within the budget of the example, and within the smallest one of all."""
    rounded = solve_rounded(problem)
    check(problem, rounded)
    assert (rounded.over_bytes <= 0) == (exhaustive_cost(problem) is not None)
    least = 1
    while exhaustive_cost(smaller := replace(problem, budget_bytes=(least,) * problem.n)) is None:
        least += 1
    found = solve_rounded(smaller)
    check(smaller, found)
    assert found.over_bytes <= 0


def test_rounding_returns_the_least_excess_if_no_schedule_exists() -> None:
    problem = replace(OUT_OF_REACH[0], budget_bytes=(5,) * 6)
    found = solve_rounded(problem)
    check(problem, found)
    assert found.over_bytes > 0


def test_rounding_does_not_depend_on_the_clock() -> None:
    problem = replace(reversal(6), budget_bytes=(5,) * 12)
    assert solve_rounded(problem, time_limit_s=0.0) == solve_rounded(problem)


@pytest.mark.parametrize("budget", [5, 6, 7, 9, 12])
def test_rounding_is_near_the_optimum_on_a_chain(budget: int) -> None:
    rounded, exact = solve_rounded(chain(9, budget)), solve_exactly(chain(9, budget))
    assert exact is not None
    check(chain(9, budget), rounded)
    assert rounded.cost_s <= 1.10 * exact.cost_s


def test_stages_have_separate_budgets() -> None:
    problem = chain(4, 6)
    plain = solve_rounded(problem)
    assert plain.cost_s == 8
    assert plain.proven
    tight = replace(problem, budget_bytes=(*problem.budget_bytes[:3], 3, *problem.budget_bytes[4:]))
    found = solve_rounded(tight)
    assert found.over_bytes <= 0
    assert found.cost_s > 8
    assert max(live_bytes(tight, found.computes, found.kept)[3]) <= 3
