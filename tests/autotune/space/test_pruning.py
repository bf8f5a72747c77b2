from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given, strategies as st
from support.search.prepared_search import rewriter

from memtune.autotune.predict import ParallelMap
from memtune.autotune.predict.calibration import Calibration
from memtune.autotune.space import preselection, scoring
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.scoring import Goal, Scored, Scorer, Scores, score_all
from memtune.autotune.space.search_space import Space, build_space

AXES = ("execution", "offload")


@cache
def scores(budget: int | None = None) -> Scores:
    made = rewriter(budget_bytes=budget)
    return score_all(build_space(made, 8, axes=AXES), Scorer(made), "throughput")


def some() -> list[Scored]:
    return list(scores().by_key.values())


@given(st.integers(1, 2**24))
def test_pruner_prunes_if_lower_bound_exceeds_budget(budget: int):
    pruner = Pruner(budget)
    for each in some():
        low = pruner.peak_low_bytes(each.prediction)
        assert low <= each.prediction.peak_allocated_bytes
        assert (pruner.reason(each.prediction) is not None) == (low > budget)


def test_pruner_prunes_nothing_without_budget():
    assert all(Pruner(None).reason(each.prediction) is None for each in some())


def test_pruner_reason_gives_need_prediction_and_budget():
    prediction = some()[0].prediction
    text = Pruner(2**20).reason(prediction)
    assert text is not None
    assert "at least" in text
    assert "1.00 MiB" in text
    assert prediction.peak_op in text


@given(st.integers(2**20, 2**24))
def test_borderline_is_pruned_candidate_closest_to_budget(budget: int):
    pruner = Pruner(budget)
    lows = sorted(low for each in some() if (low := pruner.peak_low_bytes(each.prediction)) > budget)
    found = pruner.borderline(some())
    assert (found is None) == (not lows)
    if found is not None:
        assert pruner.peak_low_bytes(found.prediction) == lows[0]


@given(st.floats(0.3, 0.84))
def test_audit_that_fits_widens_interval_of_similar_candidates(ratio: float):
    prediction = some()[0].prediction
    budget = round(prediction.peak_allocated_bytes * ratio)
    pruner = Pruner(budget)
    assert pruner.reason(prediction) is not None
    after = pruner.after_audit(prediction, budget)
    assert after.reason(prediction) is None
    assert after.peak_low_bytes(prediction) <= budget


def test_pruner_interval_narrows_with_trials():
    prediction = some()[0].prediction
    calibration = Calibration()
    for _ in range(5):
        calibration = calibration.add(prediction, prediction.peak_allocated_bytes, 1.0)
    assert Pruner(1).calibrated(calibration).peak_low_bytes(prediction) > Pruner(1).peak_low_bytes(prediction)


def test_scores_merge_equal_candidates_keeping_simpler():
    made = rewriter()
    space = build_space(made, 8, axes=("execution", "recompute"))
    every_block = tuple(
        each.model_copy(update={"n": 1}) if each.kind == "every_nth" else each
        for each in space.slots["recompute"]
    )
    doubled = replace(space, slots={**space.slots, "recompute": every_block[::-1]})
    found = score_all(doubled, Scorer(made), "throughput")
    kinds = {each.choice.technique("recompute").kind for each in found.by_key.values()}
    assert found.n_merged > 0
    assert {"none", "full", "selective"} <= kinds
    assert "every_nth" not in kinds  # with n = 1 it is `full`, which has no knob
    assert len(found.by_key) + found.n_merged + found.n_unfit == found.n_candidates


def test_scores_are_equal_on_several_cores(monkeypatch: pytest.MonkeyPatch):
    found = {}
    for cores in (1, 2):
        monkeypatch.setattr(scoring, "usable_cores", lambda count=cores: count)
        monkeypatch.setattr(scoring, "ParallelMap", partial(ParallelMap, worth_s=0.0))
        made = rewriter(budget_bytes=6 * 2**20)
        found[cores] = score_all(build_space(made, 8, axes=AXES), Scorer(made), "throughput")
    assert found[1].by_key == found[2].by_key
    assert (found[1].unfit, found[1].n_merged) == (found[2].unfit, found[2].n_merged)


def test_scoring_skips_larger_micro_batches_only_where_none_fits(monkeypatch: pytest.MonkeyPatch):
    budget = 2 * 2**20
    made = rewriter(budget_bytes=budget)
    space = build_space(made, 16, axes=AXES)

    def fitting(found: Scores) -> dict[str, Scored]:
        return {
            key: each for key, each in found.by_key.items() if each.prediction.peak_allocated_bytes <= budget
        }

    some = score_all(space, Scorer(made), "throughput")
    monkeypatch.setattr(preselection, "_SURELY_OVER", math.inf)
    every = score_all(space, Scorer(made), "throughput")
    assert fitting(some) == fitting(every) != {}
    assert some.n_candidates < every.n_candidates


@pytest.mark.parametrize(("micro_batch", "refused"), [("1", True), ("2", False)])
def test_layer_major_order_of_many_micro_batches_is_refused_with_a_reason(micro_batch: str, refused: bool):
    made = rewriter("tied", budget_bytes=2**26)
    frozen = {"offload.states": "harmony", "micro_batch": micro_batch}
    space = build_space(made, 64, axes=("recompute",), freeze=frozen)
    found = score_all(space, Scorer(made), "throughput")
    assert (found.by_key == {}) == refused
    assert any("up to 32 micro-batches" in reason for reason in found.unfit) == refused
    assert len(found.by_key) + found.n_merged + found.n_unfit == found.n_candidates


@pytest.mark.parametrize(("mib", "size"), [(1, 2), (4, 8), (100, 64)])
def test_pairs_are_compared_where_activations_leave_room(mib: int, size: int):
    made = rewriter(budget_bytes=mib * 2**20)
    space = build_space(made, 64, axes=("execution", "recompute"))
    execution = scoring._execution_for_pairs(space, Scorer(made))
    assert execution.micro_batch == size
    drawn = space.sample(1, 0, execution)
    assert [
        each for each in drawn if each.execution == execution and each.technique("recompute").kind == "full"
    ]


def best(found: Scores, goal: Goal) -> tuple[float, int]:
    """Return seconds and peak of the best candidate within 6 MiB."""
    fitting = [each for each in found.by_key.values() if each.prediction.peak_allocated_bytes <= 6 * 2**20]
    first = min(fitting, key=lambda each: each.rank(goal)).prediction
    return first.step_s, first.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["throughput", "memory"])
def test_sample_and_neighbours_contain_best_candidate(goal: Goal, monkeypatch: pytest.MonkeyPatch):
    made = rewriter(budget_bytes=6 * 2**20)
    space = build_space(made, 8, axes=("execution", "recompute", "offload"))

    whole = score_all(space, Scorer(made), goal)
    monkeypatch.setattr(scoring, "ENUMERATE_UP_TO", 0)
    monkeypatch.setattr(scoring, "SAMPLE", 1)
    some = score_all(space, Scorer(made), goal)
    assert some.n_candidates < whole.n_candidates
    assert best(some, goal) == best(whole, goal)


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["throughput", "memory"])
def test_scoring_finds_best_with_fewer_neighbours(goal: Goal, monkeypatch: pytest.MonkeyPatch):
    """Than where whatever is the best of its kind is looked around, each time that it has become better."""
    made = rewriter(budget_bytes=6 * 2**20)
    space = build_space(made, 8, axes=("recompute", "offload"))
    seeds: list[Choice] = []

    def around(self: Space, choices: Sequence[Choice]) -> list[Choice]:
        seeds.extend(choices)
        return real(self, choices)

    whole, real = score_all(space, Scorer(made), goal), Space.around
    monkeypatch.setattr(scoring, "ENUMERATE_UP_TO", 0)
    monkeypatch.setattr(scoring, "SAMPLE", 1)
    monkeypatch.setattr(Space, "around", around)
    some, n_seeds = score_all(space, Scorer(made), goal), len(seeds)
    seeds.clear()
    monkeypatch.setattr(scoring, "_EXPLORE_AGAIN", 0.0)
    monkeypatch.setattr(scoring, "_SLOWER", math.inf)
    often = score_all(space, Scorer(made), goal)
    assert best(some, goal) == best(often, goal) == best(whole, goal)
    assert n_seeds < len(seeds)
    assert some.n_candidates <= often.n_candidates <= whole.n_candidates


def test_scoring_simulates_best_fitting_by_events():
    budget = 2**23
    found = scores(budget)
    fitting = [each for each in found.by_key.values() if each.prediction.peak_allocated_bytes <= budget]
    best = sorted(fitting, key=lambda each: each.rank("throughput"))[:20]
    assert all(each.prediction.level == "events" for each in best)
