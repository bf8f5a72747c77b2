"""kill -9 at random moments: of trainings that keep their last step, of searches, of the processes of trials.

`make test-chaos KILLS=1000` kills as many trainings of each tier, searches and processes of trials.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.gloo import FRESH
from support.killed_training import OTHERS, STEPS, same, train
from support.search.prepared_search import prepared, truth
from support.search.search_runs import asked
from support.search.simulated_executor import SimulatedExecutor

from memtune.autotune.search import search_events, study
from memtune.autotune.search.search_events import read_events
from memtune.autotune.space.search_options import SearchOptions
from memtune.testing.training import device_under_test

KILLS = int(os.environ.get("MEMTUNE_KILLS", "2"))
SEED = int(os.environ.get("MEMTUNE_SEED", "0"))
"""Other cases for each: a long run may be cut into several."""
ACTS = 160
"""Durable acts among which a training is killed; a resumed one does fewer."""


@pytest.mark.any_device
@pytest.mark.timeout(20 * KILLS + 300)
@pytest.mark.parametrize("tier", ["last_step", *(f"last_step,{each}" for each in OTHERS)])
def test_killed_trainings_resume_bitwise(tier: str, tmp_path: Path) -> None:
    """Kill each training again and again, at a durable act or at any moment, until it ends."""
    moments, plain = random.Random(f"{tier}{SEED}"), tmp_path / "plain"
    (tmp_path / "dir").mkdir()
    assert trained(tmp_path / "dir", tier, plain) == 0  # the first one starts the fork server
    began = time.monotonic()
    assert trained(tmp_path / "dir", tier, plain) == 0
    alone_s, kills, trainings, half_made_count = time.monotonic() - began, 0, 0, 0
    wanted = (
        KILLS // 20 + 1 if tier.endswith("updaters") else KILLS
    )  # each starts processes that import torch
    while kills < wanted:
        log, done, trainings = tmp_path / "log", 0, trainings + 1
        for _ in range(12):
            act = moments.randrange(ACTS) if moments.random() < 0.5 else -1
            after_s = moments.uniform(0, alone_s) if act < 0 else None
            code = trained(tmp_path / "dir", tier, log, act, after_s)
            lines = log.read_text().splitlines() if log.exists() else []
            log.unlink(missing_ok=True)
            if lines:
                start = int(lines[0].split()[1])
                # After the last step `finish` removes what was kept: the next training may begin again.
                assert start >= done or done == STEPS, f"{tier}: step {done} is done, resumed from {start}"
                done = max(start, *(int(each.split()[1]) for each in lines))
            if code == 0:
                break
            kills += 1
        else:
            assert trained(tmp_path / "dir", tier, log) == 0
        same(log, plain)
        # `finish` removes everything. A folder whose process was killed before it locked it may be one that
        # another process is making: the next run removes it after a minute.
        for half_made in (tmp_path / "dir").glob(".memtune-new-*"):
            half_made_count += 1
            assert {each.name for each in half_made.iterdir()} <= {"owner"}
            shutil.rmtree(half_made)
        assert not list((tmp_path / "dir").iterdir())
    print(f"{tier}: {kills} kills of {trainings} trainings, {half_made_count} in the making of a folder")


def trained(directory: Path, tier: str, log: Path, act: int = -1, after_s: float | None = None) -> int:
    """Train in a process of its own, killed at `act` or after `after_s`; return its exit code."""
    child = FRESH.Process(target=train, args=(str(directory), tier, act, str(log), device_under_test().type))
    child.start()
    child.join(after_s)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode


@pytest.mark.timeout(20 * KILLS + 300)
def test_killed_searches_lose_no_told_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a search at any moment, resume it, until it ends with the trials of an undisturbed one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "prepare", prepared)
    options = asked(force=True, resume=True, study=str(tmp_path / "study"), out=tmp_path / "tuned.yaml")
    whole = counted(search(options))  # prepares what all of them share
    files, began = names(tmp_path), time.monotonic()
    shutil.rmtree(tmp_path / "study")
    search(options)
    alone_s = time.monotonic() - began
    moments, kills, searches = random.Random(0 + SEED), 0, 0
    while kills < KILLS:
        shutil.rmtree(tmp_path / "study")
        (tmp_path / "tuned.yaml").unlink()
        kept: dict[int, Any] = {}
        searches += 1
        while killed(lambda: search(options), moments.uniform(0, alone_s)):
            kills += 1
            told = {
                each.number: each.result
                for each in read_events(tmp_path / "study" / "events.jsonl")
                if isinstance(each, search_events.TrialFinished)
            }
            assert kept.items() <= told.items()
            kept = told
        outcome = search(options)
        assert kept.keys() <= {each["number"] for each in outcome.trials}
        assert len(counted(outcome)) == len(whole)
        again = Counter(counted(outcome)) - Counter(set(counted(outcome)))
        # A kill may separate the decision to repeat a trial from the trial: then it is announced once more.
        assert again <= announced(tmp_path), f"a trial ran twice because of a kill: {again}"
        assert names(tmp_path) == files
    print(f"{kills} kills of {searches} searches, no told trial lost")


def search(options: SearchOptions) -> Any:
    return study.search(options, executor=SimulatedExecutor(truth(options)))


def counted(outcome: Any) -> list[str]:
    return [each["summary"] for each in outcome.trials if each["role"] in ("baseline", "search", "audit")]


def announced(folder: Path) -> Counter[str]:
    """Return how often a search told that it repeats a trial that other work may have slowed down."""
    notes = (
        each.text
        for each in read_events(folder / "study" / "events.jsonl")
        if isinstance(each, search_events.Note)
    )
    return Counter(text.partition(" runs again")[0] for text in notes if " runs again" in text)


def names(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def killed(run: Any, after_s: float) -> bool:
    """Run a function in a fork of this process, killed after `after_s`; return False if it ended before."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if not pid:
            os.dup2(said.fileno(), 2)
            try:
                run()
                os._exit(0)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)
        until = time.monotonic() + after_s
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                said.seek(0)
                assert status == 0, said.read().decode(errors="replace")
                return False
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True


DRIVER = """
import sys
from memtune.executors.base import Trial
from memtune.executors.local import LocalExecutor
executor = LocalExecutor(2, log_dir=sys.argv[1], command=sys.argv[2:4])
for text in sys.argv[4:]:
    executor.submit(Trial.model_validate_json(text))
while True:
    list(executor.wait(1000))
"""


@pytest.mark.timeout(30 * KILLS + 300)
def test_killed_processes_of_trials_leave_nothing(ground: Any) -> None:
    """Kill a rank, a supervisor or the driver at any moment after its start, then the driver."""
    moments, kills = random.Random(1 + SEED), {"driver": 0, "supervisor": 0, "rank": 0}
    trials = [ground.trial("sleep_long", 1), ground.trial("sleep_long", 2, ranks=2)]
    command = [sys.executable, "-c", DRIVER, str(ground.logs), *ground.command]
    while sum(kills.values()) < KILLS:
        driver = psutil.Popen([*command, *(each.model_dump_json() for each in trials)])
        kind = moments.choice(["driver", "supervisor", "rank"])
        depth = {"driver": 0, "supervisor": 1, "rank": 2}[kind]
        victims = ground.until(partial(below, driver, depth), 600)
        time.sleep(moments.uniform(0, 0.6))
        for victim in moments.sample(victims, 1):
            kills[kind] += 1
            send_kill(victim)
        time.sleep(moments.uniform(0, 0.3))
        if kind != "driver":
            kills["driver"] += 1
            driver.kill()
        driver.wait()
        ground.until(lambda: not ground.left(), 10 if KILLS > 2 else 60)
        assert not list(Path(ground.path).glob("memtune-*"))
    print(f"kills: {kills}; no process left after 10 s")


def below(process: psutil.Process, depth: int) -> list[psutil.Process]:
    """Return the processes `depth` generations below `process`."""
    found = [process]
    for _ in range(depth):
        found = [child for each in found for child in children(each)]
    return found


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def send_kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
