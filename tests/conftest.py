"""Shared fixtures: an environment, a home directory and a CPU for tests alone, no network, plain terminal
output.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import site
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from memtune.executors import LocalExecutor

# Prefixes of the user's shell variables that memtune, its examples, torch, Ray, rich or Python would read.
_FOLLOWED = (
    *("MEMTUNE_CACHE", "MEMTUNE_OFFLOAD_DIR", "MEMTUNE_ALLOCATOR", "MEMTUNE_SEARCH_OWN_ALLOCATORS"),
    *("MEMTUNE_GPT_", "MEMTUNE_CNN_", "MEMTUNE_LLAMA_"),
    *("XDG_", "RAY_", "PYTORCH_", "CUBLAS_WORKSPACE_CONFIG", "FORCE_COLOR"),
    "PYTHONDONTWRITEBYTECODE",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
for _name in [each for each in os.environ if each.startswith(_FOLLOWED)]:
    del os.environ[_name]
sys.dont_write_bytecode = False  # else every process that tests start compiles the package again
gc.disable()  # until tests are collected: imports make a million objects that stay

# Before anything imports torch or a hub client; child processes inherit it. Tests do not use results of
# earlier searches.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_COLOR": "1",
    "COLUMNS": "130",
    "MEMTUNE_LEARN": "0",
}
# Tests share the cores: a thread that spins while it waits for its team takes them from the one that it waits
# for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads spin always


pytest_plugins = ["support.drawn_cases", "support.rate_readers", "support.suites.on_accelerator"]

# The same examples everywhere, however long each takes; --hypothesis-profile=default draws others.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Make the home directory of this test run, and save the rates of its CPU there; processes that tests
    start inherit it.
    """
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist is such a process
        os.environ.setdefault(
            "PYTHONUSERBASE", site.getuserbase()
        )  # packages installed for the user alone stay importable
        home = os.environ["HOME"] = tempfile.mkdtemp(prefix="memtune-tests-")
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    from fixed_cpu import rates
    from support import rate_readers

    from memtune.hardware import cpu_probe

    cpu = rates(os.environ.get("MEMTUNE_TEST_SPEED", "1"))
    cpu_probe.save(cpu)
    assert (
        cpu_probe.cpu() == cpu
    )  # from now on in this process, also in a test that moves the cache directory
    rate_readers.install()


@pytest.fixture
def fixed_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU of `fixed_cpu.py` at any MEMTUNE_TEST_SPEED, for plans made in this process."""
    from fixed_cpu import RATES

    from memtune.hardware import cpu_probe

    monkeypatch.setattr(cpu_probe, "cpu", lambda: RATES)


@pytest.fixture(scope="session")
def device() -> str:
    """Device of a test marked gpu: `cuda`, or the value of MEMTUNE_DEVICE (`make gpu-check DEVICE=cpu` sets
    cpu, `DEVICE=sim` the simulated accelerator).
    """
    import torch

    name = os.environ.get("MEMTUNE_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, and MEMTUNE_DEVICE=cpu is not set")
    return name


@pytest.fixture(scope="module")
def local_executor() -> Iterator[LocalExecutor]:
    """Local processes for trials: those of a file are forked from one server, which imports torch once."""
    from memtune.executors import LocalExecutor

    executor = LocalExecutor(1)
    yield executor
    executor.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run with one thread: for small tensors on a shared machine a second thread mostly waits."""
    from memtune.hardware.cpu_cores import cpu_threads

    with cpu_threads(1):
        yield


@pytest.fixture
def ssd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for tensors on SSD; it must be empty when the test's models are gone."""
    from memtune.ssd import offload_dir, ssd_tensors

    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    yield tmp_path
    used = ssd_tensors.opened()
    for _ in range(100):
        gc.collect()
        if used is None or used.used_bytes == 0:
            break
        time.sleep(0.05)  # a thread of autograd's engine drops what it ran when it next gets the interpreter
    assert used is None or used.used_bytes == 0


@pytest.fixture(autouse=True)
def _restored_variables() -> Iterator[None]:
    """Restore memtune's environment variables: a directory for offload adds candidates to later tests."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MEMTUNE_")}
    yield
    for name in [each for each in os.environ if each.startswith("MEMTUNE_") and each not in before]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _freeze_live_objects() -> Iterator[None]:
    """Freeze the objects that a module leaves, so that later garbage collections do not traverse them.

    Recordings and programs are millions of objects.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start with what the imports have made: recordings of other workers, objects that stay."""
    if "memtune.testing" in sys.modules:
        from support import forked_measurements, shared_recordings

        shared_recordings.install()
        forked_measurements.install()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra memtune[ray]")
    if item.get_closest_marker("native_ledger"):
        from memtune.memory import cpu_allocator

        if (fault := cpu_allocator.available()) is not None:
            pytest.skip(f"no native ledger here: {fault}")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the plugin that drops those not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Side by side, begin with the files that take longest."""
    yield
    if hasattr(config, "workerinput"):
        tests_of = Counter(item.path for item in items)
        items.sort(
            key=lambda item: (
                item.path.name not in _LONGEST,
                not _starts_processes(item),
                -tests_of[item.path],
                item.path,
            )
        )


_LONGEST = (
    *("test_study.py", "test_plan_report.py", "test_state_sharding_with_model_parallel.py"),
    *("test_study_resume.py", "test_parallel_trials.py", "test_dry_runs.py", "test_nested_sharding.py"),
)
"""Files that take more than 20 CPU seconds and would leave the other workers idle if they came last."""


def _starts_processes(item: pytest.Item) -> bool:
    """Return whether the file starts ranks or other processes: few tests, which take long. Last of all, they
    would leave the other workers idle.
    """
    return any(hasattr(getattr(item, "module", None), name) for name in ("run_ranks", "FRESH", "subprocess"))
