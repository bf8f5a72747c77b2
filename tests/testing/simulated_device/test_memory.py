"""Memory of the simulated accelerator: statistics, capacity, patterns in freed memory, protection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.simulated_ranks import CAPACITY_BYTES

pytestmark = pytest.mark.device
MIB = 1 << 20


def test_statistics_follow_the_caching_allocator() -> None:
    torch.sim.synchronize()
    torch.sim.empty_cache()
    torch.sim.reset_peak_memory_stats()
    before, reserved = torch.sim.memory_allocated(), torch.sim.memory_reserved()
    small, large = torch.empty(100, device="sim:0"), torch.empty(3 * MIB, dtype=torch.uint8, device="sim:0")
    assert torch.sim.memory_allocated() - before == 512 + 3 * MIB
    assert torch.sim.memory_reserved() - reserved in (
        20 * MIB,
        22 * MIB,
    )  # a segment of the small pool may be there
    del small, large
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() - before == 512 + 3 * MIB
    held = torch.sim.memory_reserved()
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() <= held - 20 * MIB
    assert torch.sim.max_memory_reserved() == held


def test_capacity_raises_torchs_out_of_memory_error_and_leaves_the_counts() -> None:
    _, total = torch.sim.mem_get_info()
    assert total == CAPACITY_BYTES
    before = torch.sim.memory_allocated()
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"sim out of memory. Tried to allocate 512.00 MiB. .* of 256.00 MiB",
    ):
        torch.empty(2 * CAPACITY_BYTES, dtype=torch.uint8, device="sim:0")
    assert torch.sim.memory_allocated() == before
    assert torch.sim.memory_stats()["num_ooms"] >= 1
    half = torch.empty(CAPACITY_BYTES // 2, dtype=torch.uint8, device="sim:0")
    assert half.numel() == CAPACITY_BYTES // 2


def test_pinned_bytes_are_counted_until_the_copies_that_use_them_are_over() -> None:
    torch.sim.synchronize()
    before = torch.sim.host_memory_stats()["active_bytes.current"]
    torch.sim.reset_peak_host_memory_stats()
    host = torch.ones(3 * MIB, dtype=torch.uint8).pin_memory()
    moved = host.to("sim:0", non_blocking=True)
    del host
    assert torch.sim.host_memory_stats()["active_bytes.current"] - before == 4 * MIB
    torch.sim.synchronize()
    assert torch.sim.host_memory_stats() == {
        "active_bytes.current": before,
        "active_bytes.peak": before + 4 * MIB,
    }
    assert moved.sum().item() == 3 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_new_and_freed_memory_is_nan(dtype: torch.dtype) -> None:
    address = torch.ones(1000, dtype=dtype, device="sim:0").data_ptr()  # freed at once
    again = torch.empty(1000, dtype=dtype, device="sim:0")
    assert again.data_ptr() == address
    assert again.isnan().all().item()


def test_host_cannot_read_device_memory() -> None:
    code = (
        "import ctypes, torch; from support.simulated_device import start; start(1);"
        "ctypes.string_at(torch.ones(10, device='sim:0').data_ptr(), 4)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == -11
    assert "the host accessed the memory of sim:0" in done.stderr


def test_resized_storages_keep_their_bytes_and_free_them() -> None:
    before = torch.sim.memory_allocated()
    tensor = torch.arange(1000.0, device="sim:0")
    tensor.untyped_storage().resize_(8000)
    assert torch.equal(tensor.cpu(), torch.arange(1000.0))
    tensor.untyped_storage().resize_(0)
    assert torch.sim.memory_allocated() == before
