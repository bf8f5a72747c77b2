"""Streams and events of any accelerator, through torch's own `torch.Stream` and `torch.Event`.

On CPU there are none: `has_streams` is False, `current` is not called, and `on(None)` does nothing.

`torch.cuda.Event` and `torch.cuda.Stream` (FSDP2 makes some) keep their handles elsewhere in the same object:
their methods do not accept a plain `torch.Event` or `torch.Stream`. Methods of the plain ones accept both
kinds of streams, so an event made here waits and records on any stream: `event.wait(stream)`.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor

from memtune.device.accelerator import has_streams


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream on `device`; None if the device has no streams."""
    return torch.Stream(device) if has_streams(device) else None


def current(device: torch.device | None = None) -> torch.Stream:
    """Return the current stream of `device`, by default of the current device; the device has streams."""
    return torch.accelerator.current_stream(device)


class on:
    """Context in which `stream` is current, and its device too; no effect for None.

    May be nested with the same stream, unlike torch's `with stream`.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream, self._before = stream, list[torch.Stream]()

    def __enter__(self) -> None:
        """Make the stream current."""
        if self._stream is None:
            return
        here = torch.accelerator.current_stream()
        is_here = here.device_index == self._stream.device_index
        self._before = [here] if is_here else [torch.accelerator.current_stream(self._stream.device), here]
        torch.accelerator.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous streams, the current device's last."""
        for each in self._before:
            torch.accelerator.set_stream(each)


def recorded(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Return an event that passes when the work issued so far to `stream`, by default the current, ends."""
    event = torch.Event(device)
    event.record(current(device) if stream is None else stream)
    return event


def end_of(stream: torch.Stream | None) -> torch.Event | None:
    """Return an event that passes when the work issued so far to `stream` is done; None for None."""
    return None if stream is None else recorded(stream.device, stream)


def wait(event: torch.Event) -> None:
    """Make the current stream of the event's device wait for it."""
    # `event.wait()` alone takes the current stream of the current device, which need not be that one.
    event.wait(current(event.device))


def wait_current(stream: torch.Stream | None, device: torch.device) -> None:
    """Make `stream` wait for the work issued so far to the current stream of `device`; no effect for None."""
    if stream is not None:
        recorded(device, current(device)).wait(stream)


def used_on(tensor: Tensor, stream: torch.Stream | None = None) -> None:
    """Keep `tensor`'s memory until the work issued so far to `stream`, by default the current one, ends."""
    # The allocator otherwise reuses memory in the order of the stream on which it was allocated.
    if has_streams(tensor.device):
        tensor.record_stream(current(tensor.device) if stream is None else stream)


def synchronize(device: torch.device | str) -> None:
    """Return when all work on `device` is done; at once on CPU."""
    device = torch.device(device)
    if has_streams(device):
        torch.accelerator.synchronize(device)
