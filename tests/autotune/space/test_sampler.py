from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from support.search.prepared_search import AXES, rewriter

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.sampler import DAMAGE, Sampler
from memtune.autotune.space.search_space import Space, build_space
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors.base import TrialResult
from memtune.search_spaces.execution import Execution


@pytest.fixture(scope="module")
def space() -> Space:
    return build_space(rewriter(), 8, axes=AXES)


def ok(number: int) -> TrialResult:
    return TrialResult(number=number, status="ok", step_s=1.0, peak_allocated_bytes=10, losses=[2.0, 1.0])


def test_sampler_returns_and_stores_requested_choice(space: Space, tmp_path: Path):
    wanted = list(space)[7]
    sampler = Sampler(tmp_path / "s.db", space, 0)
    number, choice = sampler.ask(wanted, role="baseline", name="plain")
    assert choice == wanted
    sampler.tell(number, ok(number), 1.0)
    sampler.close()
    (kept,) = Sampler(tmp_path / "s.db", space, 0).trials()
    assert (kept.number, kept.outcome, kept.role, kept.name) == (0, "complete", "baseline", "plain")
    assert kept.result == ok(0)
    assert kept.settings is not None
    assert Choice.from_document(kept.settings) == wanted


def test_sampler_refuses_study_of_another_space(space: Space, tmp_path: Path):
    sampler = Sampler(tmp_path / "s.db", space, 0)
    number, _ = sampler.ask()
    sampler.tell(number, ok(number), 1.0)
    sampler.close()
    slot = next(slot for slot, among in space.slots.items() if len({each.kind for each in among}) > 1)
    fewer = replace(space, slots={**space.slots, slot: space.slots[slot][:1]})
    with pytest.raises(UsageError, match="made with a different search space") as caught:
        Sampler(tmp_path / "s.db", fewer, 0).ask()
    assert caught.value.code == "MT406"


@pytest.mark.parametrize("of_study", [False, True])
def test_sampler_with_a_flipped_bit_in_values_is_damaged_not_of_another_space(
    of_study: bool, space: Space, tmp_path: Path
):
    sampler, told = Sampler(tmp_path / "s.db", space, 0), {}
    for choice in itertools.islice(space, 3):
        number, _ = sampler.ask(choice)
        sampler.tell(number, ok(number), 1.0)
        told[number] = choice.dump(), ok(number)
    sampler.close()
    flip = (
        """update study_user_attributes set value_json = '"0"'"""
        if of_study
        else """update trial_params set distribution_json = replace(distribution_json, '[', '[7, ')"""
        " where param_id = 1"
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as base:
        assert base.execute(flip).rowcount == 1
        base.commit()
    again = Sampler(tmp_path / "s.db", space, 0)
    assert again.holds(told) is of_study
    if of_study:  # its hash alone decides nothing
        assert again.ask(choice)[0] == 3


@pytest.mark.parametrize("column", ["trials.state", "trial_values.value_type"])
def test_sampler_with_a_flipped_bit_in_a_name_of_optuna_is_damaged(column: str, space: Space, tmp_path: Path):
    sampler = Sampler(tmp_path / "s.db", space, 0)
    number, choice = sampler.ask(next(iter(space)))
    assert choice is not None
    sampler.tell(number, ok(number), 1.0)
    sampler.close()
    table, _, name = column.partition(".")
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as base:
        assert base.execute(f"update {table} set {name} = 'INF_QOS'").rowcount == 1
        base.commit()
    try:
        again = Sampler(tmp_path / "s.db", space, 0)
    except DAMAGE:
        return
    assert not again.holds({number: (choice.dump(), ok(number))})


def test_sampler_stores_choice_outside_space(space: Space, tmp_path: Path):
    outside = Choice.of(Execution(micro_batch=5), {})
    sampler = Sampler(tmp_path / "s.db", space, 0)
    number, choice = sampler.ask(outside, role="baseline")
    assert choice == outside
    sampler.tell(number, ok(number), 1.0)
    assert sampler.ask()[1] is not None


def test_sampler_suggestions_repeat_by_seed(space: Space, tmp_path: Path):
    every = {(each.execution, each.techniques) for each in space}

    def drawn(name: str, seed: int) -> list[Choice | None]:
        sampler = Sampler(tmp_path / name, space, seed)
        found = []
        for value in range(14):
            number, choice = sampler.ask()
            sampler.tell(number, ok(number), float(value % 5))
            found.append(choice)
        return found

    first = drawn("a.db", 1)
    assert all(each is not None and (each.execution, each.techniques) in every for each in first)
    assert first == drawn("b.db", 1)
    assert first != drawn("c.db", 2)


def test_sampler_keeps_trial_of_dead_process_running(space: Space, tmp_path: Path):
    sampler = Sampler(tmp_path / "s.db", space, 0)
    choice = list(space)[7]
    assert sampler.ask(choice, role="baseline") == (0, choice)
    again = Sampler(tmp_path / "s.db", space, 0)
    (left,) = again.trials()
    assert (left.number, left.outcome, left.role, left.settings) == (0, "running", "baseline", choice.dump())
    (kept,) = again._study.get_trials()
    assert kept.params == again._parameters(choice)


def test_sampler_stores_failed_trials_with_reason(space: Space, tmp_path: Path):
    sampler = Sampler(tmp_path / "s.db", space, 0)
    pruned, oom, crash = (sampler.ask(each)[0] for each in list(space)[:3])
    sampler.prune(pruned, "needs at least 9 GiB")
    sampler.tell(oom, TrialResult(number=oom, status="oom", reason="out of memory"), None, over_bytes=5.0)
    sampler.tell(crash, TrialResult(number=crash, status="crash", reason="boom"), None)
    kept = sampler.trials()
    assert [each.outcome for each in kept] == ["pruned", "complete", "failed"]
    assert kept[0].reason == "needs at least 9 GiB"
    assert kept[1].result is not None
    assert kept[1].result.status == "oom"
    assert kept[2].result is not None


def test_study_contains_slots_and_knobs(space: Space, tmp_path: Path):
    sampler = Sampler(tmp_path / "s.db", space, 0)
    wanted = next(each for each in space if each.technique("recompute").kind == "every_nth")
    sampler.ask(wanted)
    rows = dict(
        sqlite3.connect(tmp_path / "s.db").execute("select param_name, distribution_json from trial_params")
    )
    assert {"micro_batch", "recompute", "recompute.every_nth.n", "offload.states"} <= rows.keys()
    assert "every_nth" in json.loads(rows["recompute"])["attributes"]["choices"]


@pytest.mark.parametrize(
    "content",
    [b"not a database at all, and long enough to be read as one" * 20, b"SQLite format 3\0" + b"\xff" * 4096],
)
def test_sampler_reports_file_that_is_no_study(space: Space, tmp_path: Path, content: bytes):
    (tmp_path / "s.db").write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"s\.db cannot be read") as caught:
        Sampler(tmp_path / "s.db", space, 0)
    assert caught.value.code == "MT402"


@pytest.mark.slow
def test_sampler_on_full_disk_raises_and_keeps_results(space: Space, tmp_path: Path):
    import resource
    import subprocess
    import sys

    program = f"""
import resource, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from support.search.prepared_search import AXES, rewriter
from memtune.autotune.space.sampler import DAMAGE, Sampler
from memtune.autotune.space.search_space import build_space
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors.base import TrialResult
space = build_space(rewriter(), 8, axes=AXES)
path = Path({str(tmp_path / "s.db")!r})
sampler = Sampler(path, space, 0)
for each in list(space)[:3]:
    number, _ = sampler.ask(each)
    sampler.tell(number, TrialResult(number=number, status="ok", step_s=1.0, peak_allocated_bytes=1), 1.0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    for each in list(space)[3:]:
        number, _ = sampler.ask(each)
        sampler.tell(number, TrialResult(number=number, status="ok", log_tail="x" * 20000), 1.0)
except EnvironmentFault as error:
    print(error.code)
"""
    assert resource.RLIMIT_FSIZE
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["MT402"], done.stderr
    kept = Sampler(tmp_path / "s.db", space, 0).trials()
    assert [each.outcome for each in kept[:3]] == ["complete"] * 3


def test_pruned_suggestion_gives_its_number_back(space: Space, tmp_path: Path):
    sampler = Sampler(tmp_path / "study.db", space, 0)
    first, _ = sampler.ask()
    sampler.tell(first, ok(first), 1.0)
    pruned, _ = sampler.ask()
    sampler.prune(pruned, "too large")
    second, _ = sampler.ask()
    assert (first, pruned, second) == (0, 1, 1)
    sampler.tell(second, ok(second), 2.0)
    sampler.close()
    again = Sampler(tmp_path / "study.db", space, 0)
    assert [each.number for each in again.trials() if each.outcome == "complete"] == [0, 1]
    assert again.ask()[0] == 2
    again.close()


def test_sampler_killed_at_any_statement_of_its_first_start_is_continued(space: Space, tmp_path: Path):
    """Optuna makes its tables statement by statement: one that lacks an index is never completed."""

    def start(path: Path, last: int) -> int:
        """Open the study in a fork that dies before statement `last`; return its exit code."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        count = 0

        def counted(connection: object, cursor: object, statement: str, *_: object) -> None:
            nonlocal count
            count += not statement.startswith(("SELECT", "PRAGMA"))
            if count == last:
                os._exit(9)

        event.listen(Engine, "before_cursor_execute", counted)
        Sampler(path, space, 0)
        os._exit(0)

    deaths = 0
    while start(tmp_path / f"{deaths}.db", deaths + 1) == 9:
        deaths += 1
    assert deaths > 15
    for each in range(deaths):
        for _ in range(2):
            Sampler(tmp_path / f"{each}.db", space, 0).close()
    rest = {each.name for each in tmp_path.iterdir()} - {f"{each}.db" for each in range(deaths + 1)}
    assert rest <= {each.name for each in tmp_path.glob(".*.tmp*")}  # which `StudyFolder` removes


def test_sampler_holds_results_whose_loss_is_not_a_number(space: Space, tmp_path: Path):
    sampler, choice = Sampler(tmp_path / "s.db", space, 0), next(iter(space))
    number, _ = sampler.ask(choice)
    result = ok(number).model_copy(update={"losses": [1.0, math.nan]})
    sampler.tell(number, result, 1.0)
    assert sampler.holds({number: (choice.dump(), result)})
    assert not sampler.holds({number: (choice.dump(), ok(number))})


def test_sampler_whose_database_is_locked_is_not_damaged(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sampler = Sampler(tmp_path / "s.db", space, 0)
    number, _ = sampler.ask()
    sampler.tell(number, ok(number), 1.0)
    sampler.close()
    monkeypatch.setattr("memtune.autotune.space.sampler._LOCKED_S", 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(EnvironmentFault, match="cannot be read or written") as caught:
            Sampler(tmp_path / "s.db", space, 0)
    assert not isinstance(caught.value, DAMAGE)
