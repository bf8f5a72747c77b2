from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import example, given, strategies as st

from memtune.autotune.search.trial_verdict import (
    WORTH_SIMPLICITY,
    Measured,
    beats,
    contenders,
    finalists,
    finalists_to_repeat,
    gain,
    judge,
    loss_tolerance,
    losses_disagree,
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
    number: int,
    steps: list[float],
    *techniques: Technique,
    baseline: str = "",
    peak: int = 100,
    micro: int = 4,
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
    return Measured(choice, (result,), baseline)


def test_verdict_within_spread_prefers_simpler():
    simple, complicated = measured(1, [1.00, 1.02, 1.04], FULL), measured(2, [0.99, 1.01, 1.03], EVERY, HOST)
    verdict = judge([complicated, simple], "throughput")
    assert verdict is not None
    assert verdict.winner is simple


def test_stated_gain_is_the_ratio_of_the_stated_times():
    """Medians of steps on a busy machine may say the opposite of the undisturbed ones."""
    slow, fast = [0.10, 0.10, 0.20, 0.20, 0.20], [0.09, 0.09, 0.50, 0.50, 0.50]
    plain, full = measured(1, slow, baseline="plain"), measured(2, fast, FULL)
    plain, full = (replace(each, rounds=each.results * 4) for each in (plain, full))
    verdict = judge([plain, full], "throughput")
    assert verdict is not None
    assert verdict.winner is full
    assert f"{plain.step_s / full.step_s - 1:.0%}" in verdict.text


def test_verdict_of_equals_is_the_one_with_the_lower_peak_whichever_is_faster():
    """Peaks repeat from search to search, the order of equal times does not."""
    one, other = [[1.0], [1.02], [0.99]], [[1.01], [1.0], [1.0]]
    for low_s, high_s in ((one, other), (other, one)):
        high = alternating(1, high_s, FULL, peak=100)
        low = alternating(2, low_s, EVERY, peak=60)
        verdict = judge([high, low], "throughput")
        assert verdict is not None
        assert verdict.winner is low
    assert low.choice.complexity > high.choice.complexity
    assert "the one with the lower peak is taken" in verdict.text


def test_verdict_never_ships_a_finalist_that_was_beaten_and_left():
    """Later rounds of the others may be noisier, which would make it one of those not told apart."""
    full = alternating(1, [[2.00], [2.00]], FULL, baseline="full recompute")
    full = replace(full, rounds=(*full.rounds, None, None))
    fast = alternating(2, [[1.70], [1.68], [1.2], [2.4]], EVERY)
    other = alternating(3, [[1.72], [1.71], [2.3], [1.1]], HOST)
    racers = [full, fast, other]
    assert not beats(fast, full, "throughput", racers)
    verdict = judge(racers, "throughput")
    assert verdict is not None
    assert verdict.winner is not full


def test_verdict_gives_up_little_for_simplicity():
    """The noise hides a difference of a tenth, which is too much to take the simpler one regardless."""
    simple = alternating(1, [[1.1], [1.3], [0.95]], FULL)
    fast = alternating(2, [[1.0], [1.0], [1.0]], EVERY, HOST)
    assert not beats(fast, simple, "throughput")
    verdict = judge([simple, fast], "throughput")
    assert verdict is not None
    assert verdict.winner is fast


def test_verdict_beyond_spread_prefers_faster():
    simple, complicated = measured(1, [1.00, 1.02, 1.04], FULL), measured(2, [0.80, 0.81, 0.82], EVERY, HOST)
    verdict = judge([simple, complicated], "throughput")
    assert verdict is not None
    assert verdict.winner is complicated


def test_verdict_ignores_single_outlier():
    slow, fast = measured(1, [1.0] * 9, FULL), measured(2, [0.9] * 8 + [5.0], EVERY, HOST)
    verdict = judge([slow, fast], "throughput")
    assert verdict is not None
    assert verdict.winner is fast


def alternating(
    number: int,
    rounds: list[list[float]],
    *techniques: Technique,
    first: float = 1.0,
    baseline: str = "",
    peak: int = 100,
) -> Measured:
    results = [measured(number, each, *techniques, peak=peak).results[0] for each in [[first], *rounds]]
    return Measured(
        measured(number, [first], *techniques).choice, tuple(results), baseline, tuple(results[1:])
    )


def test_verdict_compares_within_rounds():
    slow = alternating(1, [[1.00, 1.01, 1.02], [2.00, 2.02, 2.04]], FULL)
    fast = alternating(2, [[0.90, 0.91, 0.92], [1.80, 1.82, 1.84]], EVERY, HOST)
    assert beats(fast, slow, "throughput")
    assert finalists_to_repeat([slow, fast], "throughput", 4) == []


def test_verdict_ignores_times_before_slowdown():
    lucky = measured(1, [0.5, 0.5, 0.5], FULL)  # once, while the machine was quiet
    first = alternating(2, [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], EVERY, first=0.4)
    other = alternating(3, [[1.2, 1.2, 1.2], [1.2, 1.2, 1.2]], HOST, first=0.4)
    verdict = judge([lucky, first, other], "throughput")
    assert verdict is not None
    assert verdict.winner is first
    assert verdict.winner.step_s == 1.0


def test_verdict_requests_rounds_while_best_is_unclear():
    one, two = alternating(1, [[1.0], [1.2]], FULL), alternating(2, [[1.1], [1.1]], EVERY)
    assert len(finalists_to_repeat([one, two], "throughput", 4)) == 2
    assert finalists_to_repeat([one, two], "throughput", 0) == []
    assert finalists_to_repeat([one, two], "memory", 4) == []
    assert finalists_to_repeat([one], "throughput", 4) == []


def test_verdict_requests_no_round_for_equals_measured_closely():
    rounds = [[1.0], [1.1], [1.2], [1.05]]
    one, two = alternating(1, rounds, FULL), alternating(2, [[each[0] * 1.002] for each in rounds], EVERY)
    assert not beats(one, two, "throughput")
    assert finalists_to_repeat([one, two], "throughput", 4) == []


def test_racing_drops_what_the_best_beats():
    best = alternating(1, [[1.0], [2.0], [1.0]], EVERY)
    close = alternating(2, [[1.06], [2.02], [1.08]], HOST)
    beaten = alternating(3, [[1.5], [3.0], [1.5]], FULL)
    assert finalists_to_repeat([beaten, close, best], "throughput", 3) == [best, close]


def test_racing_ends_where_noise_hides_any_difference():
    one = alternating(1, [[1.0], [2.0], [1.0]], EVERY)
    other = alternating(2, [[2.0], [1.0], [1.1]], HOST)
    assert finalists_to_repeat([one, other], "throughput", 3) == []


def test_verdict_does_not_count_a_time_that_other_work_slowed_down():
    full = alternating(1, [[1.2], [1.21], [1.2]], FULL, baseline="full recompute")
    fast = alternating(2, [[1.0], [2.2], [1.003]], HOST)
    near = alternating(3, [[1.1], [1.105], [1.11]], EVERY)
    assert fast.step_s > full.step_s
    verdict = judge([full, fast, near], "throughput")
    assert verdict is not None
    assert verdict.winner is fast
    assert beats(fast, near, "throughput", [full, fast, near])


def test_verdict_counts_a_time_that_was_shorter():
    """Other work makes no step faster, so a single short time is noise of this machine."""
    full = alternating(1, [[1.2], [1.21], [1.2]], FULL, baseline="full recompute")
    lucky = alternating(2, [[1.3], [0.6], [1.3]], HOST)
    verdict = judge([full, lucky], "throughput")
    assert verdict is not None
    assert verdict.winner is full
    assert not beats(full, lucky, "throughput")


def test_verdict_compares_finalist_that_left_within_its_own_rounds():
    """The machine slows down after the third finalist has left: its times are lower than those of all."""
    rounds = [[1.0], [1.001], [3.0], [3.003]]
    best = alternating(1, rounds, EVERY, HOST)
    close = alternating(2, [[1.1 * each[0]] for each in rounds], HOST)
    left = alternating(3, [[1.3 * each[0]] for each in rounds], FULL, baseline="full")
    left = replace(left, rounds=(*left.rounds[:2], None, None))
    assert left.step_s < best.step_s
    verdict = judge([left, close, best], "throughput")
    assert verdict is not None
    assert verdict.winner is best
    assert "30% (" in verdict.text


def test_gain_interval_covers_truth_at_stated_rate():
    """Of many searches with four equal finalists, few claim any difference."""
    draw = random.Random(0)
    techniques = ((FULL,), (EVERY,), (HOST,), (EVERY, HOST))
    wrong = 0
    for _ in range(400):
        speed = [draw.lognormvariate(0, 0.3) for _ in range(3)]  # rounds differ far more than finalists
        finalists = [
            alternating(i, [[each * draw.lognormvariate(0, 0.01)] for each in speed], *which)
            for i, which in enumerate(techniques)
        ]
        best = min(finalists, key=lambda each: each.value("throughput"))
        wrong += any(beats(best, each, "throughput", finalists) for each in finalists if each is not best)
    assert wrong < 400 * 0.12  # the best is chosen after the fact, which Bonferroni's bound does not include


def test_gain_interval_shrinks_with_rounds():
    draw = random.Random(1)
    wide, narrow = (
        [alternating(i, [[draw.lognormvariate(0, 0.01)] for _ in range(n)], SETS[i + 1][0]) for i in range(3)]
        for n in (2, 6)
    )
    assert (
        gain(narrow[0], narrow[1], "throughput", narrow).half_width
        < gain(wide[0], wide[1], "throughput", wide).half_width
    )


def test_gain_is_stated_with_interval_and_tie_with_reason():
    rounds = [[1.0], [1.1], [1.2], [1.05]]
    baseline = alternating(1, rounds, FULL, baseline="full recompute")
    simple = alternating(2, [[each[0] * 0.902] for each in rounds], EVERY)
    complicated = alternating(3, [[each[0] * 0.9] for each in rounds], EVERY, HOST)
    verdict = judge([baseline, simple, complicated], "throughput")
    assert verdict is not None
    assert verdict.winner is simple
    assert "11% (" in verdict.text
    assert "faster than full recompute" in verdict.text
    assert "the one with fewer settings is taken" in verdict.text


def test_contenders_are_close_to_best():
    near, far = measured(2, [1.03] * 5, EVERY), measured(3, [1.3] * 5, HOST)
    best = measured(1, [1.0] * 5, FULL)
    assert contenders([far, near, best], "throughput") == [best, near]


def test_contenders_include_what_other_load_made_slow():
    """By all trials together it may be the best, although its own trial was the slowest."""
    best, near, disturbed = (
        measured(1, [1.0, 1.01]),
        measured(2, [1.03, 1.04], FULL),
        measured(3, [1.5, 1.6], EVERY),
    )
    expected = {best.choice: (0.0, 0.01), near.choice: (0.03, 0.01), disturbed.choice: (0.01, 0.2)}
    found = contenders([near, best, disturbed], "throughput", expected=expected)
    assert found == [best, disturbed, near]
    certain = expected | {disturbed.choice: (0.4, 0.01)}
    assert contenders([near, best, disturbed], "throughput", expected=certain) == [best, near]


def test_finalists_include_what_one_doubtful_trial_made_slow() -> None:
    best, full = measured(1, [1.0] * 5, EVERY), measured(2, [1.3] * 5, FULL, baseline="full recompute")
    doubtful, slow = measured(3, [2.0] * 5, HOST), measured(4, [2.0] * 5, EVERY, HOST)
    everything = [best, full, doubtful, slow]
    assert finalists(everything, "throughput", doubtful={doubtful.choice}) == [best, full, doubtful]


def test_gain_without_rounds_claims_nothing_that_reference_op_explains():
    """A fixed matrix product took a tenth longer in the slower trial, so the machine was slower then."""
    fast, slow = measured(1, [1.0, 1.01, 1.02]), measured(2, [1.08, 1.09, 1.10], FULL)
    assert beats(fast, slow, "throughput")

    def at(one: Measured, reference_s: float) -> Measured:
        return replace(one, results=(one.results[0].model_copy(update={"reference_s": reference_s}),))

    assert not beats(at(fast, 1e-3), at(slow, 1.1e-3), "throughput")
    assert beats(at(fast, 1e-3), at(slow, 1e-3), "throughput")


def test_verdict_returns_users_setting_if_best():
    plain = measured(0, [1.0, 1.0, 1.0], baseline="plain")
    verdict = judge(
        [
            plain,
            measured(1, [1.3, 1.3, 1.3], FULL, baseline="full recompute"),
            measured(2, [1.1, 1.1, 1.1], EVERY),
        ],
        "throughput",
    )
    assert verdict is not None
    assert verdict.winner is plain
    assert "your own setting" in verdict.text


def test_verdict_takes_a_large_gain_that_noise_hides_and_says_so():
    plain = alternating(1, [[1.0], [1.6], [0.9]], baseline="plain")
    fast = alternating(2, [[0.9], [1.0], [0.95]], HOST)
    assert not beats(fast, plain, "throughput")
    verdict = judge([plain, fast], "throughput")
    assert verdict is not None
    assert verdict.winner is fast
    assert "noise may explain it" in verdict.text


def test_verdict_keeps_the_users_setting_if_a_gain_within_noise_is_small():
    plain = alternating(1, [[1.0], [1.1], [0.92]], baseline="plain")
    fast = alternating(2, [[0.97], [1.0], [0.95]], HOST)
    verdict = judge([plain, fast], "throughput")
    assert verdict is not None
    assert verdict.winner is plain


def test_verdict_compares_bytes_or_samples_by_goal():
    small = measured(1, [2.0], EVERY, HOST, peak=50)
    large = measured(2, [1.0], FULL, peak=90, micro=16)
    plain = measured(0, [1.0], peak=100, baseline="plain")
    assert judge([plain, small, large], "memory").winner is small  # type: ignore[union-attr]
    assert judge([plain, small, large], "batch").winner is large  # type: ignore[union-attr]


def test_verdict_is_none_without_measurements():
    assert judge([], "throughput") is None


steps = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=9)


@given(
    st.lists(st.tuples(st.integers(0, 5), steps), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), steps), max_size=2),
)
@example(
    [(1, [2.0, 2.0, 0.5, 0.5, 0.5])], [(0, [1.0, 1.0, 1.0]), (1, [1.0, 0.5, 0.5])]
)  # the best spreads widely
def test_verdict_is_no_worse_than_baselines(
    others: list[tuple[int, list[float]]], baselines: list[tuple[int, list[float]]]
):
    pool = [measured(i, each, *SETS[which]) for i, (which, each) in enumerate(others)]
    pool += [
        measured(100 + i, each, *SETS[which], baseline=f"baseline {i}")
        for i, (which, each) in enumerate(baselines)
    ]
    verdict = judge(pool, "throughput")
    assert verdict is not None
    for baseline in (each for each in pool if each.baseline):
        assert not beats(baseline, verdict.winner, "throughput")
        if not verdict.winner.baseline:
            found = gain(verdict.winner, baseline, "throughput")
            assert found.low > 0 or found.usual > WORTH_SIMPLICITY


def choice(*techniques: Technique, micro: int = 4, accumulate: int = 1) -> Choice:
    return Choice.of(
        Execution(micro_batch=micro, accumulate=accumulate), {each.slot: each for each in techniques}
    )


def test_loss_tolerance_follows_exactness():
    unit = 2.0**-24
    same = loss_tolerance(choice(FULL), choice(), unit=unit, draws_random=True)
    cut = loss_tolerance(choice(micro=2, accumulate=2), choice(), unit=unit, draws_random=False)
    noisy = loss_tolerance(choice(micro=2, accumulate=2), choice(), unit=unit, draws_random=True)
    assert same is not None
    assert cut is not None
    assert noisy is not None
    assert same < cut < noisy
    assert loss_tolerance(choice(FULL), choice(), unit=2.0**-8, draws_random=False) == math.sqrt(2.0**-8)


def test_loss_disagreement_names_step_and_values():
    assert losses_disagree([1.0, 0.9], [1.0, 0.9], 1e-6) is None
    assert losses_disagree([1.0, 0.9, 0.8], [1.0, 0.9], 1e-6) is None
    text = losses_disagree([1.0, 0.8], [1.0, 0.9], 1e-6)
    assert text is not None
    assert "0.8 at step 2, 0.9 without" in text
    assert losses_disagree([float("nan")], [1.0], 0.5) is not None
    assert losses_disagree([float("inf")], [1.0], 0.5) is not None
