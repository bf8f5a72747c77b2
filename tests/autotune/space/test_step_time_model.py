"""The posterior of step times: one trial corrects all candidates that share a mechanism with it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support.search.prepared_search import rewriter

from memtune.autotune.predict.python_work import PythonWork
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.autotune.space.scoring import Scored, Scorer, python_work, score_all
from memtune.autotune.space.search_space import build_space
from memtune.autotune.space.step_time_model import (
    Observed,
    StepTimeModel,
    _Fit,
    _improvement,
    kinds,
)
from memtune.program import Program
from memtune.technique import Plan


@cache
def candidates() -> tuple[Scored, ...]:
    made = rewriter()
    scores = score_all(
        build_space(made, 8, axes=("recompute", "offload.activations")), Scorer(made), "throughput"
    )
    return tuple(scores.by_key[key] for key in sorted(scores.by_key))


def one_with(*wanted: tuple[str, str]) -> Scored:
    return next(each for each in candidates() if kinds(each.choice) == frozenset(wanted))


def test_variance_is_that_of_the_whole_covariance() -> None:
    draw = np.random.default_rng(0)
    prior, noise, seen, asked = (draw.random(size) for size in (30, 6, (6, 30), (9, 30)))
    shared = prior[:, None] * seen.T
    fit = _Fit(
        np.zeros(30), prior, shared @ np.linalg.inv(seen @ shared + np.diag(noise)), shared, 0.0, noise
    )
    covariance = np.linalg.inv(np.diag(1 / prior) + seen.T / noise @ seen)
    np.testing.assert_allclose(fit.variance(asked), np.diag(asked @ covariance @ asked.T))


def test_posterior_without_trials_expects_more_and_is_less_certain_with_more_mechanisms() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    mean, sd = StepTimeModel().posterior([plain, full])
    assert 0 <= mean[0] < mean[1] < sd[1]
    assert sd[0] < sd[1]
    assert (StepTimeModel(are_trials=False).posterior([plain, full]).mean == 0).all()


def test_posterior_corrects_all_that_share_a_slow_machine() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    model = StepTimeModel([Observed(plain, 3 * plain.prediction.step_s)])
    mean, sd = model.posterior([full])
    assert math.exp(mean[0]) == pytest.approx(3, rel=0.05)
    assert sd[0] < StepTimeModel().posterior([full]).sd[0]


def test_posterior_blames_mechanism_that_plain_steps_lack() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    others = [each for each in candidates() if ("recompute", "full") in kinds(each.choice)]
    observed = [
        Observed(plain, plain.prediction.step_s),
        Observed(full, 2 * full.prediction.step_s),
    ]
    mean, _ = StepTimeModel(observed).posterior([*others, plain])
    assert (mean[:-1] > math.log(1.3)).all()
    assert abs(mean[-1]) < 0.1


def test_posterior_recovers_hidden_factors_and_its_interval_holds() -> None:
    """True times are predictions times a hidden factor by mechanism: after trials nine of ten lie inside."""
    draw, inside, errors = random.Random(0), [], []
    for _ in range(20):
        hidden = {kind: draw.uniform(-0.69, 0.69) for each in candidates() for kind in kinds(each.choice)}

        def true_s(each: Scored, hidden: dict[tuple[str, str], float] = hidden) -> float:
            return each.prediction.step_s * math.exp(sum(hidden[kind] for kind in kinds(each.choice)))

        trials = draw.sample(candidates(), 8)
        model = StepTimeModel([Observed(each, true_s(each)) for each in trials])
        for each in draw.sample(candidates(), 20):
            at, low, high = model.step_s(each)
            inside.append(low <= true_s(each) <= high)
            errors.append(abs(math.log(at / true_s(each))))
    assert np.mean(inside) > 0.75
    assert np.median(errors) < 0.3


def test_posterior_explores_less_where_trials_agree_with_predictions() -> None:
    trials = random.Random(0).sample(candidates(), 8)
    right = StepTimeModel([Observed(each, each.prediction.step_s) for each in trials])
    odd = StepTimeModel(
        [
            Observed(each, each.prediction.step_s * factor)
            for each, factor in zip(trials, [0.5, 2] * 4, strict=True)
        ]
    )
    rest = [each for each in candidates() if each not in trials]
    assert np.median(right.posterior(rest).sd) < 0.5 * np.median(odd.posterior(rest).sd)


def test_noisy_trial_counts_less() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    clear, noisy = (
        StepTimeModel([Observed(plain, 2 * plain.prediction.step_s, noise)]).posterior([full]).mean[0]
        for noise in (0.0, 1.0)
    )
    assert noisy < 0.5 * clear


def test_slow_trial_of_known_mechanisms_counts_little_until_it_is_repeated() -> None:
    known = [each for each in candidates() if ("recompute", "full") in kinds(each.choice)][:4]
    trials = [Observed(each, each.prediction.step_s) for each in (one_with(), *known)]
    best_s = min(1 / each.scored.prediction.samples_per_s for each in trials)
    slow = trials[-1]._replace(step_s=2 * known[-1].prediction.step_s)
    once = StepTimeModel([*trials[:-1], slow])
    assert set(once.repeat_gains(2 * best_s)) == {known[-1].key}
    assert once.repeat_gains(2 * best_s)[known[-1].key] > 0.2
    assert once.posterior(known).mean.max() < 0.1
    again = StepTimeModel([*trials[:-1], slow, slow])
    assert not again.repeat_gains(2 * best_s)
    assert again.posterior(known[-1:]).mean[0] > math.log(1.7)
    # A fast trial is not what other work makes.
    fast = StepTimeModel([*trials[:-1], slow._replace(step_s=0.5 * known[-1].prediction.step_s)])
    assert known[-1].key not in fast.repeat_gains(2 * best_s)


def test_slow_first_trial_of_a_mechanism_is_probably_the_mechanism() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    model = StepTimeModel(
        [Observed(plain, plain.prediction.step_s), Observed(full, 1.5 * full.prediction.step_s)]
    )
    assert model.posterior([full]).mean[0] > math.log(1.3)
    assert model.repeat_gains(1 / plain.prediction.samples_per_s).get(full.key, 0.0) < 0.01


def test_expected_improvement_equals_monte_carlo() -> None:
    log_s, sd, best = np.array([0.1, -0.2, 0.0]), np.array([0.3, 0.05, 0.2]), 0.0
    draws = np.random.default_rng(0).normal(log_s[:, None], sd[:, None], (3, 200_000))
    assert _improvement(log_s, sd, best) == pytest.approx(np.maximum(best - draws, 0).mean(1), abs=2e-3)


def test_improvement_is_expected_over_the_scales_of_the_priors() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    model = StepTimeModel([Observed(plain, plain.prediction.step_s)])
    log_s, best = np.array([0.0]), -0.05
    chances, means, variances = model._by_scale([full])
    draw = np.random.default_rng(0)
    scales = draw.choice(len(chances), 200_000, p=chances)
    drawn = draw.normal(means[scales, 0], np.sqrt(variances[scales, 0]))
    found = model.improvement([full], log_s, best)[0]
    assert found == pytest.approx(np.maximum(best - drawn, 0).mean(), rel=0.1)


def with_copies(seconds: float, *wanted: tuple[str, str]) -> Scored:
    """A candidate whose step is predicted to take 1 s of compute and `seconds` of copies to the device."""
    found, spent = one_with(*wanted), {"compute": 1.0, "host_to_device": seconds}
    prediction = replace(found.prediction, step_s=1 + seconds, busy_s=spent, mechanism_s=spent)
    return replace(found, prediction=prediction)


def test_few_seconds_of_uncertain_mechanism_are_little_uncertainty() -> None:
    few, many = with_copies(0.01), with_copies(1.0)
    mean, sd = StepTimeModel().posterior([few, many])
    assert np.isfinite(mean).all()
    assert sd[0] - sd[1] < 0
    known = StepTimeModel([Observed(few, few.prediction.step_s)]).posterior([few, many])
    assert known.sd[0] < 0.02
    assert known.sd[1] > 5 * known.sd[0]


def test_posterior_corrects_mechanism_in_proportion_to_its_seconds() -> None:
    """Copies take twice as long as predicted in one setting, so another one's will too."""
    none, half, more = with_copies(0.0), with_copies(0.5, ("recompute", "full")), with_copies(1.0)
    more = replace(more, key="another")
    model = StepTimeModel([Observed(none, 1.0), Observed(half, 2.0)])
    expected = [model.step_s(each)[0] for each in (none, half, more)]
    assert expected[:2] == pytest.approx([1.0, 2.0], rel=0.05)
    assert expected[2] > 2.6  # 3 if nothing but copies were to blame


class ThreeCalls(Plan):
    """Plan with a schedule of each of three blocks."""

    @property
    def schedule_calls(self) -> int:
        return 3


def test_python_work_follows_effects_and_plans_of_techniques() -> None:
    def work(plans: dict[str, Plan] | None = None, **settings: object) -> PythonWork:
        choice = Choice.from_document({"execution": {"micro_batch": 4}, **settings})
        return python_work(Candidate(choice, "", Program((), 4), plans or {}))

    assert work() == work(recompute={"kind": "full"}) == PythonWork()
    assert work(recompute={"kind": "selective"}).observes_ops
    assert work({"recompute": ThreeCalls()}, recompute={"kind": "dtr"}).schedule_calls == 3


def test_model_that_believes_a_pending_trial_is_surer_of_its_mechanism_and_expects_the_same() -> None:
    plain, full = one_with(), one_with(("recompute", "full"))
    others = [each for each in candidates() if ("recompute", "full") in kinds(each.choice)]
    model = StepTimeModel([Observed(plain, 1.2 * plain.prediction.step_s)])
    before, after = model.posterior(others), model.believing([full]).posterior(others)
    assert after.mean == pytest.approx(before.mean, abs=0.02)
    assert (after.sd < before.sd).all()
    assert model.believing([]) is model
