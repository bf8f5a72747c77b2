"""Bytes that torch's caching allocator and its pinned allocator count, and the limit on a process.

Functions of the device's own module come first, those of `torch.accelerator` second: memtune's allocator for
CUDA (`memory.cuda_arena`) answers for the former only.
"""

from __future__ import annotations

from typing import Any

import torch

from memtune.device.accelerator import module_of, platform_of
from memtune.device.platforms import Capability
from memtune.errors import EnvironmentFault


def _function(device: torch.device, name: str) -> Any:
    return getattr(module_of(device), name, None) or getattr(torch.accelerator, name)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on `device` now."""
    return int(_function(device, "memory_allocated")(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """Return the largest `allocated_bytes` since the start or the last `reset_peaks`."""
    return int(_function(device, "max_memory_allocated")(device))


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the largest number of bytes that the allocator held from the driver, since the last reset."""
    return int(_function(device, "max_memory_reserved")(device))


def requested_bytes(device: torch.device, which: str) -> int:
    """Return the bytes that tensors asked for, `current` or `peak`, before the allocator rounds them."""
    # Allocators that do not count them report the rounded ones.
    found = _function(device, "memory_stats")(device)
    return int(found.get(f"requested_bytes.all.{which}", found.get(f"allocated_bytes.all.{which}", 0)))


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks of device memory to the present bytes."""
    _function(device, "reset_peak_memory_stats")(device)


def reset_pinned_peaks(device: torch.device) -> None:
    """Reset the peaks of pinned host memory to the present bytes, if the module of `device` counts it."""
    reset = getattr(module_of(device), "reset_peak_host_memory_stats", None)
    if reset is not None:
        reset()


def pinned_bytes(device: torch.device, which: str) -> int:
    """Return pinned host bytes, `current` or `peak`; 0 if the device's module does not count them."""
    counted = getattr(module_of(device), "host_memory_stats", None)
    found = {} if counted is None else counted()
    return int(found.get(f"active_bytes.{which}", found.get(f"allocated_bytes.{which}", 0)))


def total_bytes(device: torch.device) -> int:
    """Return the memory of `device`."""
    asked = getattr(module_of(device), "get_device_properties", None)
    if asked is not None:
        return int(asked(device).total_memory)
    _, total = torch.accelerator.get_memory_info(device)
    return int(total)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of `device` that no process holds."""
    asked = getattr(module_of(device), "mem_get_info", None) or torch.accelerator.get_memory_info
    return int(asked(device)[0])


def limit(device: torch.device, n_bytes: int | None) -> None:
    """Raise the out-of-memory error above `n_bytes` reserved bytes from now on; None lifts the limit.

    Raises:
        EnvironmentFault: Torch cannot limit this device's memory.
    """
    if Capability.LIMIT in platform_of(device).capabilities:
        # torch multiplies it by the total again; the limit holds for reserved bytes, segments included.
        fraction = 1.0 if n_bytes is None else min(1.0, n_bytes / total_bytes(device))
        module_of(device).set_per_process_memory_fraction(fraction, device)
    elif n_bytes is not None:
        raise EnvironmentFault(
            f"torch cannot limit the memory of a process on {device.type}.",
            fix="leave --max-memory out: the device's own memory is then the limit",
            code="MT132",
        )
