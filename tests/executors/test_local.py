"""The local executor: several trials at once, cancelling, closing, and the death of the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from memtune.errors import EnvironmentFault
from memtune.executors.base import Executor, TrialResult
from memtune.executors.local import LocalExecutor
from memtune.executors.rank_group import run_group
from memtune.executors.supervisor import send

DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from memtune.executors.base import Trial
from memtune.executors.local import LocalExecutor
executor = LocalExecutor(2, log_dir=sys.argv[1], command=sys.argv[4:])
for number in (1, 2):
    executor.submit(Trial.model_validate_json(sys.argv[1 + number]))
for event in executor.wait(1000):
    pass
if sys.stdin.readline() == "raise\\n":
    raise SystemExit(7)
list(executor.wait(1000))
"""


def finish(executor, patience_s=60):
    """All results until nothing runs."""
    results, stop = [], time.monotonic() + patience_s
    while executor._tickets and time.monotonic() < stop:
        results += [event for event in executor.wait(0.2) if isinstance(event, TrialResult)]
    return sorted(results, key=lambda result: result.number)


@pytest.fixture
def executor(ground):
    executor = LocalExecutor(2, log_dir=ground.logs, command=ground.command)
    yield executor
    executor.close()


def test_local_trials_run_concurrently_up_to_slots(ground, executor):
    as_executor: Executor = executor
    for number in range(4):
        as_executor.submit(ground.trial("exit_three" if number == 2 else "well", number=number))
    assert [result.status for result in finish(executor)] == ["ok", "ok", "crash", "ok"]
    assert list(executor.wait(0.01)) == []


def test_local_executor_leaves_no_temporary_files(ground, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(ground.path))
    with_logs = LocalExecutor(command=ground.command)
    with_logs.submit(ground.trial("well"))
    assert finish(with_logs)[0].status == "ok"
    assert list(with_logs.log_dir.iterdir())
    with_logs.close()
    assert not list(ground.path.glob("*memtune*"))


def test_cancel_ends_processes_and_yields_nothing(ground, executor):
    executor.submit(ground.trial("sleep_long", number=1))
    pid = ground.pid("rank-0")
    executor.submit(ground.trial("well", number=2))
    executor.cancel(1)
    assert not ground.alive(pid)
    assert [result.number for result in finish(executor)] == [2]


def test_cancel_before_start(ground):
    executor = LocalExecutor(1, log_dir=ground.logs, command=ground.command)
    executor.submit(ground.trial("sleep_long", number=1))
    executor.submit(ground.trial("well", number=2))
    executor.cancel(2)
    executor.cancel(99)
    ground.pid("rank-0")
    executor.close()
    executor.close()
    assert not [event for event in executor.wait(0) if isinstance(event, TrialResult)]
    assert ground.left() == []
    with pytest.raises(ValueError, match="closed"):
        executor.submit(ground.trial("well", number=3))


def test_local_slots_share_gpus(ground):
    executor = LocalExecutor(2, log_dir=ground.logs, command=ground.command, gpus=("0", "1", "2", "3"))
    executor.submit(ground.trial("well", ranks=3).model_copy(update={"device": "cuda"}))
    [result] = finish(executor)
    executor.close()
    assert (result.status, result.reason) == ("unfit", "needs 3 GPUs; each of the 2 slots has 2")


def test_local_executor_refuses_unwritable_log_folder(ground):
    (ground.path / "file").touch()
    with pytest.raises(EnvironmentFault, match="Logs cannot be written"):
        LocalExecutor(log_dir=ground.path / "file" / "logs")


def drive(ground):
    trials = [ground.trial("daemon_then_sleep", 1), ground.trial("sleep_long", 2, ranks=2)]
    arguments = [str(ground.logs), *(trial.model_dump_json() for trial in trials), *ground.command]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], stdin=subprocess.PIPE, text=True)
    for name in ("daemon", "rank-0", "rank-1"):
        ground.pid(name)
    assert len(ground.left()) >= 6  # the driver, two supervisors, three ranks, a daemon
    return driver


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_local_processes_end_with_killed_driver(ground, number):
    driver = drive(ground)
    driver.send_signal(number)
    driver.wait(60)
    ground.until(lambda: not ground.left(), 10)
    assert not list(Path(ground.path).glob("memtune-*"))


def test_local_ranks_end_with_killed_driver_and_supervisors(ground):
    driver = drive(ground)
    ranks = [ground.pid(name) for name in ("rank-0", "rank-1")]
    supervisors = {psutil.Process(rank).parent() for rank in ranks}
    driver.send_signal(signal.SIGSTOP)
    for supervisor in supervisors:
        supervisor.kill()
    driver.kill()
    driver.wait()
    ground.until(lambda: not any(map(ground.alive, ranks)), 10)
    send(ground.left(), signal.SIGKILL)  # the daemon, which only the killed could have known of
    ground.until(lambda: not ground.left())


def test_local_processes_end_without_close(ground):
    driver = drive(ground)
    driver.communicate("raise\n")
    assert driver.returncode == 7
    assert ground.left() == []


def test_local_slots_bind_trials_to_disjoint_cores_unless_alone(ground, monkeypatch):
    monkeypatch.setattr("memtune.executors.local.core_sets", lambda count: [(0,), (1,)])
    seen = []

    def noted(trial, command, **given):
        seen.append((trial.number, given["bound"], given["cores"]))
        return TrialResult(number=trial.number, status="ok")

    monkeypatch.setattr("memtune.executors.local.run_group", noted)
    monkeypatch.setattr("memtune.executors.local.usable_cores", lambda: 2)
    executor = LocalExecutor(2, log_dir=ground.logs, command=ground.command)
    executor.submit(ground.trial("well", number=1))
    executor.submit(ground.trial("well", number=2).model_copy(update={"alone": True}))
    finish(executor)
    executor.close()
    (_, bound, cores), (_, bound_alone, cores_alone) = sorted(seen)
    assert (len(bound), cores) == (1, 1)
    assert (bound_alone, cores_alone) == ((), 2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_use_only_the_cores_they_are_bound_to(ground):
    core = max(os.sched_getaffinity(0))
    found = run_group(ground.trial("well"), ground.command, log_dir=ground.logs, bound=[core])
    assert found.status == "ok"
    assert found.audit["cores"] == [core]
