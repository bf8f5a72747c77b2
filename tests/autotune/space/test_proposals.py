"""The order in which candidates are proposed, on a real space that the simulator has scored."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.search.prepared_search import rewriter

from memtune.autotune.predict.prediction import Prediction
from memtune.autotune.space import proposals
from memtune.autotune.space.proposals import Proposer
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.sampler import Sampler
from memtune.autotune.space.scoring import Scored, Scorer, Scores, score_all
from memtune.autotune.space.search_space import Space, build_space
from memtune.autotune.space.step_time_model import Observed, StepTimeModel, kinds


@cache
def scored() -> tuple[Space, Scorer, Scores]:
    made = rewriter()
    space, scorer = build_space(made, 8, axes=("execution", "offload")), Scorer(made)
    return space, scorer, score_all(space, scorer, "throughput")


@pytest.fixture
def proposer(tmp_path: Path) -> Proposer:
    space, scorer, scores = scored()
    mine = replace(scores, by_key=dict(scores.by_key))
    return Proposer(mine, scorer, Sampler(tmp_path / "study.db", space, 0), "throughput", lambda *_: None)


def by_time(proposer: Proposer) -> list[Scored]:
    return sorted(proposer.scores.by_key.values(), key=lambda each: each.rank("throughput"))


def test_proposer_begins_with_fast_and_certain(proposer: Proposer) -> None:
    """Before any trial nothing uncertain is proposed if something certain is predicted as fast."""
    first = proposer.next(Pruner(None), set(), None, StepTimeModel())
    assert first is not None
    assert first.scored.prediction.level == "events"
    fastest = by_time(proposer)[0]
    model = StepTimeModel()
    mine, others = (float(model.posterior([each]).sd[0]) for each in (first.scored, fastest))
    assert first.scored.prediction.step_s * mine <= fastest.prediction.step_s * others * (1 + 1e-9)


def test_proposer_delays_techniques_that_trials_showed_slow(proposer: Proposer) -> None:
    """The techniques of what would come next turn out to be four times as slow, so something else comes."""
    plain = next(each for each in proposer.scores.by_key.values() if not each.choice.techniques)
    ran = proposer.scorer.refined(plain)
    observed = [Observed(ran, ran.prediction.step_s)]
    best = ran.prediction.step_s / (ran.prediction.samples_per_s * ran.prediction.step_s)
    naive = proposer.next(Pruner(None), {ran.key}, best, StepTimeModel(observed))
    assert naive is not None
    observed.append(Observed(naive.scored, 4 * naive.scored.prediction.step_s))
    found = proposer.next(Pruner(None), {ran.key, naive.scored.key}, best, StepTimeModel(observed))
    assert found is None or not kinds(naive.scored.choice) <= kinds(found.scored.choice)


def test_proposer_repeats_trial_that_other_work_slowed_down(proposer: Proposer) -> None:
    """Three settings of a technique took as long as predicted, but the fastest one twice as long."""
    alike = [
        each for each in by_time(proposer) if kinds(each.choice) == {("offload.states", "optimizer_cpu")}
    ]
    fastest, *others = (proposer.scorer.refined(each) for each in alike[:4])
    observed = [Observed(each, each.prediction.step_s) for each in others]
    best = 1.1 / fastest.prediction.samples_per_s
    slow = Observed(fastest, 2 * fastest.prediction.step_s)
    found = proposer.next(Pruner(None), set(proposer.scores.by_key), best, StepTimeModel([*observed, slow]))
    assert found is not None
    assert found.scored.key == fastest.key
    twice = StepTimeModel([*observed, slow, slow])
    found = proposer.next(Pruner(None), set(proposer.scores.by_key), best, twice)
    assert found is None or found.scored.key != fastest.key


def test_proposer_takes_the_equal_of_the_best_before_what_is_expected_to_be_slower(
    proposer: Proposer,
) -> None:
    """Settings that are predicted alike differ on the clock."""
    refined = [
        proposer.scorer.refined(each)
        for each in proposer.scores.by_key.values()
        if kinds(each.choice) == {("offload.states", "optimizer_cpu")}
    ]
    ran, other, slower = refined[:3]
    equal = replace(other, prediction=ran.prediction)
    slow = replace(
        ran.prediction,
        step_s=1.02 * ran.prediction.step_s,
        samples_per_s=ran.prediction.samples_per_s / 1.02,
    )
    scores = {ran.key: ran, equal.key: equal, slower.key: replace(slower, prediction=slow)}
    small = replace(proposer, scores=replace(proposer.scores, by_key=scores))
    best = 1 / ran.prediction.samples_per_s
    model = StepTimeModel([Observed(ran, ran.prediction.step_s)])
    found = small.next(Pruner(None), {ran.key}, best, model)
    assert found is not None
    assert found.scored.key == equal.key
    left = small.next(Pruner(None), {ran.key, equal.key}, best, model)
    assert left is not None


def test_proposer_stops_when_nothing_may_improve(proposer: Proposer) -> None:
    ran = proposer.scorer.refined(by_time(proposer)[0])
    observed = [Observed(ran, ran.prediction.step_s)] * 4
    assert proposer.next(Pruner(None), {ran.key}, 1e-6 / 4, StepTimeModel(observed)) is None


def test_proposer_reorders_after_simulation_by_events(proposer: Proposer) -> None:
    """A coarse candidate is simulated op by op before it is run, and then compared with the others."""
    far = [each for each in proposer.scores.by_key.values() if each.prediction.level == "events"]
    tried = {each.key for each in far}
    found = proposer.next(Pruner(None), tried, None, StepTimeModel())
    if found is None:
        pytest.skip("all of this space was simulated op by op")
    assert found.scored.prediction.level == "events"
    assert proposer.scores.by_key[found.scored.key] is found.scored


@pytest.mark.parametrize("closer", [0, 2])
def test_proposer_skips_candidates_pruned_by_events(
    proposer: Proposer, monkeypatch: pytest.MonkeyPatch, closer: int
) -> None:
    """However many have been looked at: what fits by the coarse level alone does not fit."""

    class NothingFits(Pruner):
        def reason(self, prediction: Prediction) -> str | None:
            return "over the budget" if prediction.level == "events" else None

    monkeypatch.setattr(proposals, "_MOST_REFINED", closer)
    assert any(each.prediction.level == "coarse" for each in proposer.scores.by_key.values())
    assert proposer.next(NothingFits(None), set(), None, StepTimeModel()) is None


def test_proposer_corrects_coarse_predictions_by_refined_ones(proposer: Proposer) -> None:
    """Trials made every refined prediction twice as long; coarse ones do not know of these trials."""
    known = proposer.scores.by_key
    for key, each in known.items():
        if each.prediction.level == "events":
            slower = replace(each.prediction, step_s=2 * each.coarse_s)
            known[key] = replace(each, prediction=slower)
    coarse = [each for each in known.values() if each.prediction.level == "coarse"]
    assert coarse
    mean, sd = proposer._refinement(coarse)
    assert np.median(mean) == pytest.approx(math.log(2), rel=0.05)
    assert (sd > 0).all()
    refined = [each for each in known.values() if each.prediction.level == "events"]
    assert not proposer._refinement(refined)[0].any()
