"""Errors of devices: out of memory, and a device that is lost."""

from __future__ import annotations

import torch

from memtune.device.accelerator import device_type, platform_of
from memtune.device.platforms import PLATFORMS
from memtune.errors import EnvironmentFault

_OUT_OF_MEMORY = tuple(dict.fromkeys(text for each in PLATFORMS.values() for text in each.out_of_memory))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error of a device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).lstrip().startswith(
        (*_OUT_OF_MEMORY, *_described())
    )


def _described() -> tuple[str, ...]:
    """Return the messages of an accelerator that describes itself."""
    there = device_type()
    return () if there is None else platform_of(there).out_of_memory


def is_lost(error: BaseException) -> bool:
    """Return True if `error` says that the device runs no more kernels of this process.

    Torch raises `AcceleratorError` for an error of the driver. Except for a lack of memory it persists: each
    later call raises it again.
    """
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def lost_error(error: BaseException, device: torch.device) -> EnvironmentFault:
    """Return the error for the user when `device` is lost with `error` in the middle of a step."""
    lines = str(error).strip().splitlines()
    return EnvironmentFault(
        f"The device {device} was lost in the middle of a training step.",
        evidence=f"torch: {lines[0] if lines else type(error).__name__}",
        fix=(
            "end this process and resume from the last checkpoint; state in host memory is that of the last"
            " complete step. If the line names an assertion or an address, the model's own code caused it:"
            " run again on CPU, which names the op"
        ),
        code="MT133",
    )
