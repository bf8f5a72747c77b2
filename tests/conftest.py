"""Shared by all tests: no network, plain terminal output, and what a test marked gpu or ray needs."""

from __future__ import annotations

import gc
import importlib.util
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch or a hub client; child processes inherit it. What earlier searches taught stays out of tests.
os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "NO_COLOR": "1", "COLUMNS": "130", "MEMTUNE_LEARN": "0"}
# Tests share the cores: a thread that spins while it waits for its team takes them from the one that it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def device() -> str:
    """Where a test marked gpu runs: `cuda`, or what MEMTUNE_DEVICE says (`make gpu-check DEVICE=cpu` says cpu)."""
    import torch

    name = os.environ.get("MEMTUNE_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, and MEMTUNE_DEVICE=cpu is not set")
    return name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors on a shared machine: a second thread mostly waits."""
    from memtune.cores import cpu_threads

    with cpu_threads(1):
        yield


@pytest.fixture
def ssd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tensors on SSD go; nothing may be left there when the test's models are gone."""
    from memtune.runtime import disk, offload_dir

    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    yield tmp_path
    gc.collect()
    used = disk.opened()
    assert used is None or used.used_bytes == 0


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_not_searched_again() -> Iterator[None]:
    """Recordings and programs that a module leaves behind are millions of objects; each collection after it would visit them."""
    yield
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra memtune[ray]")


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`drawn(n)`: n of a test's cases run by default, evenly spread and other ones for each test; the rest is marked slow."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in grids.items():
        mark = cases[0].get_closest_marker("drawn")
        assert mark is not None
        (n,) = mark.args
        first = zlib.crc32(name.encode())
        kept = {(first + i * len(cases) // n) % len(cases) for i in range(n)}
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker(pytest.mark.slow)
