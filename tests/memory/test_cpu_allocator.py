"""The native CPU ledger: exact bytes per tier, and a budget that raises torch's error and is recoverable."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from memtune.errors import EnvironmentFault
from memtune.memory import cpu_allocator
from memtune.runtime.memory_tiers import HOST, SSD, tier, tier_of

pytestmark = pytest.mark.native_ledger


@pytest.fixture(autouse=True)
def base(one_thread: None) -> Iterator[int]:
    """Device bytes that were live before the test; the budget is lifted after it."""
    cpu_allocator.install()
    gc.collect()
    cpu_allocator.reset_peak()
    yield cpu_allocator.live_bytes()
    cpu_allocator.set_budget(None)
    cpu_allocator.set_budget(None, HOST)


def test_live_bytes_equal_requested_bytes(base: int) -> None:
    a = torch.empty(1000)
    b = torch.empty(3, 7, dtype=torch.int8)
    assert cpu_allocator.live_bytes() - base == 4000 + 21
    del a
    assert cpu_allocator.live_bytes() - base == 21
    assert cpu_allocator.peak_bytes() - base == 4021
    del b
    cpu_allocator.reset_peak()
    assert (cpu_allocator.live_bytes(), cpu_allocator.peak_bytes()) == (base, base)


def test_blocks_are_aligned_and_empty_ones_are_free(base: int) -> None:
    blocks = [torch.empty(n, dtype=torch.uint8) for n in (1, 63, 64, 65, 100_000)]
    assert all(block.data_ptr() % 64 == 0 for block in blocks)
    assert cpu_allocator.live_bytes() - base == 1 + 63 + 64 + 65 + 100_000
    nothing = torch.empty(0)
    assert cpu_allocator.live_bytes() - base == 100_193
    assert not cpu_allocator.counted(nothing.untyped_storage())


def test_peak_includes_kernel_workspace(base: int) -> None:
    flags = torch.ones(1000, dtype=torch.bool)
    cpu_allocator.reset_peak()
    total = flags.cumsum(0)  # casts its input to int64 first
    assert cpu_allocator.peak_bytes() - base == 1000 + 2 * 8000
    assert cpu_allocator.live_bytes() - base == 1000 + total.nbytes


def test_resize_frees_and_reallocates(base: int) -> None:
    block = torch.empty(1000)
    block.untyped_storage().resize_(0)
    assert cpu_allocator.live_bytes() == base
    block.untyped_storage().resize_(800)
    assert cpu_allocator.live_bytes() - base == 800


def test_tiers_are_counted_separately_and_nest(base: int) -> None:
    host, ssd = cpu_allocator.live_bytes(HOST), cpu_allocator.live_bytes(SSD)
    with tier("host"):
        a = torch.empty(100)
        with tier("ssd"):
            b = torch.empty(10)
        c = torch.empty(1)
    d = torch.empty(5)
    assert [
        cpu_allocator.live_bytes("device") - base,
        cpu_allocator.live_bytes(HOST) - host,
        cpu_allocator.live_bytes(SSD) - ssd,
    ] == [20, 404, 40]
    assert [tier_of(x) for x in (a, b, c, d)] == ["host", "ssd", "host", "device"]
    del a, b, c
    assert (cpu_allocator.live_bytes(HOST), cpu_allocator.live_bytes(SSD)) == (host, ssd)


def test_block_returns_to_its_tier_from_any_context(base: int) -> None:
    host = cpu_allocator.live_bytes(HOST)
    with tier("host"):
        held = [torch.empty(100)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert (cpu_allocator.live_bytes(), cpu_allocator.live_bytes(HOST)) == (base, host)


def test_tier_is_thread_local(base: int) -> None:
    inside, made = threading.Barrier(2), []

    def copier() -> None:
        with tier("host"):
            inside.wait()
            made.append(torch.empty(100))

    thread = threading.Thread(target=copier)
    thread.start()
    inside.wait()
    mine = torch.empty(100)
    thread.join()
    assert (tier_of(mine), tier_of(made[0])) == ("device", "host")


def test_budget_error_has_op_request_live_and_budget(base: int) -> None:
    layer, x = nn.Linear(100, 100), torch.randn(1000, 100)
    live = cpu_allocator.live_bytes()
    cpu_allocator.set_budget(live + 399_999)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        layer(x)
    message = str(caught.value)
    assert "in aten::addmm (in aten::linear)" in message
    assert (
        f"asks for 400000 bytes, but {live} of the {live + 399_999} bytes of device memory are live"
        in message
    )
    assert (
        f"device {live}, host {cpu_allocator.live_bytes(HOST)}, ssd {cpu_allocator.live_bytes(SSD)}"
        in message
    )


def test_budget_is_inclusive_and_recovers(base: int) -> None:
    cpu_allocator.set_budget(base + 4000)
    with pytest.raises(torch.OutOfMemoryError, match="in aten::zeros:"):
        torch.zeros(1001)
    assert (cpu_allocator.live_bytes(), cpu_allocator.peak_bytes()) == (base, base)
    fits = torch.zeros(1000)
    assert cpu_allocator.live_bytes() - base == fits.nbytes


def test_backward_over_budget_can_be_repeated(base: int) -> None:
    layer, x = nn.Linear(100, 100), torch.randn(1000, 100)

    def step() -> torch.Tensor:
        layer.zero_grad()
        layer(x).relu().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    expected = step()
    layer.zero_grad()
    before = cpu_allocator.live_bytes()
    cpu_allocator.set_budget(
        before + 800_000
    )  # two outputs of the forward; the loss and its gradient make it two floats more
    with pytest.raises(torch.OutOfMemoryError, match="backward"):
        step()
    assert cpu_allocator.live_bytes() == before
    cpu_allocator.set_budget(None)
    assert torch.equal(step(), expected)


def test_budget_is_per_tier(base: int) -> None:
    cpu_allocator.set_budget(base)
    with tier("host"):
        torch.empty(1000)
    cpu_allocator.set_budget(None)
    cpu_allocator.set_budget(cpu_allocator.live_bytes(HOST), HOST)
    torch.empty(1000)
    with tier("host"), pytest.raises(torch.OutOfMemoryError, match="bytes of host memory"):
        torch.empty(1)


def test_threads_never_exceed_budget(base: int) -> None:
    cpu_allocator.set_budget(base + 40_000)
    refused = []

    def churn() -> None:
        held = []
        for i in range(400):
            try:
                held.append(torch.empty(1000 + i % 7, dtype=torch.uint8))
            except torch.OutOfMemoryError:
                refused.append(i)
                held.clear()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    assert cpu_allocator.live_bytes() == base
    assert base < cpu_allocator.peak_bytes() <= base + 40_000


def test_foreign_memory_is_not_counted(base: int) -> None:
    foreign = torch.frombuffer(bytearray(64), dtype=torch.float32)
    assert cpu_allocator.live_bytes() == base
    assert not cpu_allocator.counted(foreign.untyped_storage())
    assert cpu_allocator.counted(torch.empty(1).untyped_storage())
    assert tier_of(foreign) == "device"


def test_profiler_sees_memory(base: int) -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(1000)
    assert any(event.name == "[memory]" for event in profile.events())


@pytest.mark.parametrize(
    ("compiler", "says"), [("false", "could not compile"), ("/no/such/compiler", "could not be built")]
)
def test_available_reports_broken_compiler(
    compiler: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path))
    found = cpu_allocator._load.__wrapped__()
    assert isinstance(found, EnvironmentFault)
    assert says in str(found)
    assert not list(tmp_path.rglob("*.so"))


def test_available_reports_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path))
    found = cpu_allocator._load.__wrapped__()
    assert isinstance(found, EnvironmentFault)
    assert "no C++ compiler was found" in str(found)


def test_cache_dir_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTUNE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cpu_allocator.cache_dir() == Path("/a")
    monkeypatch.delenv("MEMTUNE_CACHE")
    assert cpu_allocator.cache_dir() == Path("/b/memtune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cpu_allocator.cache_dir() == Path.home() / ".cache" / "memtune"


_FRESH = """
import torch
from memtune.memory import cpu_allocator as shim
shim.install()
layer = torch.nn.Linear(10, 20)
print(shim.live_bytes())
"""


@pytest.mark.slow
def test_concurrent_builds_count_from_zero(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _FRESH],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MEMTUNE_CACHE": str(tmp_path)},
        )
        for _ in range(2)
    ]
    assert [int(child.communicate(timeout=120)[0]) for child in children] == [4 * (10 * 20 + 20)] * 2
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiles under a lock, for a second of CPU time; the others wait for it."""
    compiled: list[Path] = []
    monkeypatch.setattr(cpu_allocator, "_build", compiled.append)
    target = tmp_path / "native" / "ledger.so"
    target.parent.mkdir()
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process
        thread = threading.Thread(target=cpu_allocator._ensure_built, args=(target,))
        thread.start()
        thread.join(0.2)
        target.touch()
    thread.join()
    assert compiled == []
    target.unlink()
    cpu_allocator._ensure_built(target)
    assert compiled == [target]
