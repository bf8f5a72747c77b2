from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.search import studies_in_memory
from support.search.prepared_search import prepared, truth
from support.search.search_runs import BUDGET, asked, log, of, run

from memtune.autotune.record.fake_divergence import _SAME_COUNTS
from memtune.autotune.search import preparation, search_events, study
from memtune.autotune.search.control import Control
from memtune.autotune.search.outcome import SearchOutcome, nothing_fits
from memtune.autotune.search.study_store import StudyFolder
from memtune.autotune.space.candidates import Choice
from memtune.config.tuned_config import load_config
from memtune.errors import MemtuneError, NothingFits, UsageError
from memtune.executors.base import Trial, TrialResult
from memtune.search_spaces.execution import Execution
from memtune.technique import Reason


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "prepare", prepared)
    studies_in_memory.install(monkeypatch)


@pytest.fixture(scope="module")
def plain_search(tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchOutcome, Path]:
    """A search without further options: its outcome and its folder."""
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(study, "prepare", prepared)
        return run(asked()), folder


def test_search_measures_audits_confirms_and_writes_config(plain_search: tuple[SearchOutcome, Path]):
    outcome, folder = plain_search
    assert outcome.status == "done"
    assert outcome.exit_code == 0
    roles = [each["role"] for each in outcome.trials]
    assert roles[0] == "baseline"
    assert roles.count("audit") == 1
    assert roles.count("confirm") == 1
    assert roles[-1] == "confirm"
    assert sum(role in ("baseline", "search", "audit") for role in roles) == 8
    written = load_config(folder / "tuned.yaml")
    assert written.document() == outcome.config
    assert outcome.tuned is not None
    assert outcome.tuned.settings == written.settings
    certificate = written.certificate
    assert certificate["fits"] is True
    assert certificate["confirmed_in_fresh_process"] is True
    assert certificate["confirmed_peak_bytes"] <= BUDGET
    assert set(certificate["moments"]) == {"first_step", "steady_step", "resume", "evaluation", "checkpoint"}
    assert certificate["moments"]["steady_step"]["peak_bytes"] == written.predicted["peak_bytes"]
    assert written.predicted["ablation"]["all_settings"]["peak_bytes"] == written.predicted["peak_bytes"]
    assert SearchOutcome.from_dict(outcome.to_dict()) == outcome


BUDGETS = (5, 7, 6, 8, 9, 64)
"""MiB by seed; the two that are drawn are those of other tests here, whose programs are made already."""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(6))
def test_search_winner_fits_and_is_no_worse_than_baselines(seed: int):
    options = asked(seed=seed, budget_bytes=BUDGETS[seed] * 2**20)
    outcome = run(options, truth(options, peak=0.1, step=1.0))
    assert outcome.measured is not None
    assert outcome.measured["peak_bytes"] <= (options.budget_bytes or 0)
    fitting = [each for each in outcome.trials if each["status"] == "ok"]
    baselines = [each for each in fitting if each["role"] == "baseline"]
    worst_noise = 1.03
    assert all(outcome.measured["step_s"] <= each["step_s"] * worst_noise for each in baselines)
    searched = Counter(
        each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")
    )
    assert max(searched.values()) <= 2  # a doubtful trial is repeated once


def test_search_with_concurrent_trials_keeps_limit():
    outcome = run(asked(parallel=3), slots=3)
    assert sum(each["role"] in ("baseline", "search", "audit") for each in outcome.trials) == 8


def test_search_log_contains_all_events(
    plain_search: tuple[SearchOutcome, Path], monkeypatch: pytest.MonkeyPatch
):
    outcome, folder = plain_search
    monkeypatch.chdir(folder)
    assert len(of(search_events.TrialFinished)) == len(outcome.trials)
    assert [each.status for each in of(search_events.SearchFinished)] == ["done"]
    assert of(search_events.SearchFinished)[0].best_number == next(
        each["number"]
        for each in outcome.trials
        if each["settings"] == outcome.config["settings"]  # type: ignore[index]
    )
    rates = {
        name: each["samples_per_s"]
        for name, each in outcome.config["measured"]["baselines"].items()  # type: ignore[index]
        if "samples_per_s" in each
    }
    assert of(search_events.SearchFinished)[0].baselines == pytest.approx(rates)
    assert rates
    assert of(search_events.CandidatesScored)[0].n_candidates > 50
    assert of(search_events.Calibrated)[-1].n_trials > 3


def test_search_writes_plain_setting_if_best():
    options = asked(budget_bytes=64 * 2**20)
    honest = truth(options, noise=0.0, step=0.0)

    def plain_is_fast(trial: Trial) -> TrialResult:
        result = honest(trial)
        is_plain = trial.config["settings"] == {"execution": {"micro_batch": 8}}
        step_s = 1.0 if is_plain else 2.0
        return result.model_copy(
            update={"step_s_all": [step_s] * 3, "step_s": step_s, "samples_per_s": 8 / step_s}
        )

    outcome = run(options, plain_is_fast)
    assert "your own setting" in outcome.message
    assert load_config("tuned.yaml").settings.techniques == ()


def test_search_without_fit_reports_closest_and_remedies():
    options = asked(budget_bytes=2 * 2**20, axes=("execution", "recompute"))
    with pytest.raises(NothingFits) as caught:
        run(options, truth(options, peak=0.0))
    message = str(caught.value)
    assert "MT301" in message
    assert "short by" in message
    assert "--freeze offload.states=" in message  # a way out that the simulator has tried
    assert "--max-memory" in message
    assert of(search_events.SearchFinished)[0].status == "nothing_fits"
    assert not Path("tuned.yaml").exists()


def test_nothing_fits_tells_settings_that_failed_again_from_those_that_never_ran() -> None:
    def message(*statuses: str) -> str:
        finished = [
            SimpleNamespace(result=SimpleNamespace(status=each, reason=f"reason of {each}"))
            for each in statuses
        ]
        driver: Any = SimpleNamespace(setup=SimpleNamespace(budget_bytes=1, hardware=None), finished=finished)
        return str(nothing_fits(driver))

    assert "No setting ran: 2 trials, none of them finished." in message("crash", "crash")
    again = message("ok", "crash")
    assert "1 of 2 trials finished, but their settings failed when they were run again" in again
    assert "reason of ok" not in again


def test_search_refuses_budget_below_weights_before_trials():
    def never(trial: Trial) -> TrialResult:
        raise AssertionError("a trial was run")

    with pytest.raises(NothingFits, match="the weights alone need") as caught:
        run(asked(budget_bytes=100_000), never)
    assert "234,880 parameters" in caught.value.evidence


def test_search_below_weights_tries_settings_that_start_off_the_device():
    options = asked(budget_bytes=900_000, axes=("offload.states", "recompute"))
    with pytest.raises(NothingFits, match="ran out of memory needs about") as caught:
        run(options, truth(options, peak=0.0))
    assert "offload.states=l2l" in caught.value.evidence  # whose weights fit, and whose activations do not


def test_search_without_fit_gives_the_trials_reason_where_the_prediction_was_wrong():
    def too_large(trial: Trial) -> TrialResult:
        return TrialResult(number=trial.number, status="oom", reason="out of memory in aten::empty")

    with pytest.raises(NothingFits) as caught:
        run(asked(), too_large)
    assert "short by" not in str(caught.value)
    assert "was predicted to need" in caught.value.evidence
    assert "out of memory in aten::empty" in caught.value.evidence


def test_search_audit_that_fits_widens_interval():
    options = asked(trials=14)
    honest = truth(options, peak=0.0)

    def smaller(trial: Trial) -> TrialResult:
        needs = honest(trial.model_copy(update={"budget_bytes": None}))
        peak = round((needs.peak_allocated_bytes or 0) * 0.7)
        return needs.model_copy(update={"peak_allocated_bytes": peak, "peak_reserved_bytes": peak})

    # The interval narrows to what the first trials show; only the audited ones are far below it.
    seen: list[str] = []

    def first_honest(trial: Trial) -> TrialResult:
        seen.append(str(trial.number))
        result = honest(trial)
        return smaller(trial) if result.status == "oom" and len(seen) > 5 else result

    outcome = run(options, first_honest)
    notes = [each.text for each in of(search_events.Note)]
    assert any("interval was too narrow" in text for text in notes)
    assert any(each["role"] == "audit" and each["status"] == "ok" for each in outcome.trials)


def test_search_reports_audit_that_does_not_fit(
    plain_search: tuple[SearchOutcome, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(plain_search[1])
    assert any(each.text.startswith("audit: the pruned candidate") for each in of(search_events.Note))


def test_search_reserves_no_audit_without_pruning():
    options = asked(trials=3, budget_bytes=64 * 2**20)
    roles = [each["role"] for each in run(options, truth(options, step=1.0)).trials]
    assert len(roles) >= 3
    assert roles[0] == "baseline"
    assert "audit" not in roles


def test_short_search_spends_no_trial_on_audit():
    roles = [each["role"] for each in run(asked(trials=6)).trials]
    assert "audit" not in roles
    assert "search" in roles


def test_search_invalidates_trial_with_different_losses():
    options = asked(axes=("execution", "offload.activations"))
    honest = truth(options)

    def wrong(trial: Trial) -> TrialResult:
        result = honest(trial)
        if "activations" in trial.config["settings"].get("offload", {}) and result.status == "ok":
            return result.model_copy(
                update={"losses": [5.0, 3.0, 1.0], "step_s_all": [1e-6] * 3, "step_s": 1e-6}
            )
        return result

    outcome = run(options, wrong)
    bad = [each for each in outcome.trials if each["reason"].startswith("invalid")]
    assert bad
    assert all(each["status"] == "unfit" for each in bad)
    assert "activations" not in outcome.config["settings"].get("offload", {})  # type: ignore[index]


def test_search_reports_nan_loss():
    options = asked(axes=("execution",))
    honest = truth(options)

    def diverging(trial: Trial) -> TrialResult:
        result = honest(trial)
        return (
            result.model_copy(update={"losses": [5.0, math.nan, math.nan]})
            if result.status == "ok"
            else result
        )

    outcome = run(options, diverging)
    warned = [each.text for each in of(search_events.Note) if each.level == "warning"]
    assert any(each.startswith("the loss is nan from step 2 on with ") for each in warned)
    assert outcome.config is not None


@pytest.mark.parametrize(
    "failure",
    [
        {"status": "crash", "reason": "was ended by SIGSEGV at 0x{}"},
        pytest.param(
            {
                "status": "unfit",
                "reason": "MT309 it cannot be run a second time: tensor {}.",
                "code": "MT309",
                "raised_at": "memtune.x:1",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda each: each["status"],
)
def test_search_drops_technique_that_fails_twice(failure: dict[str, Any]):
    options = asked(trials=12, goal="memory", axes=("offload.activations", "recompute"))
    honest = truth(options, peak=0.0)

    def failing(trial: Trial) -> TrialResult:
        if "copy_out" in str(trial.config):
            # No two reasons are equal: each names what it met.
            reason = failure["reason"].format(trial.number)
            return TrialResult(number=trial.number, **{**failure, "reason": reason})
        return honest(trial)

    outcome = run(options, failing)
    failed = [each for each in of(search_events.TrialFinished) if each.result.status == failure["status"]]
    assert 2 <= len(failed) <= 4  # more than two only while no other trial told its techniques apart
    assert outcome.status == "done"
    assert outcome.config is not None


def test_search_shows_notes_that_ask_for_the_largest_batch(monkeypatch: pytest.MonkeyPatch):
    """Lengths of packed sequences vary where all batches have one shape, which no prediction can know."""
    record, texts = preparation.record, (_SAME_COUNTS, "the optimizer's step was recorded in full: why")
    monkeypatch.setattr(
        preparation, "record", lambda *given, **how: replace(record(*given, **how), notes=texts)
    )
    monkeypatch.setattr(study, "prepare", preparation.prepare)  # which keeps no recording of other tests
    run(asked(axes=("execution",), trials=1))
    levels = {each.text: each.level for each in of(search_events.Note)}
    assert [levels[each] for each in texts] == ["info", "detail"]


def test_search_warns_of_a_study_on_a_network_mount(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StudyFolder, "network", lambda self: "nfs4")
    run(asked(axes=("execution",), trials=1))
    warned = [each.text for each in of(search_events.Note) if each.level == "warning"]
    assert any("the study lies on nfs4" in each for each in warned)


def test_search_stops_after_same_crash_five_times():
    calls = []

    def crash(trial: Trial) -> TrialResult:
        calls.append(trial.number)
        return TrialResult(
            number=trial.number,
            status="crash",
            reason=f"RuntimeError: boom at 0x{trial.number}",
            log_tail="model.py:88",
        )

    with pytest.raises(UsageError) as caught:
        run(asked(trials=20), crash)
    assert caught.value.code == "MT302"
    assert "boom" in str(caught.value)
    assert len(calls) == 5


def test_search_replaces_winner_that_fails_confirmation():
    options = asked(repeats=0)
    honest = truth(options)
    done: dict[str, int] = {}

    def flaky(trial: Trial) -> TrialResult:
        key = str(trial.config["settings"])
        done[key] = done.get(key, 0) + 1
        first_confirmed = done[key] == 2 and sum(count == 2 for count in done.values()) == 1
        return (
            TrialResult(number=trial.number, status="oom", reason="fragmented")
            if first_confirmed
            else honest(trial)
        )

    outcome = run(options, flaky)
    confirms = [each for each in outcome.trials if each["role"] == "confirm"]
    assert [each["status"] for each in confirms] == ["oom", "ok"]
    assert outcome.config["settings"] == confirms[1]["settings"] != confirms[0]["settings"]  # type: ignore[index]


def test_search_ends_when_nothing_left_may_improve():
    """Predictions hold, so few trials are left to try, and one of them was the fastest that fits."""
    options = asked(axes=("recompute",), trials=50, repeats=0)
    outcome = run(options, truth(options, peak=0.0, step=0.0, noise=0.0))
    tried = [each for each in outcome.trials if each["role"] in ("baseline", "search")]
    assert 2 <= len(tried) < 20
    scorer = prepared(options).scorer
    fits = [
        each
        for each in prepared(options).score(0).by_key.values()
        if each.prediction.peak_allocated_bytes <= BUDGET
    ]
    fastest_s = min(scorer.score(each.choice).prediction.step_s for each in fits)
    assert min(each["step_s"] for each in tried if each["status"] == "ok") <= 1.02 * fastest_s


@pytest.mark.slow
def test_search_goal_memory_writes_lowest_measured_peak():
    outcome = run(asked(goal="memory"))
    assert outcome.measured is not None
    assert outcome.measured["peak_bytes"] == min(
        each["peak_allocated_bytes"] for each in outcome.trials if each["status"] == "ok"
    )


@pytest.mark.slow
def test_search_goal_batch_writes_largest_fitting_micro_batch():
    options = asked(goal="batch", trials=24)
    outcome = run(options, truth(options, peak=0.0))
    assert outcome.config is not None
    sizes = {
        each["status"] == "ok": each["settings"]["execution"]["micro_batch"]
        for each in sorted(outcome.trials, key=lambda each: each["settings"]["execution"]["micro_batch"])
        if each["status"] == "ok"
    }
    assert outcome.config["settings"]["execution"]["micro_batch"] == sizes[True] > 8
    made = prepared(options)
    winner = Choice.from_document(outcome.config["settings"])
    size = winner.execution.micro_batch or 0
    for larger in (size + max(1, size // 32), size + max(2, size // 16), 2 * size):
        scored = made.scorer.score(Choice(Execution(micro_batch=larger), winner.techniques))
        assert isinstance(scored, Reason) or scored.prediction.peak_allocated_bytes > BUDGET


def test_search_dry_run_writes_nothing():
    outcome = run(asked(dry_run=True))
    assert outcome.status == "dry_run"
    assert len(outcome.trials) == 8
    assert list(Path().iterdir()) == []


def test_search_without_name_creates_study_and_resume_takes_last():
    options = asked(study=None)
    assert study.study_folder(options).name == "gpt-1"
    Path(".memtune/gpt-7").mkdir(parents=True)
    assert study.study_folder(options).name == "gpt-8"
    assert study.study_folder(replace(options, resume=True)).name == "gpt-7"
    assert study.study_folder(replace(options, study="elsewhere/s")).path == Path("elsewhere/s")


def test_search_refuses_existing_output_before_trials():
    Path("tuned.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        run(asked())
    assert Path("tuned.yaml").read_text() == "mine"
    assert not Path(".memtune").exists()


def test_search_time_limit_reserves_confirmation():
    options = asked(time_s=0.0, trials=50)
    outcome = run(options)
    roles = [each["role"] for each in outcome.trials]
    assert roles[0] == "baseline"
    assert "search" not in roles
    assert roles[-1] == "confirm"


def test_search_pause_delays_trials():
    options, control = asked(), Control()
    honest = truth(options)
    paused_at: list[float] = []

    def pausing(trial: Trial) -> TrialResult:
        if trial.number == 2 and not paused_at:
            control.pause()
            paused_at.append(time.monotonic())
            threading.Timer(0.6, lambda: control.pause(False)).start()
        return honest(trial)

    outcome = run(options, pausing, control)
    kinds = [type(each) for each in log()]
    assert kinds.count(search_events.Paused) == kinds.count(search_events.Resumed) == 1
    between = kinds[kinds.index(search_events.Paused) : kinds.index(search_events.Resumed)]
    assert search_events.TrialStarted not in between
    assert outcome.status == "done"


def test_search_reports_drift_of_machine():
    options = asked(repeats=2)
    honest = truth(options, noise=0.001)
    outcome = run(options, lambda trial: slower(honest(trial), 1.0 + 0.02 * trial.number))
    assert outcome.status == "done"
    assert any(
        "the machine is busy" in each.text for each in of(search_events.Note) if each.level == "warning"
    )


def slower(result: TrialResult, factor: float) -> TrialResult:
    if result.step_s is None:
        return result
    return result.model_copy(
        update={"step_s": result.step_s * factor, "step_s_all": [each * factor for each in result.step_s_all]}
    )


@pytest.mark.slow
def test_search_runs_real_trials(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "prepare", preparation.prepare)
    options = asked(trials=3, repeats=0, axes=("recompute",))
    outcome = study.search(options)
    statuses = {each["name"]: each["status"] for each in outcome.trials if each["role"] == "baseline"}
    assert statuses == {"full recompute": "ok"}  # plain is predicted not to fit, so it does not run
    assert outcome.measured is not None
    assert outcome.measured["peak_bytes"] <= BUDGET
    certificate = load_config("tuned.yaml").certificate
    assert certificate["confirmed_in_fresh_process"]
    assert certificate["largest_relative_loss_difference"] < 1e-5
    numerics = certificate["numerics"]
    assert numerics["agrees"] is True, numerics
    assert numerics["reference_against_itself"] == "equal to the bit"
    assert numerics["reference"].startswith(
        "plain"
    )  # in smaller micro-batches, as the whole batch does not fit
    assert numerics.get("steps", 2) == 2


def test_search_raises_only_memtune_errors():
    with pytest.raises(MemtuneError):
        run(asked(trials=20), lambda trial: TrialResult(number=trial.number, status="timeout", reason="hung"))
