"""Replaces torch's CUDA allocator by memtune's own (csrc/vmm).

torch accepts another allocator only before CUDA starts. So `import memtune` installs it if the environment
names one (`MEMTUNE_ALLOCATOR`, which `memtune run` and trials set), and `apply` checks that it was. torch has
no statistics of a pluggable allocator and raises when they are read: here memtune's own are returned under
torch's names, so that `torch.cuda.max_memory_allocated()` in a training loop goes on working.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from memtune import _native
from memtune.device import accelerator
from memtune.memory.arena_settings import VARIABLE, ArenaSettings

__all__ = ["install_from_environment", "installed", "snapshot", "why_not"]

_installed: ArenaSettings | None = None
_why_not = f"{VARIABLE} was not set when memtune was imported"
_allocator: Any = None  # torch keeps no reference of its own while nothing is allocated


def installed() -> ArenaSettings | None:
    """Return the settings of this process's CUDA allocator; None if it is not memtune's."""
    return _installed


def why_not() -> str:
    """Return the reason why `installed` is None."""
    return _why_not


def install_from_environment() -> None:
    """Install the allocator that `MEMTUNE_ALLOCATOR` names, without using a device.

    On failure `why_not` returns the reason.
    """
    global _installed, _why_not, _allocator
    if _installed is not None:
        return
    customise: Callable[[int, int], Any] | None = getattr(torch._C, "_cuda_customAllocator", None)
    if customise is None:
        _why_not = f"torch {torch.__version__} is a build without CUDA"
        return
    try:
        settings = ArenaSettings.parse(os.environ[VARIABLE])
    except (ValueError, KeyError) as error:
        _why_not = f"{VARIABLE}={os.environ.get(VARIABLE)} cannot be read: {error}"
        return
    alloc, free, record_stream, memory_fraction, empty_cache = _native.arena_cuda_functions()
    allocator = customise(alloc, free)
    allocator.set_record_stream_fn(record_stream)
    allocator.set_memory_fraction_fn(memory_fraction)
    allocator.set_reset_fn(empty_cache)
    try:
        # After the functions are set: torch takes them over with the allocator.
        torch._C._cuda_changeCurrentAllocator(allocator)
    except RuntimeError as error:  # CUDA has started: torch cannot change it any more
        _why_not = f"CUDA had started before memtune was imported ({str(error).splitlines()[0]})"
        return
    # Arenas are made per device at the first request, with these options.
    _native.arena_defaults(settings.options())
    # Last of all: until here torch's own allocator answers.
    _answer_for_torch()
    _installed, _allocator = settings, allocator


def _answer_for_torch() -> None:
    """Replace the functions through which torch.cuda queries its allocator."""
    answers = {
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": _native.arena_restart_peaks,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_memorySnapshot": snapshot,
    }
    for name, answer in answers.items():
        setattr(torch._C, name, answer)


def memory_stats(device: int) -> dict[str, Any]:
    """Return `torch.cuda.memory_stats_as_nested_dict`: current and peak bytes.

    Counters that memtune lacks are 0.
    """
    found = _native.arena_statistics(device)
    allocated = _pools(found.allocated_bytes, found.peak_allocated_bytes)
    reserved = _pools(found.reserved_bytes, found.peak_reserved_bytes)
    nothing = _pools(0, 0)
    counts = dict.fromkeys(
        ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes"), nothing
    )
    return {
        **counts,
        **dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), allocated),
        "reserved_bytes": reserved,
        "oversize_allocations": nothing["all"],
        "oversize_segments": nothing["all"],
        "max_split_size": -1,
        "num_alloc_retries": 0,
        "num_device_alloc": found.driver_calls,
        "num_device_free": 0,
        "num_ooms": found.failures,
        "num_sync_all_streams": 0,
    }


def _pools(current: int, peak: int) -> dict[str, dict[str, int]]:
    empty = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {"all": {**empty, "current": current, "peak": peak}, "large_pool": empty, "small_pool": empty}


def snapshot(_: Any = None) -> dict[str, Any]:
    """Return `torch.cuda.memory._snapshot()`.

    It has all driver memory and its blocks, without a history of requests.
    """
    # A block of several stitched pieces appears as those pieces, at their own addresses.
    devices = range(max(accelerator.count(), 1))
    segments = [_segment(device, *row) for device in devices for row in _native.arena_regions(device)]
    return {
        "segments": segments,
        "device_traces": [[] for _ in devices],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _segment(
    device: int, address: int, n_bytes: int, stream: int, kind: str, parts: list[tuple[int, int, bool]]
) -> dict[str, Any]:
    in_use = sum(size for _, size, used in parts if used)
    blocks: list[dict[str, Any]] = [
        {
            "address": at,
            "size": size,
            "requested_size": size,
            "state": "active_allocated" if used else "inactive",
            "frames": [],
        }
        for at, size, used in parts
    ]
    return {
        "device": device,
        "address": address,
        "total_size": n_bytes,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": in_use,
        "stream": stream,
        "segment_type": "small" if kind == "arena" else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": kind != "piece",
        "frames": [],
        "blocks": blocks,
        "memtune": kind,
    }
