from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memtune.hardware.cpu_cores import (
    core_sets,
    cpu_threads,
    numa_nodes,
    threads_per_rank,
    usable_cores,
    use_share_of_cores,
)


def test_cpu_threads_restores_count_after_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match=f"on {before + 1} threads"), cpu_threads(before + 1):
        _fail()
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before


def test_threads_per_rank_is_at_least_one() -> None:
    assert [threads_per_rank(8, ranks) for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("launcher", "threads", "ranks", "expected"),
    [("a run", "1", "2", 3), ("a run", "2", "2", 1), ("", "1", "2", 1), ("a run", "1", "9", 1)],
)
def test_use_share_of_cores_replaces_torchruns_one_thread_only(
    monkeypatch, launcher, threads, ranks, expected
) -> None:
    monkeypatch.setattr("memtune.hardware.cpu_cores.usable_cores", lambda: 6)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with cpu_threads(1):
        use_share_of_cores()
        assert torch.get_num_threads() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_usable_cores_follows_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    code = (
        f"import os; os.sched_setaffinity(0, {one}); from memtune.hardware.cpu_cores import usable_cores;"
        " print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (int(done.stdout), usable_cores()) == (1, len(allowed))


def _fail() -> None:
    raise RuntimeError(f"on {torch.get_num_threads()} threads")


def two_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight hyperthreads: core n and n + 4 are one physical core; odd physical cores are on node 1."""
    for core in range(8):
        place = folder / "cpu" / f"cpu{core}"
        (place / "topology").mkdir(parents=True)
        (place / f"node{core % 2}").mkdir()
        (place / "topology/core_id").write_text(f"{core % 4}\n")
        (place / "topology/physical_package_id").write_text("0\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_core_sets_keep_hyperthreads_and_numa_nodes_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    two_nodes(tmp_path, monkeypatch)
    assert numa_nodes(tmp_path) == 2
    assert core_sets(2, tmp_path) == [(0, 4, 2, 6), (1, 5, 3, 7)]
    assert core_sets(4, tmp_path) == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert core_sets(3, tmp_path) == [(0, 4), (2, 6), (1, 5)]
    assert core_sets(9, tmp_path) == []
