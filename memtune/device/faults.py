"""Errors of devices: out of memory, a device that is lost, tensors on several devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memtune.device.accelerator import device_type, platform_of
from memtune.device.platforms import PLATFORMS
from memtune.errors import ApplyError, EnvironmentFault

_OUT_OF_MEMORY = tuple(dict.fromkeys(text for each in PLATFORMS.values() for text in each.out_of_memory))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error of a device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # Errors of the driver and of cuBLAS arrive as plain RuntimeErrors: only their text tells them apart.
    return isinstance(error, RuntimeError) and str(error).lstrip().startswith(
        (*_OUT_OF_MEMORY, *_described())
    )


def _described() -> tuple[str, ...]:
    """Return the messages of an accelerator that describes itself."""
    there = device_type()
    return () if there is None else platform_of(there).out_of_memory


def is_lost(error: BaseException) -> bool:
    """Return True if `error` says that the device runs no more kernels of this process."""
    # Torch raises `AcceleratorError` for an error of the driver. Except for a lack of memory it
    # persists: each later call raises it again.
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def lost_error(error: BaseException, device: torch.device) -> EnvironmentFault:
    """Return the error for the user when `device` is lost with `error` in the middle of a step."""
    lines = str(error).strip().splitlines()
    return EnvironmentFault(
        f"The device {device} was lost in the middle of a training step.",
        evidence=f"torch: {lines[0] if lines else type(error).__name__}",
        fix=(
            "end this process and resume from the last checkpoint. If the line names an assertion or an"
            " address, the model's own code caused it: run again on CPU, which names the op"
        ),
        code="MT133",
    )


_OTHER_DEVICE = ("Expected all tensors to be on the same device", "is not on the expected device")
"""Parts of torch's messages about an op whose arguments are on several devices."""


@contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Raise errors of the device inside with problem, evidence and fix; others as they are.

    Args:
        device: Device of the model.

    Raises:
        EnvironmentFault: The device was lost.
        ApplyError: An op had arguments on another device than the model's.
    """
    try:
        yield
    except RuntimeError as error:
        if is_lost(error):
            raise lost_error(error, device) from error
        if any(part in str(error) for part in _OTHER_DEVICE):
            raise ApplyError(
                f"The loss or the model uses a tensor on another device than the model's, {device}.",
                evidence=f"torch: {str(error).strip().splitlines()[0]}",
                fix="register constants of the model with register_buffer, and make those of the loss on the"
                " device of the batch",
                code="MT135",
            ) from error
        raise


def require_one_device(model: nn.Module, optimizer_state: Mapping[Any, Any]) -> None:
    """Check that parameters, buffers and moments of the optimizer are on one device.

    Raises:
        ApplyError: They are on several.
    """
    # Scalars may be on CPU: an op takes them from there.
    found: dict[torch.device, list[str]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dim() or tensor.device.type != "cpu":
            found.setdefault(tensor.device, []).append(name)
    if len(found) > 1:
        raise ApplyError(
            f"The model is on {len(found)} devices: {' and '.join(map(str, found))}.",
            evidence="; ".join(f"{_some(names)} on {device}" for device, names in found.items()) + ".",
            fix="model.to(device) before the optimizer is made, or the whole model on the CPU and"
            " memtune.apply(..., device=device)",
            code="MT134",
        )
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    strays = [
        f"{key} of {names.get(parameter, 'a parameter')} on {value.device}"
        for parameter, state in optimizer_state.items()
        if isinstance(parameter, Tensor)  # optimizers may keep state under other keys as well
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.device != parameter.device
    ]
    if strays:
        raise ApplyError(
            "The optimizer's state is on another device than the model.",
            evidence=f"{_some(strays)}; the model is on {next(iter(found), 'no device')}.",
            fix="move the model first, then optimizer.load_state_dict, which moves the state to it",
            code="MT135",
        )


def _some(names: Iterable[str], most: int = 2) -> str:
    """Return the first names, and how many there are beyond them."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
