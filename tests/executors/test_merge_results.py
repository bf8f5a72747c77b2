"""Merging exits and records of ranks into one result."""

from __future__ import annotations

import os
import select
import signal
import types

import pytest

from memtune.executors import supervisor
from memtune.executors.base import AMOUNT_REFUSALS, CAPACITY_ERRORS, HOST_MEMORY_RAN_OUT, Trial
from memtune.executors.merge_results import (
    Failure,
    RankExit,
    RankRecord,
    failed,
    failure_of_end,
    failure_of_record,
    merge,
    root_failure,
)
from memtune.executors.supervisor import free_memory, oom_kills


@pytest.mark.parametrize(
    ("kills", "least_free", "killing", "host_oom"),
    [(3, 1.0, False, False), (4, 1.0, False, True), (3, 0.0, False, True), (4, 0.0, True, False)],
)
def test_sigkill_while_the_host_has_no_memory_is_reported_as_that(
    monkeypatch, tmp_path, kills, least_free, killing, host_oom
):
    """The kernel has killed for memory since the start, or little was free; not if the trial was to end."""
    monkeypatch.setattr(supervisor, "oom_kills", lambda: kills)
    told = []
    mine = types.SimpleNamespace(
        poll=select.poll(), oom_kills=3, least_free=least_free, killing=killing, relay=lambda rank: False
    )
    mine.tell = told.append
    (tmp_path / "log").touch()
    rank = supervisor.Rank(0, str(tmp_path / "log"), os.open(os.devnull, os.O_RDONLY))
    supervisor.Supervisor.tell_exit(mine, rank, -signal.SIGKILL)
    assert [each["host_oom"] for each in told] == [host_oom]


@pytest.mark.parametrize(
    ("code", "host_oom", "reason", "lost"),
    [
        (-signal.SIGKILL, False, "was ended from outside (SIGKILL)", True),
        (-signal.SIGKILL, True, "was killed (SIGKILL) when the memory of the host had run out", False),
        (-signal.SIGTERM, False, "was ended from outside (SIGTERM)", True),
        (-signal.SIGBUS, False, "was ended by SIGBUS: a bus error often means that /dev/shm is full", False),
        (-signal.SIGABRT, False, "was ended by SIGABRT", False),
        (-40, False, "was ended by signal 40", False),
        (1, False, "ended with exit code 1 before its result: nothing was printed", False),
    ],
)
def test_failure_of_end_by_exit_code_and_signal(code, host_oom, reason, lost):
    failure = failure_of_end(RankExit(0, code, host_oom=host_oom))
    assert (failure.reason, failure.lost) == (reason, lost)


def test_root_failure_ignores_consequences():
    echo, second, cause = (
        Failure(0, "crash", "peer gone"),
        Failure(2, "crash", "too"),
        Failure(1, "oom", "5 GiB", root=True),
    )
    assert root_failure([echo, second, cause]) is cause
    assert root_failure([echo, second]) is echo


def test_merge_throughput_counts_all_ranks():
    trial = Trial(number=1, workload="m.py", config={}, ranks=2, global_batch=8)
    records = {rank: RankRecord(status="ok", step_s_all=[1.0, 2.0 + rank, 3.0]) for rank in range(2)}
    assert merge(trial, records, 1.0).samples_per_s == pytest.approx(8 / 3)
    records[0] = records[0].model_copy(update={"samples_per_step": 6})
    assert merge(trial, records, 1.0).samples_per_s == pytest.approx(2)


def test_merge_attributes_no_load_of_unequal_ranks_to_others():
    records = {
        rank: RankRecord(status="ok", step_s_all=[1.0], other_load=load)
        for rank, load in enumerate((0.3, -0.28))
    }
    trial = Trial(number=0, workload="model.py", config={}, ranks=2)
    assert merge(trial, records, wall_s=1.0).other_load == pytest.approx(0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_merge_keeps_error_code_of_any_rank(ranks):
    record = RankRecord(status="unfit", reason="MT366 The host has too little memory", code="MT366")
    failure = failure_of_record(1, record)
    assert failure is not None
    assert (
        failed(Trial(number=1, workload="m.py", config={}, ranks=ranks), failure, "", 1.0).code
        in CAPACITY_ERRORS
    )


def test_refusal_key_has_code_and_place_without_numbers():
    def refusal(reason, code, place="memtune.activations.recompute.activation_table:295", status="unfit"):
        record = RankRecord(status=status, reason=reason, code=code, raised_at=place)
        failure = failure_of_record(1, record)
        assert failure is not None
        return failed(Trial(number=1, workload="m.py", config={}, ranks=2), failure, "", 1.0).refusal

    first = refusal("MT309 saved 12 tensors", "MT309")
    assert first is not None
    assert first == refusal("MT309 saved 7 tensors", "MT309")
    assert first != refusal("MT309 saved 12 tensors", "MT310")
    assert first != refusal("MT309 saved 12 tensors", "MT309", "memtune.parallel.sharding.nested_sharding:96")
    assert {refusal("too little", code) for code in (*AMOUNT_REFUSALS, "")} == {None}
    crashed = refusal("MT309 saved 12 tensors", "MT309", status="crash")
    assert crashed not in (None, first)
    assert crashed == refusal("MT309 saved 7 tensors", "MT309", status="crash")
    assert refusal(f"was killed when {HOST_MEMORY_RAN_OUT}", "", status="crash") is None


def test_free_memory_is_read():
    assert 0 < free_memory() <= 1
    assert oom_kills() >= 0
