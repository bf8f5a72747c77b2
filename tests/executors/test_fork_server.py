"""Ranks that are forked end, fail and clean up as those that are executed do, and give the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.zoo_paths import ZOO

from memtune.executors.base import Trial, TrialResult
from memtune.executors.fork_server import ForkServer, module_of
from memtune.executors.local import LocalExecutor
from memtune.executors.rank_group import WORKER, run_group, start_supervisor

MODULE = (sys.executable, "-P", "-m", "rank")


@pytest.fixture
def server(monkeypatch, ground):
    """Its ranks are those of `rank.py`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support" / "processes"))
    monkeypatch.setattr("tempfile.tempdir", str(ground.path))
    with ForkServer(preload="json") as server:
        yield server


def run(ground, server, do, **options):
    trial = ground.trial(do, **options)
    result = run_group(trial, MODULE, log_dir=ground.logs, cores=2, server=server)
    assert ground.left() == [server.pid]
    assert not list(ground.path.glob("memtune-*")), "scratch folders are removed"
    return result


def test_fork_server_gives_ranks_their_environment(ground, server):
    first, second = run(ground, server, "well", ranks=2), run(ground, server, "well", number=2, ranks=2)
    assert (first.status, second.status) == ("ok", "ok")
    assert first.audit["omp"] == "1"
    assert first.audit["meet"] != second.audit["meet"]
    assert first.memory_by_kind == {"parameter": 11}


@pytest.mark.parametrize(
    ("do", "status", "says", "log"),
    [
        ("segfault", "crash", "rank 1 was ended by SIGSEGV", "in segfault"),
        (
            "exit_three",
            "crash",
            "rank 1 ended with exit code 3 before its result: no licence server found",
            "",
        ),
        ("exit_zero", "crash", "all done, bye", ""),
        ("raises", "crash", "shapes do not match on rank 1", 'rank.py", line'),
        ("out_of_memory", "oom", "rank 1: asked for 5 GiB", ""),
        ("stopped", "timeout", "'step 1/9'", "in stopped"),
        ("stubborn", "timeout", "after its 2 s", ""),
    ],
)
def test_forked_ranks_end_like_executed_ones(ground, server, monkeypatch, do, status, says, log):
    monkeypatch.setattr("memtune.executors.monitor.GRACE_S", 0.5)
    hangs = status == "timeout"
    result = run(
        ground, server, do, ranks=1 if hangs else 2, on=0 if hangs else 1, deadline_s=2.0 if hangs else 60.0
    )
    assert (result.status, result.retried) == (status, False)
    assert says in result.reason
    assert log in result.log_tail


def test_forked_rank_leftovers_are_killed_and_reported(ground, server):
    result = run(ground, server, "daemon_then_well")
    assert result.status == "ok"
    assert result.audit["killed_leftovers"] == [f"{Path(sys.executable).name} (pid {ground.pid('daemon')})"]


def killed_meanwhile(ground, server, do, kill, **options):
    """Run a trial in a thread and `kill(pid of rank 0)` once that one has noted it."""
    results: list[TrialResult] = []
    thread = threading.Thread(target=lambda: results.append(run(ground, server, do, **options)))
    thread.start()
    kill(ground.pid("rank-0"))
    thread.join(60)
    return results[0]


def test_killed_forked_rank_is_repeated_once(ground, server):
    result = killed_meanwhile(ground, server, "lost_once", lambda pid: os.kill(pid, signal.SIGKILL))
    assert (result.status, result.retried) == ("ok", True)


@pytest.mark.parametrize("do", ["daemon_then_sleep", "forked_daemon_then_sleep"])
def test_killed_forked_supervisor_leaves_no_process(ground, server, do):
    killed = killed_meanwhile(
        ground, server, do, lambda pid: psutil.Process(pid).parent().kill(), deadline_s=2.0
    )
    assert (killed.status, killed.retried) == ("timeout", True)
    assert not ground.alive(ground.pid("daemon"))


def test_killed_fork_server_is_replaced(ground, server):
    before = []

    def kill(pid):
        before.append(server.pid)
        os.kill(server.pid, signal.SIGKILL)

    result = killed_meanwhile(ground, server, "lost_once", kill, ranks=2)
    assert (result.status, result.retried) == ("ok", True)
    assert server.pid not in (None, *before)


def test_fork_server_ends_with_its_driver_while_it_imports(ground, monkeypatch):
    """An import can take minutes, and never reads the server's socket."""
    (ground.path / "slow_import.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(ground.path / 'server.tmp')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(ground.path / 'server.tmp')!r}, {str(ground.path / 'server')!r})\n"
        "time.sleep(300)\n"
    )
    driver = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys\nfrom memtune.executors.fork_server import ForkServer\n"
            "ForkServer('slow_import').fork_supervisor((sys.executable, '-P', '-m', 'rank'), os.environ)",
        ],
        env={**os.environ, "PYTHONPATH": str(ground.path)},
    )
    server = ground.pid("server")
    driver.kill()
    driver.wait()
    ground.until(lambda: not ground.alive(server), 20)


def test_fork_server_declines_ranks_that_must_be_executed(ground, server, monkeypatch):
    run(ground, server, "well")
    started = []
    monkeypatch.setattr(
        "memtune.executors.rank_group.start_supervisor", lambda: started.append(1) or start_supervisor()
    )
    trials = [ground.trial("well").model_copy(update={"env": env}) for env in ({}, {"MALLOC_ARENA_MAX": "1"})]
    assert [
        run_group(each, MODULE, log_dir=ground.logs, cores=2, server=server).status for each in trials
    ] == ["ok", "ok"]
    assert len(started) == 1
    env = dict(os.environ)
    assert server.fork_supervisor((sys.executable, "-P", "rank.py"), env) is None
    assert server.fork_supervisor(MODULE, {**env, "OMP_NUM_THREADS": "7"}) is None
    assert module_of(WORKER) == "memtune.executors.worker"


def test_fork_server_runs_ranks_where_python_was_started_by_a_relative_path(ground, server, monkeypatch):
    folder = Path(sys.executable).parent
    monkeypatch.setattr(sys, "executable", f"{folder}/../{folder.name}/{Path(sys.executable).name}")
    trial = ground.trial("well")
    module = (sys.executable, *MODULE[1:])
    assert run_group(trial, module, log_dir=ground.logs, server=server).status == "ok"
    assert server.pid is not None


def test_failed_fork_server_falls_back_to_execution(ground, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support" / "processes"))
    with ForkServer(preload="no_such_module") as server:
        for number in range(3):
            assert (
                run_group(
                    ground.trial("well", number=number), MODULE, log_dir=ground.logs, server=server
                ).status
                == "ok"
            )
        assert server.pid is None


def test_fork_server_close_leaves_no_process(ground, server):
    run(ground, server, "well")
    pid = server.pid
    server.close()
    assert not psutil.pid_exists(pid)
    assert server.fork_supervisor(MODULE, dict(os.environ)) is None


@pytest.mark.slow
def test_forked_trials_equal_executed_trials(ground, tmp_path):
    def results(close: bool) -> list[TrialResult]:
        executor = LocalExecutor(1, log_dir=tmp_path)
        if close:
            executor._server.close()
        trial = Trial(
            number=1,
            workload=str(ZOO["gpt"]),
            config={"settings": {"sharding": {"states": {"kind": "ddp"}}}},
            ranks=2,
            steps=1,
            warmup_steps=1,
            fingerprint=True,
        )
        executor.submit(trial)
        found: list[TrialResult] = []
        ground.until(
            lambda: (
                found.extend(each for each in executor.wait(0.2) if isinstance(each, TrialResult)) or found
            )
        )
        executor.close()
        return found

    forked, executed = results(close=False)[0], results(close=True)[0]
    for name in ("status", "losses", "gradients_sha256"):
        assert getattr(forked, name) == getattr(executed, name), name
    # A thread of gloo's may still hold a loss.
    assert forked.peak_allocated_bytes == pytest.approx(executed.peak_allocated_bytes, abs=64)
    assert forked.peak_reserved_bytes == pytest.approx(executed.peak_reserved_bytes, abs=64)
    assert forked.status == "ok"
