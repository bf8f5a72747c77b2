"""The front against brute force; the largest micro-batch against trying every one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.pareto import largest_micro_batch, pareto_front, refined_front
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.scoring import Scorer
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.technique import Target
from memtune.testing.drift_check import recording_of


def scored(rate: float, peak: int, slots: int) -> Any:
    prediction = SimpleNamespace(
        samples_per_s=rate, peak_allocated_bytes=peak, peak_reserved_bytes=peak + 100
    )
    return SimpleNamespace(prediction=prediction, choice=SimpleNamespace(complexity=(slots, 0)))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(100, 900), st.integers(0, 3)), max_size=30))
@settings(deadline=None)
def test_front_contains_undominated_candidates(points: list[tuple[int, int, int]]) -> None:
    front = pareto_front([scored(1.0 * rate, peak, slots) for rate, peak, slots in points])
    # Half a percent of time for each technique.
    costs = [((1 + 0.005 * slots) / rate, peak) for rate, peak, slots in points]
    found = [
        (
            (1 + 0.005 * each.choice.complexity[0]) / each.prediction.samples_per_s,
            each.prediction.peak_allocated_bytes,
        )
        for each in front
    ]
    for cost, peak in found:
        assert not any(c <= cost and p <= peak and (c < cost or p < peak) for c, p in costs)
    assert found == sorted(found)
    for cost, peak in costs:  # whatever was left out is matched, to half a percent of memory
        assert any(c <= cost and p <= peak / (1 - 0.005) for c, p in found)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(100, 900)), max_size=30))
@settings(deadline=None)
def test_simulated_front_equals_front_of_all(
    points: list[tuple[int, int, int]],
) -> None:
    def at(level: str, key: int, slower: int, rate: int, peak: int) -> Any:
        prediction = SimpleNamespace(
            samples_per_s=rate / (slower if level == "events" else 1), peak_allocated_bytes=peak, level=level
        )
        return SimpleNamespace(key=key, prediction=prediction, choice=SimpleNamespace(complexity=(0, key)))

    asked: list[int] = []

    def refine(coarse: list[Any]) -> list[Any]:
        asked.extend(each.key for each in coarse)
        return [at("events", each.key, *points[each.key]) for each in coarse]

    every = [at("coarse", key, *point) for key, point in enumerate(points)]
    wanted = pareto_front([at("events", key, *point) for key, point in enumerate(points)])
    found = refined_front(every, refine, most=len(points))
    assert [each.prediction for each in found] == [each.prediction for each in wanted]
    assert len(asked) == len(set(asked))
    assert all(each.prediction.level == "events" for each in refined_front(every, refine, most=2))
    asked.clear()
    first = refined_front(every, refine, len(points), top=1)
    assert [each.prediction for each in first[:1]] == [each.prediction for each in wanted[:1]]
    assert len(asked) <= len(points)


def test_front_of_few_rows_simulates_no_others() -> None:
    every = [scored(1.0 - key / 10, 900 - 90 * key, 1) for key in range(9)]
    asked: list[int] = []

    def refine(coarse: list[Any]) -> list[Any]:
        asked.extend(each.key for each in coarse)
        for each in coarse:
            each.prediction.level = "events"
        return coarse

    for key, each in enumerate(every):
        each.key, each.prediction.level = key, "coarse"
    assert [each.key for each in refined_front(every, refine, 9, top=2)] == [0, 1]
    assert asked == [0, 1]


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(1.0, 900, 1), (0.996, 500, 1)], [500]),  # no prediction can tell these rates apart
        ([(1.0, 900, 1), (0.99, 500, 1)], [900, 500]),
        ([(1.0, 900, 0), (0.996, 500, 1)], [900, 500]),  # the simpler one stays
        ([(1.0, 900, 1), (0.996, 700, 1), (0.992, 500, 1)], [900, 500]),  # differences do not add up
    ],
)
def test_refined_front_leaves_out_memory_that_buys_no_time(
    points: list[tuple[float, int, int]], kept: list[int]
) -> None:
    every = [scored(*point) for point in points]
    for key, each in enumerate(every):
        each.key, each.prediction.level = key, "events"
    front = refined_front(every, lambda coarse: coarse, most=9)
    assert [each.prediction.peak_allocated_bytes for each in front] == kept


def test_largest_micro_batch_is_last_that_fits() -> None:
    scorer = Scorer(Rewriter(recording_of(ZOO["gpt"]), Target(hardware.find("h100-80g"))))
    for techniques in ({}, {"recompute": find("recompute", "full")(kind="full")}):
        choice = Choice.of(Execution(micro_batch=2), techniques)

        def peak(size: int, choice: Choice = choice) -> int:
            return scorer.score(
                Choice(Execution(micro_batch=size), choice.techniques)
            ).prediction.peak_allocated_bytes  # type: ignore[union-attr]

        budget = peak(11) + 1
        assert largest_micro_batch(scorer, choice, Pruner(budget)) == 11
        assert largest_micro_batch(scorer, choice, Pruner(peak(1) - 1)) == 0
        assert largest_micro_batch(scorer, choice, Pruner(None)) is None


@pytest.mark.parametrize(
    ("budget", "slots", "kept"),
    [
        (1000, 1, [900, 500]),  # both fit with what the allocator reserves: 2 % of time is a reason
        (950, 1, [500]),  # 1000 would be reserved: 2 % is no reason for retries
        (950, 0, [500]),  # nor is being simpler
        (None, 1, [900, 500]),
    ],
)
def test_refined_front_leaves_out_retries_that_buy_little_time(
    budget: int | None, slots: int, kept: list[int]
) -> None:
    every = [scored(1.0, 900, slots), scored(0.98, 500, 1)]
    for key, each in enumerate(every):
        each.key, each.prediction.level = key, "events"
    front = refined_front(every, lambda coarse: coarse, 9, budget)
    assert [each.prediction.peak_allocated_bytes for each in front] == kept


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([(1.0, 500, 2), (0.998, 900, 0)], [900, 500]),  # 0.2 percent is no reason for two techniques
        ([(1.0, 500, 1), (0.998, 900, 0)], [900, 500]),  # nor for one that saves memory, which is kept
        ([(1.0, 500, 1), (0.988, 900, 0)], [500]),
        ([(1.0, 500, 1), (0.98, 900, 0)], [500]),
        ([(1.0, 950, 1), (0.995, 900, 0)], [900]),
        ([(1.0, 500, 1), (0.995, 950, 0)], [500]),  # 1050 would be reserved
    ],
)
def test_refined_front_begins_with_the_simplest_of_equals(
    points: list[tuple[float, int, int]], kept: list[int]
) -> None:
    every = [scored(*point) for point in points]
    for key, each in enumerate(every):
        each.key, each.prediction.level = key, "events"
    front = refined_front(every, lambda coarse: coarse, 9, 1000)
    assert [each.prediction.peak_allocated_bytes for each in front] == kept
