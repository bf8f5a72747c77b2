"""The order in which candidates are proposed, on a real space that the simulator has scored."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.search.prepared_search import AXES, rewriter

from memtune.autotune.predict.simulation import Prediction
from memtune.autotune.space import proposals
from memtune.autotune.space.proposals import Proposer
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.sampler import Sampler
from memtune.autotune.space.scoring import Scorer, Scores, score_all
from memtune.autotune.space.search_space import Space, build_space
from memtune.autotune.space.technique_effects import Effects, kinds


@cache
def scored() -> tuple[Space, Scorer, Scores]:
    made = rewriter()
    space, scorer = build_space(made, 8, axes=AXES), Scorer(made)
    return space, scorer, score_all(space, scorer, "throughput")


@pytest.fixture
def proposer(tmp_path: Path) -> Proposer:
    space, scorer, scores = scored()
    mine = replace(scores, by_key=dict(scores.by_key))
    return Proposer(mine, scorer, Sampler(tmp_path / "study.db", space, 0), "throughput", lambda *_: None)


def test_proposer_proposes_fastest_first(proposer: Proposer) -> None:
    first = proposer.next(Pruner(None), set(), None, Effects())
    assert first is not None
    known = proposer.scores.by_key.values()
    assert first.scored.prediction.level == "events"
    assert first.scored.rank("throughput") == min(each.rank("throughput") for each in known)


def test_proposer_delays_techniques_that_trials_showed_slow(proposer: Proposer) -> None:
    """The techniques of what would come next turn out to be four times as slow, so something else comes."""
    naive = proposer.next(Pruner(None), set(), None, Effects())
    assert naive is not None
    slow = Effects(dict.fromkeys(kinds(naive.scored.choice), 4.0))
    found = proposer.next(Pruner(None), set(), None, slow)
    assert found is not None
    assert slow.of(found.scored.choice) < slow.of(naive.scored.choice)


def test_proposer_reorders_after_simulation_by_events(proposer: Proposer) -> None:
    """A coarse candidate is simulated op by op before it is run, and then compared with the others."""
    far = [each for each in proposer.scores.by_key.values() if each.prediction.level == "events"]
    tried = {each.key for each in far}
    found = proposer.next(Pruner(None), tried, None, Effects())
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
    assert proposer.next(NothingFits(None), set(), None, Effects()) is None
