"""Torch's modules of devices have the functions that are called on a GPU, with these arguments.

A build for the CPU has them too, and no driver is needed to hold a call against a signature.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memtune.device import accelerator, memory_statistics
from memtune.memory import cuda_arena

ANSWERS: dict[str, Any] = {
    "memory_stats": {"requested_bytes.all.current": 1},
    "host_memory_stats": {"active_bytes.peak": 1},
    "mem_get_info": (1, 2),
    "get_device_capability": (9, 0),
    "get_device_name": "device",
}


class Module:
    """A module of torch whose functions take their arguments, and answer without a driver."""

    def __init__(self, module: Any) -> None:
        self._module, self.called = module, set[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name)  # an AttributeError where torch has none

        def called(*args: Any, **kwargs: Any) -> Any:
            inspect.signature(function).bind(*args, **kwargs)
            self.called.add(name)
            if name == "get_device_properties":
                return type("Properties", (), {"total_memory": 1 << 30, "major": 9, "minor": 0})
            return ANSWERS.get(name, 1)

        return called


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("cuda", set[str]()), ("xpu", {"host_memory_stats", "reset_peak_host_memory_stats"})],
)
def test_functions_of_a_device_exist_and_take_these_arguments(
    kind: str, missing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, device = Module(getattr(torch, kind)), torch.device(kind, 1)
    for room in (accelerator, memory_statistics):
        monkeypatch.setattr(room, "module_of", lambda asked: module)
    monkeypatch.setattr(accelerator, "device_type", lambda: kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    statistics = memory_statistics
    assert statistics.allocated_bytes(device) == statistics.peak_allocated_bytes(device) == 1
    assert statistics.peak_reserved_bytes(device) == statistics.requested_bytes(device, "current") == 1
    assert statistics.free_bytes(device) == 1
    assert statistics.total_bytes(device) == 1 << 30
    for call in (statistics.reset_peaks, statistics.reset_pinned_peaks):
        call(device)
    for n_bytes in (1 << 20, None):
        statistics.limit(device, n_bytes)
    assert statistics.pinned_bytes(device, "peak") == int(not missing)
    assert accelerator.is_started()
    assert accelerator.name(device) == "device"
    assert accelerator.reaches_peer(0, 1)
    assert accelerator.architecture(device) == ("sm90" if kind == "cuda" else kind)
    assert accelerator.compute_capability(device) == ((9, 0) if kind == "cuda" else None)
    accelerator.set_rng_state(device, accelerator.get_rng_state(device))
    wanted = {
        *("memory_allocated", "max_memory_allocated", "max_memory_reserved", "memory_stats", "mem_get_info"),
        *("reset_peak_memory_stats", "reset_peak_host_memory_stats", "host_memory_stats"),
        *("get_device_properties", "set_per_process_memory_fraction", "is_initialized", "get_device_name"),
        *("can_device_access_peer", "get_rng_state", "set_rng_state"),
    }
    of_cuda = {"get_device_capability"} if kind == "cuda" else set()
    assert module.called == (wanted | of_cuda) - missing


def test_replaced_functions_are_those_that_torch_calls() -> None:
    """`torch.cuda` asks its allocator through these names, each with one argument."""
    stubs = Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text()
    for name in ("memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats", "memorySnapshot"):
        signature = re.search(rf"def _cuda_{name}\(([^)]*)\)", stubs)
        assert signature is not None, name
        assert signature[1].strip().rstrip(",").count(":") == 1, name
    assert re.search(r"def _cuda_customAllocator\(alloc_fn: _int, free_fn: _int\)", stubs)
    assert re.search(r"def _cuda_changeCurrentAllocator\(allocator: _cuda_CUDAAllocator\)", stubs)
    assert inspect.signature(cuda_arena.snapshot).bind((0, 0, True))


@pytest.mark.parametrize(
    ("selected", "local_rank", "devices", "expected"),
    [(0, "3", 8, 3), (2, "3", 8, 2), (0, "3", 1, 0), (0, "", 8, 0)],
    ids=["torchrun", "selected by the script", "one visible device a rank", "no torchrun"],
)
def test_with_index_gives_each_rank_of_torchrun_its_device(
    selected: int, local_rank: str, devices: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: selected)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert accelerator.with_index(torch.device("cuda")) == torch.device("cuda", expected)
    assert accelerator.with_index(torch.device("cuda:1")) == torch.device("cuda:1")
