"""Starting the simulated accelerator in this process, and the races that it found."""

from __future__ import annotations

from typing import Literal

import torch
from support.simulated_device import other_allocator
from support.simulated_device.build import build
from torch.utils import backend_registration

_started = False


def start(
    n_devices: int = 2,
    capacity_bytes: int = 4 << 30,
    *,
    pace: Literal["immediate", "random", "deferred"] = "deferred",
    seed: int = 0,
    raises: bool = True,
) -> None:
    """Register the device type `sim` in torch, for the rest of the process; compile it at its first use.

    A further call may change `pace`, `seed` and `raises` only.

    Args:
        n_devices: Number of devices.
        capacity_bytes: Memory of each device.
        pace: Of kernels and copies: when issued, at a later op drawn with `seed`, or as late as events
            allow.
        seed: Of the draws for `pace="random"`.
        raises: Whether a race is an error at the op that makes it, or only added to `races`.

    Raises:
        EnvironmentFault: It could not be compiled.
        RuntimeError: Another PrivateUse1 device is registered, or the number or size of devices would change.
    """
    global _started
    if not _started:
        torch.ops.load_library(str(build()))
        backend_registration.rename_privateuse1_backend("sim")
    torch.ops.memtune_sim.start(n_devices, capacity_bytes, pace, seed, raises, other_allocator.addresses)
    if not _started:
        from support.simulated_device import process_group, torch_module

        torch._register_device_module("sim", torch_module)
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
        process_group.register()
        _started = True


def races() -> list[str]:
    """Return the races found since the last call, one sentence each, and forget them."""
    return list(torch.ops.memtune_sim.take_races())


def lose() -> None:
    """Lose the devices of this process: from now on each use of one raises `torch.AcceleratorError`."""
    torch.ops.memtune_sim.lose()
