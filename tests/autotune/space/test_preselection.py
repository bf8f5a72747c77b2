"""Settings of techniques by budget that cannot be chosen are not solved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.search.prepared_search import rewriter

from memtune.autotune.predict import Prediction
from memtune.autotune.space import preselection, scoring
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.preselection import Preselection
from memtune.autotune.space.scoring import Scorer, Scores, score_all
from memtune.autotune.space.search_space import build_space
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution

BUDGET = 4 * 2**20


def sharded(**knobs: object) -> Choice:
    states = find("sharding.states", "fsdp").model_validate({"kind": "fsdp", **knobs})
    planned = find("recompute", "planned")(kind="planned")
    return Choice.of(Execution(micro_batch=2), {"recompute": planned, "sharding.states": states})


def test_preselection_solves_the_front_of_time_and_memory_within_a_group() -> None:
    plain = Scorer(rewriter()).score(Choice.of(Execution(micro_batch=2), {}))
    assert isinstance(plain, scoring.Scored)
    rules = Preselection(1, for_speed=False, optional_slots=["recompute"])
    times = {
        sharded(reshard_after_forward=False): (1.0, 3),
        sharded(): (2.0, 2),
        sharded(prefetch=2): (2.0, 3),
    }
    fast, small, slow = asked = [each for each in map(rules.budgeted, times) if each is not None]
    for each, (step_s, peak_bytes) in zip(asked, times.values(), strict=True):
        rules.add(each.without, prediction(plain.prediction, step_s, peak_bytes))
    rules.request(asked)
    assert rules.worth_solving(asked) == [fast.choice, small.choice]
    rules.solved(small)  # without a prediction: it was refused
    assert rules.worth_solving(asked) == [fast.choice]
    rules.solved(fast)
    assert rules.worth_solving(asked) == [slow.choice]


@pytest.mark.parametrize(
    ("budget_bytes", "for_speed", "n_solved"),
    [(9, False, 0), (7, True, 0), (7, False, 1)],  # it fits; it is slower than the best; neither
)
def test_preselection_solves_what_does_not_fit_and_is_not_slow(
    budget_bytes: int, for_speed: bool, n_solved: int
) -> None:
    plain = Scorer(rewriter()).score(Choice.of(Execution(micro_batch=2), {}))
    assert isinstance(plain, scoring.Scored)
    rules = Preselection(budget_bytes, for_speed=for_speed, optional_slots=["recompute"])
    asked = rules.budgeted(sharded())
    assert asked is not None
    faster = replace(plain.prediction, samples_per_s=1.2, peak_allocated_bytes=1)
    rules.add(Choice.of(Execution(micro_batch=1), {}), faster)
    rules.add(asked.without, replace(plain.prediction, samples_per_s=1.0, peak_allocated_bytes=8))
    rules.request([asked])
    assert len(rules.worth_solving([asked])) == n_solved


def test_preselection_leaves_choices_that_cannot_do_without() -> None:
    needs_one = Preselection(None, for_speed=True, optional_slots=[])
    assert needs_one.budgeted(sharded()) is None
    rules = Preselection(None, for_speed=True, optional_slots=["recompute"])
    assert rules.budgeted(Choice.of(Execution(micro_batch=2), {})) is None


def test_scores_without_dominated_settings_have_the_same_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores() -> Scores:
        made = rewriter(ranks=2, budget_bytes=BUDGET)
        return score_all(
            build_space(made, 4, axes=("recompute", "sharding.states")), Scorer(made), "throughput"
        )

    def best_by_kind(found: Scores) -> dict[str, tuple[float, int]]:
        fitting = [each for each in found.by_key.values() if each.prediction.peak_allocated_bytes <= BUDGET]
        best: dict[str, tuple[float, int]] = {}
        for each in sorted(fitting, key=lambda one: one.rank_among_levels("throughput")):
            best.setdefault(each.choice.technique("recompute").kind, each.rank_among_levels("throughput")[:1])
        return best

    some = scores()
    monkeypatch.setattr(preselection.Preselection, "budgeted", lambda self, choice: None)
    every = scores()
    assert some.n_candidates < every.n_candidates
    assert best_by_kind(some) == best_by_kind(every)


def prediction(like: Prediction, step_s: float, peak_bytes: int) -> Prediction:
    return replace(like, step_s=step_s, peak_allocated_bytes=peak_bytes)
