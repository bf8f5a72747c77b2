"""Trials side by side on a simulated cluster: all of it is busy, and the result is the sequential one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.search import studies_in_memory
from support.search.prepared_search import prepared, truth
from support.search.search_runs import asked, of, run
from support.search.simulated_executor import SimulatedExecutor

from memtune.autotune.search import search_events, study
from memtune.autotune.search.control import Control
from memtune.autotune.search.outcome import SearchOutcome
from memtune.autotune.space import proposals
from memtune.autotune.space.candidates import Choice
from memtune.executors.base import Progress, Trial, TrialResult
from memtune.executors.ray.cluster import bundles, side_by_side

NODES = [8] * 8
RANKS = 8
TRIALS = 20
AXES = ("recompute", "offload.activations")
COUNTED = ("baseline", "search", "audit")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "prepare", prepared)
    studies_in_memory.install(monkeypatch)


class Cluster(SimulatedExecutor):
    """Notes the trials in flight whenever the search waits, and when they end."""

    def __init__(self, predict: Callable[[Trial], TrialResult], slots: int) -> None:
        super().__init__(predict, slots=slots)
        self.in_flight: list[list[Trial]] = []
        self.ends_s: dict[int, float] = {}

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        self.in_flight.append([each.trial for each in self._todo])
        for event in super().wait(timeout_s):
            if isinstance(event, TrialResult):
                self.ends_s[event.number] = self.clock_s
            yield event


def explored_s(outcome: SearchOutcome, cluster: Cluster) -> float:
    """Return when the last candidate ended."""
    return max(cluster.ends_s[each["number"]] for each in outcome.trials if each["role"] in COUNTED)


def slow_offload(trial: Trial) -> TrialResult:
    """Take 1.5 times as long as predicted with an offload technique; minutes of wall time, each different."""
    choice = Choice.from_document(trial.config["settings"])
    factor = 1.5 if any(each.slot.startswith("offload") for each in choice.techniques) else 1.0
    found = truth(asked(axes=AXES, trials=TRIALS), peak=0.0, step=0.0, noise=0.002)(trial)
    times = {
        "step_s_all": [factor * each for each in found.step_s_all],
        "wall_s": 60.0 + 7 * trial.number % 40,
    }
    if found.step_s is not None:
        times["step_s"] = factor * found.step_s
    return found.model_copy(update=times)


Searches = tuple[tuple[SearchOutcome, Cluster], tuple[SearchOutcome, Cluster]]


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Searches:
    """Return the search with one trial at a time, and with eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("searches"))
        patch.setattr(study, "prepare", prepared)
        studies_in_memory.install(patch)
        # Neither search ends before its trials are used up, or the cluster would rightly run empty.
        patch.setattr(proposals, "_WORTHWHILE", 0.0)
        return searched(1), searched(side_by_side(RANKS, NODES))


def searched(slots: int) -> tuple[SearchOutcome, Cluster]:
    cluster = Cluster(slow_offload, slots)
    options = asked(axes=AXES, trials=TRIALS, study=f"s{slots}", out=Path(f"tuned-{slots}.yaml"))
    return study.search(options, executor=cluster), cluster


def test_search_on_64_gpus_keeps_8_trials_of_8_running_and_finds_what_one_at_a_time_finds(searches: Searches):
    (one, alone), (many, cluster) = searches
    slots = cluster.slots
    assert slots == 8
    assert many.measured["step_s"] == pytest.approx(one.measured["step_s"], rel=0.01)
    counted = sum(each["role"] in COUNTED for each in many.trials)
    assert counted <= TRIALS
    numbers = [each["number"] for each in many.trials]
    assert len(set(numbers)) == len(numbers)
    # As long as trials are left to start, the cluster is full.
    full = counted - slots
    assert [len(each) for each in cluster.in_flight[:full]] == [slots] * full
    assert explored_s(many, cluster) < explored_s(one, alone) / 2


def test_finalists_of_a_parallel_search_run_alone_in_alternation(searches: Searches):
    _, (many, cluster) = searches
    finals = [each for each in many.trials if each["role"] in ("repeat", "confirm")]
    by_number = {each.number: each for running in cluster.in_flight for each in running}
    assert len(finals) > 2
    for each in finals:
        assert by_number[each["number"]].alone
        together = [running for running in cluster.in_flight if by_number[each["number"]] in running]
        assert [len(running) for running in together] == [1]
    assert not any(each.alone for running in cluster.in_flight if len(running) > 1 for each in running)


def test_interrupted_parallel_search_resumes_with_every_trial_once():
    options, control, ran = asked(axes=AXES, trials=12), Control(), list[int]()
    honest = truth(options)

    def interrupting(trial: Trial) -> TrialResult:
        ran.append(trial.number)
        if len(ran) == 7:
            control.interrupt()
        return honest(trial)

    run(options, interrupting, control, slots=4)
    cancelled = {each.number for each in of(search_events.TrialCancelled)}
    assert cancelled
    outcome = run(asked(axes=AXES, trials=12, resume=True), slots=4)
    assert outcome.status == "done"
    started = [each.number for each in of(search_events.TrialStarted)]
    assert len(set(started)) == len(started)
    finished = [each.number for each in of(search_events.TrialFinished)]
    assert sorted([*finished, *cancelled]) == sorted(started)
    counted = [each["summary"] for each in outcome.trials if each["role"] in COUNTED]
    assert 7 < len(counted) == len(set(counted)) <= 12


def test_candidates_that_end_before_the_baseline_are_compared_with_its_losses():
    options = asked(axes=AXES, trials=6)
    honest = truth(options)

    def wrong_and_fast(trial: Trial) -> TrialResult:
        found = honest(trial)
        if trial.number == 1:
            return found.model_copy(update={"losses": [3.0] * len(found.losses), "wall_s": 0.1})
        return found

    outcome = run(options, wrong_and_fast, slots=6)
    by_number = {each["number"]: each for each in outcome.trials}
    assert by_number[1]["status"] == "unfit"
    assert of(search_events.TrialFinished)[0].role == "baseline"


def test_bundles_fill_nodes_and_never_split_a_trial_that_fits_one():
    assert bundles(8, NODES) == [8]
    assert bundles(16, NODES) == [8, 8]
    assert bundles(12, NODES) == [8, 4]
    assert bundles(4, [8, 4]) == [4]
    assert bundles(8, [4, 4, 2]) == [4, 4]
    assert bundles(6, [3, 3, 2]) == [3, 3]
    assert bundles(9, [4, 4]) == []
    assert side_by_side(16, NODES) == 4
    assert side_by_side(12, NODES) == 5
    assert side_by_side(3, [8, 8]) == 4
