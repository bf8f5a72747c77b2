"""The module `torch.sim`: functions that torch and its users expect of a device's module."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Event, Tensor
from torch.accelerator import (
    current_device_index,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    set_device_index,
    set_stream,
    synchronize,
)

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "host_memory_stats",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memtune_platform",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

memtune_platform = {
    "title": "memtune's simulated accelerator",
    "tested": "every test run that has it built",
    "capabilities": ("STREAMS", "PINNED", "STATISTICS", "LIMIT", "GENERATORS", "OWN_ALLOCATOR"),
    "gaps": ("no kernels of the inductor backend or in Triton",),
}
"""Description for `memtune.device`."""


class Stream(torch.Stream):
    """Stream of a simulated device."""

    def __new__(
        cls, device: torch.device | str | int | None = None, priority: int = 0, **kwargs: Any
    ) -> Stream:
        """Make a stream on `device`, by default the current one, or the one that `kwargs` identify."""
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, _device(device), priority=priority)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Order all later ops of this stream after all present ones of `stream`."""
        self.wait_event(stream.record_event())


def _device(device: torch.device | str | int | None) -> torch.device:
    if isinstance(device, int):
        return torch.device("sim", device)
    index: int | None = torch.device("sim" if device is None else device).index
    return torch.device("sim", current_device_index() if index is None else index)


def device_count() -> int:
    """Return the number of simulated devices."""
    return torch._C._accelerator_hooks_device_count()


def is_available() -> bool:
    """Return True: `start` has made the devices. As with CUDA, forks of the process cannot use them then."""
    torch.ops.memtune_sim.touch()
    return True


def is_initialized() -> bool:
    """Return True: the device starts with `start`."""
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return bool(torch.ops.memtune_sim.is_forked())


def current_device() -> int:
    """Return the index of the current device."""
    return current_device_index()


def set_device(device: torch.device | str | int) -> None:
    """Make `device` the current one."""
    set_device_index(_device(device).index)


class device:
    """Context in which a device is the current one."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self._index, self._before = -1 if device is None else _device(device).index, -1

    def __enter__(self) -> None:
        """Make the device current."""
        self._before = current_device_index()
        if self._index >= 0:
            set_device_index(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the previous device current."""
        set_device_index(self._before)


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    """Return the current stream of `device`."""
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    """Return the default stream of `device`."""
    found = _device(device)
    return torch.Stream(stream_id=0, device_index=found.index, device_type=current_stream(found).device_type)


class stream:
    """Context in which a stream, and its device, are the current ones; no effect for None."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream, self._before = stream, list[torch.Stream]()

    def __enter__(self) -> None:
        """Make the stream current."""
        if self._stream is None:
            return
        self._before = [current_stream(self._stream.device), current_stream()]
        set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the previous streams current, that of the current device last."""
        for before in self._before:
            set_stream(before)


# Memory


def mem_get_info(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """Return free and total bytes of `device`."""
    free, total = torch.accelerator.get_memory_info(_device(device))
    return int(free), int(total)


def host_memory_stats() -> dict[str, int]:
    """Return present and largest bytes of pinned host memory, in blocks of powers of two as CUDA's."""
    current, peak = torch.ops.memtune_sim.pinned_bytes()
    return {"active_bytes.current": current, "active_bytes.peak": peak}


def reset_peak_host_memory_stats() -> None:
    """Set the peak of pinned bytes to the present bytes."""
    torch.ops.memtune_sim.reset_pinned_peak()


@dataclass(frozen=True)
class DeviceProperties:
    """Name and size of a simulated device."""

    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_name(device: torch.device | str | int | None = None) -> str:
    """Return the name of every simulated device."""
    return "simulated device"


def get_device_properties(device: torch.device | str | int | None = None) -> DeviceProperties:
    """Return name and memory of `device`."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1])


def set_per_process_memory_fraction(fraction: float, device: torch.device | str | int | None = None) -> None:
    """Raise the out-of-memory error above `fraction` of the memory of `device` from now on."""
    found = _device(device)
    torch.ops.memtune_sim.limit(found.index, int(fraction * mem_get_info(found)[1]))


# Generators


def get_rng_state(device: torch.device | str | int | None = None) -> Tensor:
    """Return the state of the default generator of `device`, uint8 on the host."""
    with torch._C._DisableTorchDispatch():  # no operator on other devices: dispatch modes do not see it
        state: Tensor = torch.ops.memtune_sim.get_rng_state(_device(device).index)
    return state


def set_rng_state(state: Tensor, device: torch.device | str | int | None = None) -> None:
    """Set the state of the default generator of `device`."""
    with torch._C._DisableTorchDispatch():  # as above
        torch.ops.memtune_sim.set_rng_state(_device(device).index, state)


def get_rng_state_all() -> list[Tensor]:
    """Return the states of all devices' default generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[Tensor]) -> None:
    """Set the states of all devices' default generators."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the default generator of the current device."""
    torch.ops.memtune_sim.manual_seed(current_device_index(), int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the default generators of all devices."""
    for index in range(device_count()):
        torch.ops.memtune_sim.manual_seed(index, int(seed))


def initial_seed() -> int:
    """Return the seed of the current device's default generator."""
    return int(torch.ops.memtune_sim.initial_seed(current_device_index()))


# Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types that autocast may compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Return True: the kernels are the CPU's."""
    return True
