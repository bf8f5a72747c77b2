from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import zoo_paths
from support.search.prepared_search import prepared, truth
from support.search.search_runs import BUDGET, asked, of, run
from support.search.simulated_executor import SimulatedExecutor

from memtune.autotune.search import search_events, study
from memtune.autotune.search.control import Control
from memtune.autotune.search.search_events import read_events
from memtune.autotune.search.study_store import StudyFolder
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.sampler import Sampler
from memtune.config.tuned_config import load_config
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors.base import Trial, TrialResult
from memtune.ssd.offload_dir import VARIABLE


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "prepare", prepared)


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int | None], Path]]:
    """Return the folder of a search that was interrupted after so many trials, or ended (None)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "prepare", prepared)

        @cache
        def folder(after: int | None) -> Path:
            made, options, control = tmp_path_factory.mktemp("study"), asked(), Control()
            with contextlib.chdir(made):
                run(options, None if after is None else interrupting(truth(options), after, control), control)
            return made

        yield folder


@pytest.fixture
def ended(here: None, studies: Callable[[int | None], Path]) -> None:
    """A finished study in the current folder."""
    shutil.copytree(studies(None), ".", dirs_exist_ok=True)


@pytest.fixture
def interrupted(here: None, studies: Callable[[int | None], Path]) -> None:
    """A study in the current folder that was interrupted while its sixth trial ran."""
    shutil.copytree(studies(5), ".", dirs_exist_ok=True)


def interrupting(
    honest: Callable[[Trial], TrialResult], after: int, control: Control
) -> Callable[[Trial], TrialResult]:
    """Ctrl-C while a trial runs: the first, or the one `after` so many."""
    ran: list[int] = []  # not every number runs: those that cannot fit are struck out by number too

    def run(trial: Trial) -> TrialResult:
        ran.append(trial.number)
        if len(ran) == after + 1:
            control.interrupt()
        return honest(trial)

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_ends_in_order_and_any_other_at_once(number: signal.Signals):
    control = Control()
    with control.catch_signals(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)  # before the first trial
    assert control.exit_code == 128 + number
    control = Control()
    control.begin()
    with control.catch_signals():
        signal.raise_signal(number)
        assert control.stopping
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert control.exit_code == 128 + number


@pytest.mark.drawn(2)
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_ctrl_c_writes_best_so_far(after: int):
    options, control = asked(), Control()
    outcome = run(options, interrupting(truth(options), after, control), control)
    assert outcome.interrupted
    assert outcome.exit_code == 130
    assert Path("tuned.yaml").exists() == (outcome.config is not None)
    assert outcome.config is not None  # the first trial is a baseline that fits
    assert of(search_events.SearchFinished)[0].status == "interrupted"


def test_real_ctrl_c_ends_search_cleanly():
    options, ran = asked(), []
    honest = truth(options)

    def signalling(trial: Trial) -> TrialResult:
        ran.append(trial.number)
        if len(ran) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(trial)

    outcome = run(options, signalling)
    assert outcome.exit_code == 130
    assert Path("tuned.yaml").exists()


@pytest.mark.parametrize("after", [1, 4])
def test_second_ctrl_c_ends_at_once_and_leaves_a_study_to_resume(after: int):
    options, control, ran = asked(), Control(), list[int]()
    honest = truth(options)

    def signalling(trial: Trial) -> TrialResult:
        ran.append(trial.number)
        if len(ran) == after + 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return honest(trial)

    with control.catch_signals(), pytest.raises(KeyboardInterrupt):
        run(options, signalling, control)
    assert not Path("tuned.yaml").exists()
    told = [(each.number, each.result) for each in of(search_events.TrialFinished)]
    assert len(told) == after
    outcome = run(replace(options, resume=True))
    assert outcome.status == "done"
    assert [(each.number, each.result) for each in of(search_events.TrialFinished)][:after] == told
    counted = [each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")]
    assert len(counted) == len(set(counted)) == 8


def test_resume_continues_interrupted_search_to_same_result(interrupted: None):
    options = asked()
    told = [(each.number, each.result) for each in of(search_events.TrialFinished)]
    outcome = run(replace(options, resume=True))
    assert outcome.status == "done"
    finished = [(each.number, each.result) for each in of(search_events.TrialFinished)]
    assert finished[: len(told)] == told
    assert [number for number, _ in finished] == [each["number"] for each in outcome.trials]
    counted = [each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")]
    assert len(counted) == 8
    assert len(set(counted)) == 8


def test_resume_adds_results_missing_from_log(interrupted: None):
    options = asked()
    path = Path(".memtune/s/events.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"trial_finished"' in line[:40])
    path.write_bytes(
        b"".join(lines[:last]) + lines[last][:50]
    )  # torn, as a crash in the middle of the write leaves it
    outcome = run(replace(options, resume=True))
    assert sorted(each.number for each in of(search_events.TrialFinished)) == [
        each["number"] for each in outcome.trials
    ]


def test_resume_runs_no_suggestion_that_was_not_started(monkeypatch: pytest.MonkeyPatch):
    """Killed before it prunes a suggestion that is equal to a candidate that ran."""
    ask, ran = Sampler.ask, list[Choice]()

    def dying(sampler: Sampler, choice: Choice | None = None, **how: Any) -> tuple[int, Choice | None]:
        if choice is None:
            ask(sampler, ran[0])
            raise KeyboardInterrupt
        ran.append(choice)
        return ask(sampler, choice, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "ask", dying)
        with pytest.raises(KeyboardInterrupt):
            run(asked())
    outcome = run(asked(resume=True))
    counted = [each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")]
    assert counted.count(ran[0].summary) == 1
    assert len(counted) == 8


def test_resume_of_finished_study_prints_result(ended: None):
    written = load_config("tuned.yaml").document()

    def never(trial: Trial) -> TrialResult:
        raise AssertionError("a trial was run")

    for _ in range(3):
        Path("tuned.yaml").unlink()
        again = run(asked(resume=True), never)
        assert again.config == written
        assert load_config("tuned.yaml").document() == written


@pytest.mark.slow
def test_resume_of_finished_study_refuses_changed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, layers = tmp_path / "model.py", tmp_path / "layers.py"
    model.write_bytes(zoo_paths.ZOO["tied"].read_bytes())  # the least to record
    layers.write_text("WIDTH = 1\n")
    imports = {"layers.py": hashlib.sha256(layers.read_bytes()).hexdigest()}
    monkeypatch.setattr("memtune.workload.workload.Workload.imports", lambda self: imports)
    options = asked(workload=str(model), axes=("recompute",), trials=3)
    outcome = run(options)
    assert run(replace(options, resume=True)).config == outcome.config
    for changed, what in ((layers, "workload.imports.layers.py"), (model, "source_sha256")):
        before = changed.read_bytes()
        changed.write_text("WIDTH = 2\n")
        with pytest.raises(UsageError, match="made for another setup") as caught:
            run(replace(options, resume=True))
        assert what in caught.value.evidence
        changed.write_bytes(before)


@pytest.mark.parametrize("changed", [{"budget_bytes": 123 * 2**20}, {"goal": "memory"}], ids=str)
def test_resume_of_finished_study_refuses_changed_options(ended: None, changed: dict[str, Any]):
    with pytest.raises(UsageError, match="made for another setup") as caught:
        run(asked(resume=True, **changed))
    assert f"options.{next(iter(changed))}" in caught.value.evidence


def test_resume_overwrites_only_its_own_config(interrupted: None):
    options = asked()
    so_far = Path("tuned.yaml").read_text()
    Path("tuned.yaml").write_text(so_far + "# the author's own line\n")
    with pytest.raises(UsageError, match=r"tuned\.yaml exists") as caught:
        run(replace(options, resume=True))
    assert caught.value.evidence == "Study 's' did not write it as it is now."
    Path("tuned.yaml").write_text(so_far)
    assert run(replace(options, resume=True)).config == load_config("tuned.yaml").document()
    Path("tuned.yaml").write_text(so_far)  # of before the end, but the study's own
    assert run(replace(options, resume=True)).config == load_config("tuned.yaml").document()
    Path("tuned.yaml").write_text("settings: {}\n")
    with pytest.raises(UsageError, match=r"tuned\.yaml exists"):
        run(replace(options, resume=True))
    assert Path("tuned.yaml").read_text() == "settings: {}\n"
    assert run(replace(options, resume=True, force=True)).config == load_config("tuned.yaml").document()


def test_resume_refuses_changed_budget():
    control = Control()
    control.stop()
    run(asked(), control=control)
    with pytest.raises(UsageError, match="made for another setup") as caught:
        run(asked(budget_bytes=BUDGET + 1, resume=True))
    assert f"options.budget_bytes: {BUDGET} → {BUDGET + 1}" in caught.value.evidence


def test_resume_refuses_missing_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without it there are fewer techniques to choose from."""
    control = Control()
    control.stop()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    run(asked(), control=control)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UsageError, match="made for another setup") as caught:
        run(asked(resume=True))
    assert "options.offload_dirs: 1 → unset" in caught.value.evidence


def test_resume_refuses_study_in_use():
    with (
        StudyFolder(Path(".memtune/s")),
        pytest.raises(EnvironmentFault, match=f"in use by pid {os.getpid()}"),
    ):
        run(asked())


def test_resume_rebuilds_damaged_study_from_log(interrupted: None):
    options = asked()
    told = {each.summary for each in of(search_events.TrialFinished)}
    Path(".memtune/s/study.db").write_bytes(b"garbage" * 1000)
    outcome = run(replace(options, resume=True))
    assert told <= {each["summary"] for each in outcome.trials}
    assert Path(".memtune/s/study.db.corrupt").exists()
    counted = [each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")]
    assert len(counted) == len(set(counted)) == 8


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "damage",
    [
        "value_json = replace(value_json, 'peak_allocated_bytes', 'peak_allocated_bytet')",  # of no result
        "value_json = replace(value_json, '\\\"step_s\\\": ', '\\\"step_s\\\": 1')",  # of another one
        "value_json = substr(value_json, 1, 40)",
        "key = 'resulu'",
    ],
)
def test_resume_rebuilds_study_that_differs_from_log(interrupted: None, damage: str):
    """SQLite finds nothing wrong; the rebuilt study has the same numbers, so that it is not rebuilt again."""
    options = asked()
    told = {each.number: each.summary for each in of(search_events.TrialFinished)}
    with contextlib.closing(sqlite3.connect(".memtune/s/study.db")) as database:
        changed = database.execute(
            f"update trial_user_attributes set {damage} where trial_user_attribute_id ="
            " (select max(trial_user_attribute_id) from trial_user_attributes where key = 'result')"
        )
        assert changed.rowcount == 1
        database.commit()
    control = Control()
    run(replace(options, resume=True), interrupting(truth(options), 0, control), control)
    aside = Path(".memtune/s/study.db.corrupt")
    aside.unlink()
    outcome = run(replace(options, resume=True))
    assert not aside.exists()
    assert told.items() <= {each["number"]: each["summary"] for each in outcome.trials}.items()


def test_resume_refuses_changed_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    control = Control()
    control.stop()
    found = {"layers.py": "a" * 64}
    monkeypatch.setattr("memtune.workload.workload.Workload.imports", lambda self: found)
    run(asked(), control=control)
    found = {"layers.py": "b" * 64}
    with pytest.raises(UsageError, match="made for another setup") as caught:
        run(asked(resume=True))
    assert "workload.imports.layers.py" in caught.value.evidence


def test_study_is_readable_by_its_user_only():
    before = os.umask(0)  # the least private one
    try:
        run(asked())
    finally:
        os.umask(before)
    found = [Path(".memtune"), *Path(".memtune").rglob("*")]
    assert {"lock", "study.json", "study.db", "events.jsonl", "result.json"} <= {each.name for each in found}
    for path in found:
        assert path.stat().st_mode & 0o077 == 0, path


DRIVER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from support import zoo_paths
from support.search.prepared_search import prepared, truth
from memtune.autotune.search import search_events, study
from support.search.simulated_executor import SimulatedExecutor
from memtune.ssd.offload_dir import VARIABLE
from test_study_options import OPTIONS
study.prepare = prepared
study.search(OPTIONS, executor=SimulatedExecutor(truth(OPTIONS)))
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 17))])
def test_kill_loses_only_running_trials(seed: int, tmp_path: Path):
    options = asked(force=True, resume=True, study=str(tmp_path / "killed"), out=tmp_path / "tuned.yaml")
    (tmp_path / "test_study_options.py").write_text(
        "from pathlib import Path, PosixPath\nfrom memtune.autotune.space.search_options import"
        f" SearchOptions\nOPTIONS = {options!r}\n"
    )
    program = DRIVER.format(path=[str(tmp_path), *sys.path])
    moments = random.Random(seed)
    kept: dict[int, Any] = {}
    log_path = tmp_path / "killed" / "events.jsonl"
    for _ in range(2 if seed else 1):  # once is enough for the short run of the tests
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        target = moments.randint(
            3, 9
        )  # events of this process after which it is killed, while it goes on writing
        before = len(list(read_events(log_path)))
        while process.poll() is None and len(list(read_events(log_path))) < before + target:
            time.sleep(0.002)
        process.kill()
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said.decode()
        told = {
            each.number: each.result
            for each in read_events(log_path)
            if isinstance(each, search_events.TrialFinished)
        }
        assert kept.items() <= told.items()
        kept = told
    outcome = study.search(options, executor=SimulatedExecutor(truth(options)))
    rows = {each["number"]: each for each in outcome.trials}
    assert kept.keys() <= rows.keys()
    counted = [each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")]
    assert len(counted) == len(set(counted)) == 8
