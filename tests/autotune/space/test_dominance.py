"""Settings of techniques by budget that another one dominates are not solved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.search.prepared_search import rewriter

from memtune.autotune.predict import Prediction
from memtune.autotune.space import scoring
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.dominance import Dominance
from memtune.autotune.space.scoring import Scorer, Scores, score_all
from memtune.autotune.space.search_space import build_space
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution

BUDGET = 4 * 2**20


def sharded(**knobs: object) -> Choice:
    states = find("sharding.states", "fsdp").model_validate({"kind": "fsdp", **knobs})
    planned = find("recompute", "planned")(kind="planned")
    return Choice.of(Execution(micro_batch=2), {"recompute": planned, "sharding.states": states})


def test_dominance_keeps_the_front_of_time_and_memory_within_a_group() -> None:
    plain = Scorer(rewriter()).score(Choice.of(Execution(micro_batch=2), {}))
    assert isinstance(plain, scoring.Scored)
    dominance = Dominance(["recompute"])

    def add(choice: Choice, step_s: float, peak_bytes: int) -> None:
        asked = dominance.budgeted(choice)
        assert asked is not None
        dominance.add(asked, prediction(plain.prediction, step_s, peak_bytes))

    fast, small, slow = sharded(reshard_after_forward=False), sharded(), sharded(prefetch=2)
    add(fast, 1.0, 3)
    add(small, 2.0, 2)
    add(slow, 2.0, 3)
    asked = [each for each in map(dominance.budgeted, (fast, small, slow)) if each is not None]
    assert dominance.undominated(asked) == {fast, small}
    dominance.refuse(asked[1])
    assert dominance.undominated(asked) == {fast}
    dominance.refuse(asked[0])
    assert dominance.undominated(asked) == {slow}


def test_dominance_leaves_choices_that_cannot_do_without() -> None:
    assert Dominance([]).budgeted(sharded()) is None
    assert Dominance(["recompute"]).budgeted(Choice.of(Execution(micro_batch=2), {})) is None


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
    monkeypatch.setattr(scoring, "Dominance", lambda optional: Dominance([]))
    every = scores()
    assert some.n_candidates < every.n_candidates
    assert best_by_kind(some) == best_by_kind(every)


def prediction(like: Prediction, step_s: float, peak_bytes: int) -> Prediction:
    return replace(like, step_s=step_s, peak_allocated_bytes=peak_bytes)
