"""The Ray executor on clusters of its own: faults, clean-up, and who may join."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memtune.errors import EnvironmentFault
from memtune.executors.base import Progress, TrialResult
from memtune.executors.ray.cluster import access
from memtune.executors.ray.executor import RayExecutor

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

DRIVER = """
import sys
from memtune.executors.base import Trial
from memtune.executors.ray.executor import RayExecutor
address, log_dir, trial, *command = sys.argv[1:]
executor = RayExecutor(address or None, log_dir=log_dir, command=command)
executor.submit(Trial.model_validate_json(trial))
while True:
    for event in executor.wait(100):
        if hasattr(event, "status"):
            print(event.model_dump_json())
            executor.close()
            sys.exit()
"""
UNINVITED = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1])
except Exception as error:
    print(type(error).__name__)
else:
    print("joined")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "processes" / "rank.py")]
    executor = RayExecutor(log_dir=logs, command=command, silence_s=3.0)
    yield executor
    executor.close()
    assert not os.path.exists(executor.cluster.folder)


@pytest.fixture
def arena(cluster, ground, monkeypatch):
    """The shared cluster and the ground, whose mark the ranks carry but no cluster that is started
    meanwhile.
    """
    monkeypatch.delenv("MEMTUNE_TEST_GROUND")

    def trial(*args, **options):
        mark = {"MEMTUNE_TEST_GROUND": str(ground.path)}
        return ground.trial(*args, **{"ranks": 2, **options}).model_copy(update={"env": mark})

    def result():
        stop = time.monotonic() + 60
        while time.monotonic() < stop:
            for event in cluster.wait(0.2):
                if isinstance(event, TrialResult):
                    ground.until(lambda: not ground.left())
                    return event
        raise AssertionError("no result")

    yield SimpleNamespace(cluster=cluster, trial=trial, result=result, pid=ground.pid, ground=ground)
    table = cluster.ray.util.placement_group_table()
    assert {each["state"] for each in table.values()} <= {"REMOVED"}


def actor_of(rank_pid):
    return psutil.Process(rank_pid).parent().parent()


def test_ray_ranks_meet_and_agree(arena):
    arena.cluster.submit(arena.trial("gloo_sum"))
    result = arena.result()
    assert (result.status, result.losses, result.retried) == ("ok", [12.0], False)


@pytest.mark.slow
def test_ray_progress_is_yielded(arena):
    arena.cluster.submit(arena.trial("well"))
    events = []
    while not any(isinstance(event, TrialResult) for event in events):
        events += arena.cluster.wait(1)
    assert [event.stage for event in events if isinstance(event, Progress)] == [
        "starting",
        "building",
        "step 1/1",
    ]
    assert events[-1].audit["omp"] != "0"
    arena.ground.until(lambda: not arena.ground.left())


@pytest.mark.drawn(1)
@pytest.mark.parametrize("victim", ["rank", "supervisor", "actor"])
def test_ray_trial_is_repeated_after_killed_worker(arena, victim):
    arena.cluster.submit(arena.trial("lost_once"))
    arena.pid("rank-0")
    pid = arena.pid("rank-1")
    {"rank": psutil.Process(pid), "supervisor": psutil.Process(pid).parent(), "actor": actor_of(pid)}[
        victim
    ].kill()
    result = arena.result()
    assert (result.status, result.retried) == ("ok", True)


@pytest.mark.slow
def test_ray_worker_killed_twice_is_a_crash_and_next_trial_runs(arena):
    arena.cluster.submit(arena.trial("daemon_then_sleep", number=1, ranks=1))
    for _ in range(2):
        pid = arena.pid("rank-0")
        (arena.ground.path / "rank-0").unlink()
        actor_of(pid).kill()
    result = arena.result()
    assert (result.status, result.retried) == ("crash", True)
    assert result.reason.startswith("rank 0 was lost with its Ray worker")
    arena.cluster.submit(arena.trial("well", number=2))
    assert arena.result().status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["gcs_server", "raylet"])
def test_ray_cluster_that_ended_is_replaced(arena, daemon):
    arena.cluster.submit(arena.trial("lost_once"))
    arena.pid("rank-0")
    arena.pid("rank-1")
    before = arena.cluster.cluster
    [victim] = [
        each for each in psutil.Process(before._shim.pid).children(recursive=True) if each.name() == daemon
    ]
    victim.kill()
    result = arena.result()
    assert (result.status, result.retried) == ("ok", True)
    assert arena.cluster.cluster is not before
    assert not os.path.exists(before.folder)


@pytest.mark.slow  # the supervisor's part is in test_rank_group
def test_ray_crash_and_hang_have_evidence(arena):
    arena.cluster.submit(arena.trial("segfault", number=1, on=1))
    result = arena.result()
    assert (result.status, result.reason) == ("crash", "rank 1 was ended by SIGSEGV")
    assert "in segfault" in result.log_tail
    arena.cluster.submit(arena.trial("gloo_sum", number=2, skip=0))
    result = arena.result()
    assert result.status == "timeout"
    assert result.reason.startswith("rank 0 stopped first at 'step 3/3'")
    assert "in sleep_long" in result.log_tail


def test_ray_trial_can_be_cancelled(arena):
    arena.cluster.submit(arena.trial("daemon_then_sleep", number=5))
    arena.pid("rank-0")
    arena.cluster.cancel(5)
    assert arena.ground.left() == []
    assert not [event for event in arena.cluster.wait(0.3) if isinstance(event, TrialResult)]


def test_ray_refuses_more_ranks_than_cluster_has(arena):
    arena.cluster.submit(arena.trial("well", ranks=9))
    assert arena.result().reason == "needs 9 CPUs; the Ray cluster has 2"


@pytest.mark.slow
def test_ray_missing_command_is_a_crash(arena, monkeypatch):
    monkeypatch.setattr(arena.cluster, "command", ("/nowhere/python",))
    arena.cluster.submit(arena.trial("well"))
    assert "cannot start /nowhere/python" in arena.result().reason


def test_ray_cluster_requires_token(cluster):
    address = cluster.ray.get_runtime_context().gcs_address
    outside = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    outside["HOME"] = "/nonexistent"
    asked = subprocess.run(
        [sys.executable, "-c", UNINVITED, address], env=outside, capture_output=True, text=True, timeout=60
    )
    assert asked.stdout.strip() == "AuthenticationError"


def test_ray_allows_one_cluster_per_process(cluster):
    with pytest.raises(EnvironmentFault, match="in use"):
        RayExecutor()


def test_ray_cluster_without_token_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(EnvironmentFault, match="anyone on the network"):
        RayExecutor()


def test_missing_ray_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match=r"ray is needed") as fault:
        RayExecutor()
    assert fault.value.fix.startswith("pip install 'ray>=")


def start_driver(ground, address, trial, **env):
    arguments = [address, str(ground.logs), trial.model_dump_json(), *ground.command]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
    )


@pytest.mark.slow
def test_ray_executor_joins_address_and_leaves_cluster_running(cluster, ground):
    address = cluster.ray.get_runtime_context().gcs_address
    output, _ = start_driver(ground, address, ground.trial("gloo_sum", ranks=2), **access()).communicate(
        timeout=60
    )
    assert json.loads(output)["losses"] == [12.0]
    assert cluster.ray.cluster_resources()["CPU"] == 2


@pytest.mark.slow
def test_ray_processes_end_with_killed_driver_and_no_foreign_cluster_is_joined(ground):
    """A foreign address in the environment and a stale address file are there; the driver says nothing on the
    terminal.
    """
    stale = ground.path / "ray" / "ray_current_cluster"
    stale.parent.mkdir()
    stale.write_text("192.0.2.1:6379")
    foreign = {"RAY_ADDRESS": "192.0.2.1:6379", "RAY_TMPDIR": str(ground.path)}
    driver = start_driver(ground, "", ground.trial("daemon_then_sleep", ranks=2), **foreign)
    pids = [ground.pid(name) for name in ("rank-0", "rank-1")]
    for name in ("rank-0", "rank-1"):
        (ground.path / name).unlink()
    actor_of(pids[1]).kill()
    for name in ("rank-0", "rank-1", "daemon"):
        ground.pid(name)
    assert (
        len(ground.left()) > 10
    )  # the driver, the daemons of Ray, two actors, supervisors, ranks and daemons
    driver.kill()
    assert driver.wait() == -9
    ground.until(lambda: not ground.left(), 10)
    assert driver.stdout.read() == b""
    assert stale.read_text() == "192.0.2.1:6379"
