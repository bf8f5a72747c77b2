"""Everything that can happen to the ranks of a trial, with real processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from memtune.executors.rank_group import Place, log_path, rank_env, run_group


def run(ground, do, **options):
    silence_s = options.pop("silence_s", 60.0)
    seen = []
    trial = ground.trial(do, **options)
    result = run_group(
        trial, ground.command, log_dir=ground.logs, cores=2, silence_s=silence_s, on_progress=seen.append
    )
    assert ground.left() == []
    assert not list(ground.path.glob("memtune-*")), "scratch folders are removed"
    return result, seen


@pytest.fixture
def meanwhile():
    """Run a function in a thread while the test goes on; its value is there once it has ended."""
    threads = []

    def start(function):
        box = []
        thread = threading.Thread(target=lambda: box.append(function()))
        threads.append(thread)
        thread.start()
        return lambda: (thread.join(60), box[0])[1]

    yield start
    for thread in threads:
        thread.join(60)


@pytest.fixture(autouse=True)
def _scratch_here(ground, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(ground.path))


def shim_of(rank_pid):
    return psutil.Process(rank_pid).parent()


def test_rank_group_merges_records(ground):
    result, seen = run(ground, "well", ranks=2)
    assert (result.status, result.reason, result.retried) == ("ok", "", False)
    assert result.peak_allocated_bytes == 101
    assert result.memory_by_kind == {"parameter": 11}
    assert result.step_s_all == [1.1, 0.2, 0.3]
    assert result.step_s == 0.3
    assert result.losses == [2.0, 1.0]
    assert result.link_bytes == {"collective": 5}
    assert result.audit["omp"] == "1"
    assert result.audit["meet"].startswith("file://")
    assert [progress.stage for progress in seen] == ["starting", "building", "step 1/1"]
    assert seen[-1].device_bytes == 123


def test_rank_env_keeps_users_thread_count(ground, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(ground, "well")[0].audit["omp"] == "7"


def test_segfault_result_has_signal_and_stack(ground):
    result, _ = run(ground, "segfault", ranks=2, on=1)
    assert (result.status, result.reason) == ("crash", "rank 1 was ended by SIGSEGV")
    assert "about to read address 0" in result.log_tail
    assert "in segfault" in result.log_tail
    assert not result.retried


def test_exit_result_has_code_and_last_line(ground):
    result, _ = run(ground, "exit_three")
    assert result.status == "crash"
    assert result.reason == "rank 0 ended with exit code 3 before its result: no licence server found"


def test_exit_without_result_is_a_crash(ground):
    result, _ = run(ground, "exit_zero")
    assert result.status == "crash"
    assert "exit code 0" in result.reason
    assert "all done, bye" in result.reason


def test_first_failed_rank_is_reported_and_ends_others(ground):
    result, _ = run(ground, "gloo_raise", ranks=2, **{"else": "gloo_raise", "on": 1})
    assert result.status == "crash"
    assert result.reason.startswith("rank 1 ")
    assert "shapes do not match on rank 1" in result.reason
    assert 'rank.py", line' in result.log_tail


def test_oom_on_one_rank_is_the_result(ground):
    result, _ = run(ground, "out_of_memory", ranks=2, on=1)
    assert (result.status, result.reason) == ("oom", "rank 1: asked for 5 GiB")
    assert result.peak_allocated_bytes == 77


def test_malformed_record_is_a_crash(ground):
    result, _ = run(ground, "malformed")
    assert result.status == "crash"
    assert "status" in result.reason


def test_ranks_rendezvous_through_file(ground):
    result, _ = run(ground, "gloo_sum", ranks=2)
    assert (result.status, result.losses) == ("ok", [12.0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rank_env_contents(ground, monkeypatch, device):
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    trial = ground.trial("well", ranks=4).model_copy(
        update={"env": {"PYTORCH_ALLOC_CONF": "x", "PYTHONUNBUFFERED": ""}, "device": device}
    )
    here = rank_env(
        trial, Place(range(4), cores=9, env={"CUDA_VISIBLE_DEVICES": "2,3"}), 3, "/scratch", "mark"
    )
    assert (here["RANK"], here["WORLD_SIZE"], here["LOCAL_RANK"], here["OMP_NUM_THREADS"]) == (
        "3",
        "4",
        "3",
        "2",
    )
    assert (here["PYTORCH_ALLOC_CONF"], here["PYTHONUNBUFFERED"], here["CUDA_VISIBLE_DEVICES"]) == (
        "x",
        "",
        "2,3",
    )
    assert (here["MEMTUNE_RENDEZVOUS"], here["GLOO_SOCKET_IFNAME"]) == ("file:///scratch/rendezvous", "lo")
    there = rank_env(trial, Place([3], rendezvous="tcp://10.0.0.1:1234"), 0, "/scratch", "mark")
    assert (there["RANK"], there["LOCAL_RANK"], there["MEMTUNE_RENDEZVOUS"]) == (
        "3",
        "0",
        "tcp://10.0.0.1:1234",
    )
    assert "GLOO_SOCKET_IFNAME" not in there


def test_ranks_listen_on_loopback_only(ground, meanwhile):
    cancelled = threading.Event()
    trial = ground.trial("gloo_sum", ranks=2, skip=1)
    result = meanwhile(lambda: run_group(trial, ground.command, log_dir=ground.logs, cancelled=cancelled))
    listening = [
        each.laddr.ip
        for process in [psutil.Process(pid) for pid in (ground.pid("rank-1"), *ground.left())]
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    cancelled.set()
    assert result() is None
    assert set(listening) == {"127.0.0.1"}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("skip", [0, 1])
def test_silence_is_a_hang_and_names_first_silent_rank(ground, skip):
    """Rank 1 always says its last after rank 0; the stacks tell who waits for whom."""
    result, _ = run(ground, "gloo_sum", ranks=2, skip=skip, silence_s=2.0)
    assert result.status == "timeout"
    assert result.reason.startswith(f"rank {skip} stopped first at 'step 3/3'")
    assert "in sleep_long" in result.log_tail, "the stack says where it hangs"


def test_hang_ends_at_deadline_with_stacks(ground):
    result, _ = run(ground, "hang_in_wonderland", deadline_s=4)
    assert result.status == "timeout"
    assert "'step 2/9'" in result.reason
    assert "in hang_in_wonderland" in result.log_tail


def test_stopped_process_is_ended(ground):
    result, _ = run(ground, "stopped", deadline_s=4)
    assert result.status == "timeout"
    assert "in stopped" in result.log_tail


def test_child_that_ignores_sigterm_is_killed(ground, monkeypatch):
    monkeypatch.setattr("memtune.executors.monitor.GRACE_S", 0.5)
    assert run(ground, "stubborn", deadline_s=1.0)[0].status == "timeout"
    assert not psutil.pid_exists(ground.pid("stubborn"))


def test_leftover_daemon_is_killed_and_reported(ground):
    result, _ = run(ground, "daemon_then_well")
    assert result.status == "ok"
    assert result.audit["killed_leftovers"] == [f"{Path(sys.executable).name} (pid {ground.pid('daemon')})"]


def test_flood_of_output_does_not_block(ground):
    result, _ = run(ground, "flood", ranks=2)
    assert result.status == "ok"
    assert log_path(ground.logs, 1, 1).stat().st_size > 8e6


def test_log_is_truncated_while_it_grows(ground, monkeypatch):
    monkeypatch.setattr("memtune.executors.supervisor.LOG_LIMIT_BYTES", 0)
    from memtune.executors.supervisor import trim

    log = ground.path / "log"
    with log.open("a") as writer:
        writer.write("x" * (2 << 20))
        writer.flush()
        trim(str(log))
        writer.write("the end")
    text = log.read_text()
    assert len(text) < 1.1 * (1 << 20)
    assert text.endswith("xthe end")


@pytest.mark.parametrize("do", ["well_then_crash", "well_then_hang"])
def test_result_is_kept_after_later_failure(ground, do, monkeypatch):
    monkeypatch.setattr("memtune.executors.monitor.EXIT_S", 0.5)
    assert run(ground, do, ranks=2)[0].status == "ok"


def test_rank_killed_from_outside_is_repeated_once(ground, meanwhile):
    result = meanwhile(partial(run, ground, "lost_once", ranks=2))
    ground.pid("rank-0")
    os.kill(ground.pid("rank-1"), signal.SIGKILL)
    assert result()[0].status == "ok"
    assert result()[0].retried


def test_rank_killed_twice_is_a_crash(ground, meanwhile):
    result = meanwhile(partial(run, ground, "sleep_long"))
    for _ in range(2):
        pid = ground.pid("rank-0")
        (ground.path / "rank-0").unlink()
        os.kill(pid, signal.SIGKILL)
    result = result()[0]
    assert (result.status, result.retried) == ("crash", True)
    assert result.reason == "rank 0 was ended from outside (SIGKILL)"


def test_killed_supervisor_ends_all_ranks(ground, meanwhile):
    result = meanwhile(partial(run, ground, "lost_once", ranks=2))
    ground.pid("rank-0")
    shim_of(ground.pid("rank-1")).kill()
    assert result()[0].status == "ok"
    assert result()[0].retried


def test_killed_supervisor_leaves_no_daemon(ground, meanwhile):
    result = meanwhile(partial(run, ground, "daemon_then_sleep", deadline_s=3.0))
    ground.pid("daemon")
    shim_of(ground.pid("rank-0")).kill()
    assert result()[0].status == "timeout"
    assert ground.left() == []


def test_killed_rank_is_distinguished_from_consequences(ground, meanwhile):
    """Rank 0 fails because rank 1 has vanished; rank 1 is the one to name, and the trial is worth another
    try.
    """
    result = meanwhile(partial(run, ground, "gloo_sum", ranks=2, skip=1))
    for _ in range(2):
        pid = ground.pid("rank-1")
        (ground.path / "rank-1").unlink()
        os.kill(pid, signal.SIGKILL)
    assert result()[0].reason == "rank 1 was ended from outside (SIGKILL)"
    assert result()[0].retried


def test_rank_group_can_be_cancelled_from_another_thread(ground, meanwhile):
    cancelled = threading.Event()
    trial = ground.trial("sleep_long", ranks=2)
    result = meanwhile(lambda: run_group(trial, ground.command, log_dir=ground.logs, cancelled=cancelled))
    ground.pid("rank-0")
    cancelled.set()
    assert result() is None


def test_nonexistent_command_is_a_crash(ground):
    result = run_group(ground.trial("well"), ("/nowhere/python",), log_dir=ground.logs)
    assert result.status == "crash"
    assert "cannot start /nowhere/python" in result.reason


@pytest.fixture
def drives(ground, monkeypatch):
    """Two directories for tensors on SSD, and in one of them what the user's own training, which has died,
    kept.
    """
    found = [ground.path / "one", ground.path / "two"]
    for each in found:
        each.mkdir()
    users_own = found[0] / "memtune-run-users"
    users_own.mkdir(mode=0o700)
    for name in ("owner", "manifest-0"):
        (users_own / name).touch()
    monkeypatch.setenv("MEMTUNE_OFFLOAD_DIR", ":".join(map(str, found)))
    yield found
    assert [list(each.iterdir()) for each in found] == [[users_own], []]


def test_ssd_files_of_ranks_are_deleted(ground, drives):
    result, _ = run(ground, "on_drives", ranks=2)
    used = [Path(each) for each in result.audit["drives"].split(":")]
    assert [each.parent for each in used] == drives, (
        "a trial sees folders of its own, not what training keeps there"
    )


def test_ssd_files_are_deleted_if_ranks_and_supervisor_are_killed(ground, drives, meanwhile):
    result = meanwhile(lambda: run(ground, "on_drives", hang=True))
    pid = ground.pid("rank-0")
    shim_of(pid).kill()
    assert result()[0].retried
