"""Number of trials side by side: disjoint GPUs, NUMA nodes, and cores where no time is compared."""

from __future__ import annotations

import pytest

from memtune.errors import UsageError
from memtune.executors import trial_room
from memtune.executors.trial_room import check_gpus, local_slots


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(trial_room, "usable_cores", lambda: 32)
    monkeypatch.setattr(trial_room, "numa_nodes", lambda: 2)
    return monkeypatch


def test_trials_on_gpus_have_gpus_and_cores_of_their_own(machine: pytest.MonkeyPatch) -> None:
    assert [local_slots("cuda", ranks, timed=True) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    machine.setattr(trial_room, "usable_cores", lambda: 8)
    assert local_slots("cuda", 1, timed=True) == 4


def test_timed_trials_on_cpu_have_a_numa_node_each(machine: pytest.MonkeyPatch) -> None:
    assert local_slots("cpu", 4, timed=True) == 2
    assert local_slots("cpu", 17, timed=True) == 1
    machine.setattr(trial_room, "numa_nodes", lambda: 1)
    assert local_slots("cpu", 4, timed=True) == 1
    assert local_slots("cpu", 4, timed=False) == 8


def test_more_trials_than_gpus_are_refused() -> None:
    check_gpus(4, 2, 8)
    with pytest.raises(UsageError, match="--parallel 5 needs 10 GPUs"):
        check_gpus(5, 2, 8)
