"""State of an accelerator's default random generators, as host tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from memtune.device.accelerator import count, device_type, is_started, module_of, platform_of


def get_state(device: torch.device) -> Tensor:
    """Return the state of the generator of `device`, an accelerator: uint8 on the host."""
    state: Tensor = module_of(device).get_rng_state(device)
    return state


def set_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the generator of `device`, an accelerator."""
    module_of(device).set_rng_state(state, device)


def forked(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that restores the generators of CPU and of `device` at its end."""
    # Torch takes the type from the accelerator, or assumes CUDA; of no devices it needs none.
    if platform_of(device).is_host:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def in_use() -> list[torch.device]:
    """Return the devices whose generators may have drawn: those of an accelerator that has started."""
    kind = device_type() if is_started() else None
    return [] if kind is None else [torch.device(kind, index) for index in range(count())]
