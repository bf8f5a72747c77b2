from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from memtune.autotune.search.trial_verdict import (
    Measured,
    beats,
    judge,
    loss_tolerance,
    losses_disagree,
    rounds_disagree,
)
from memtune.autotune.space.candidates import Choice
from memtune.executors.base import TrialResult
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.technique import Technique

FULL = find("recompute", "full")(kind="full")
EVERY = find("recompute", "every_nth")(kind="every_nth", n=3)
HOST = find("offload.states", "optimizer_cpu")(kind="optimizer_cpu")
SETS: tuple[tuple[Technique, ...], ...] = ((), (FULL,), (EVERY,), (HOST,), (FULL, HOST), (EVERY, HOST))


def measured(
    number: int, steps: list[float], *techniques: Technique, guard: str = "", peak: int = 100, micro: int = 4
) -> Measured:
    choice = Choice.of(Execution(micro_batch=micro), {each.slot: each for each in techniques})
    middle = sorted(steps)[len(steps) // 2]
    result = TrialResult(
        number=number,
        status="ok",
        step_s=middle,
        step_s_all=steps,
        peak_allocated_bytes=peak,
        samples_per_s=4 / middle,
    )
    return Measured(choice, (result,), guard)


def test_a_winner_closer_than_the_spread_loses_to_the_simpler_one():
    simple, complicated = measured(1, [1.00, 1.02, 1.04], FULL), measured(2, [0.99, 1.01, 1.03], EVERY, HOST)
    verdict = judge([complicated, simple], "throughput")
    assert verdict is not None
    assert verdict.winner is simple


def test_a_winner_beyond_the_spread_wins_however_complicated():
    simple, complicated = measured(1, [1.00, 1.02, 1.04], FULL), measured(2, [0.80, 0.81, 0.82], EVERY, HOST)
    verdict = judge([simple, complicated], "throughput")
    assert verdict is not None
    assert verdict.winner is complicated


def test_one_hiccup_does_not_make_everything_a_tie():
    slow, fast = measured(1, [1.0] * 9, FULL), measured(2, [0.9] * 8 + [5.0], EVERY, HOST)
    verdict = judge([slow, fast], "throughput")
    assert verdict is not None
    assert verdict.winner is fast


def in_turn(
    number: int, rounds: list[list[float]], *techniques: Technique, first: float = 1.0, guard: str = ""
) -> Measured:
    results = [measured(number, each, *techniques).results[0] for each in [[first], *rounds]]
    return Measured(measured(number, [first], *techniques).choice, tuple(results), guard, tuple(results[1:]))


def test_a_machine_that_slows_down_between_rounds_slows_all_finalists_alike():
    slow = in_turn(1, [[1.00, 1.01, 1.02], [2.00, 2.02, 2.04]], FULL)
    fast = in_turn(2, [[0.90, 0.91, 0.92], [1.80, 1.82, 1.84]], EVERY, HOST)
    assert beats(fast, slow, "throughput")
    assert not rounds_disagree([slow, fast], "throughput")


def test_a_time_from_before_the_machine_slowed_down_wins_nothing():
    lucky = measured(1, [0.5, 0.5, 0.5], FULL)  # once, while the machine was quiet
    first = in_turn(2, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], EVERY, first=0.4)
    other = in_turn(3, [[1.2, 1.2, 1.2], [1.2, 1.2, 1.2]], HOST, first=0.4)
    verdict = judge([lucky, first, other], "throughput")
    assert verdict is not None
    assert verdict.winner is first
    assert verdict.winner.step_s == 1.0


def test_rounds_that_name_another_best_ask_for_one_more():
    one, two = in_turn(1, [[1.0], [1.2]], FULL), in_turn(2, [[1.1], [1.1]], EVERY)
    assert rounds_disagree([one, two], "throughput")
    assert not rounds_disagree([one, two], "memory")
    assert not rounds_disagree([one], "throughput")


def test_rounds_that_tie_each_time_ask_for_none():
    simple = in_turn(1, [[0.9, 1.0, 1.1], [1.0, 1.1, 1.2]], FULL)
    other = in_turn(2, [[1.0, 1.01, 1.02], [1.06, 1.07, 1.08]], EVERY, HOST)
    assert not rounds_disagree([simple, other], "throughput")


def test_when_the_users_own_setting_is_best_it_ships_and_it_is_said():
    plain = measured(0, [1.0, 1.0, 1.0], guard="plain")
    verdict = judge(
        [
            plain,
            measured(1, [1.3, 1.3, 1.3], FULL, guard="full recompute"),
            measured(2, [1.1, 1.1, 1.1], EVERY),
        ],
        "throughput",
    )
    assert verdict is not None
    assert verdict.winner is plain
    assert not verdict.beats_guards
    assert "your own setting" in verdict.text


def test_memory_is_judged_by_bytes_and_batch_by_samples():
    small = measured(1, [2.0], EVERY, HOST, peak=50)
    large = measured(2, [1.0], FULL, peak=90, micro=16)
    plain = measured(0, [1.0], peak=100, guard="plain")
    assert judge([plain, small, large], "memory").winner is small  # type: ignore[union-attr]
    assert judge([plain, small, large], "batch").winner is large  # type: ignore[union-attr]


def test_nothing_measured_is_no_verdict():
    assert judge([], "throughput") is None


steps = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9)


@given(
    st.lists(st.tuples(st.integers(0, 5), steps), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), steps), max_size=2),
)
@example(
    [(1, [2.0, 2.0, 0.5, 0.5, 0.5])], [(0, [1.0, 1.0, 1.0]), (1, [1.0, 0.5, 0.5])]
)  # the best spreads widely
def test_what_ships_is_never_worse_than_a_guard(
    others: list[tuple[int, list[float]]], guards: list[tuple[int, list[float]]]
):
    pool = [measured(i, each, *SETS[which]) for i, (which, each) in enumerate(others)]
    pool += [
        measured(100 + i, each, *SETS[which], guard=f"guard {i}") for i, (which, each) in enumerate(guards)
    ]
    verdict = judge(pool, "throughput")
    assert verdict is not None
    for guard in (each for each in pool if each.guard):
        assert not beats(guard, verdict.winner, "throughput")
        if verdict.beats_guards:
            assert beats(verdict.winner, guard, "throughput")
    if not verdict.winner.guard:
        assert verdict.beats_guards or not guards


def choice(*techniques: Technique, micro: int = 4, accumulate: int = 1) -> Choice:
    return Choice.of(
        Execution(micro_batch=micro, accumulate=accumulate), {each.slot: each for each in techniques}
    )


def test_tolerances_follow_the_class_of_exactness():
    unit = 2.0**-24
    same = loss_tolerance(choice(FULL), choice(), unit=unit, draws_random=True)
    cut = loss_tolerance(choice(micro=2, accumulate=2), choice(), unit=unit, draws_random=False)
    noisy = loss_tolerance(choice(micro=2, accumulate=2), choice(), unit=unit, draws_random=True)
    assert same is not None
    assert cut is not None
    assert noisy is not None
    assert same < cut < noisy
    assert loss_tolerance(choice(FULL), choice(), unit=2.0**-8, draws_random=False) == math.sqrt(2.0**-8)


def test_losses_that_disagree_are_told_with_step_and_numbers():
    assert losses_disagree([1.0, 0.9], [1.0, 0.9], 1e-6) is None
    assert losses_disagree([1.0, 0.9, 0.8], [1.0, 0.9], 1e-6) is None
    text = losses_disagree([1.0, 0.8], [1.0, 0.9], 1e-6)
    assert text is not None
    assert "0.8 at step 2, 0.9 without" in text
    assert losses_disagree([float("nan")], [1.0], 0.5) is not None
    assert losses_disagree([float("inf")], [1.0], 0.5) is not None
