"""Device memory of a process outside torch's allocator, measured on this machine.

A second process creates a context, runs a matrix product in both directions, then a convolution; after each,
it waits. Its context and libraries hold the bytes by which the device's free memory has fallen, less those
that it reserves.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, NamedTuple

import torch

from memtune.device import memory_statistics
from memtune.errors import EnvironmentFault

_CHILD = """
import sys, torch
kind = sys.argv[1]
module = torch.get_device_module(kind)
def wait():
    module.synchronize()
    print(module.memory_reserved(), flush=True)
    sys.stdin.readline()
x = torch.ones(64, 64, device=kind, requires_grad=True)
(x @ x).sum().backward()
wait()
weight = torch.ones(8, 1, 3, 3, device=kind, requires_grad=True)
torch.nn.functional.conv2d(x.view(1, 1, 64, 64), weight).sum().backward()
wait()
"""
Stage = Callable[[], int]
"""Runs the next stage of the other process; returns the bytes that torch reserves there."""


class ContextMemory(NamedTuple):
    """Bytes outside torch's allocator."""

    context_bytes: int
    """With cuBLAS."""
    cudnn_bytes: int
    """More with cuDNN."""


def measure(
    on: torch.device,
    free_bytes: Callable[[torch.device], int] = memory_statistics.free_bytes,
    process: Callable[[torch.device], AbstractContextManager[Stage]] | None = None,
) -> ContextMemory:
    """Return the memory of a context; no other process may use the device meanwhile.

    Args:
        on: The device.
        free_bytes: Returns a device's free bytes.
        process: Starts the other process on a device; by default one with torch.

    Raises:
        EnvironmentFault: The other process failed, or free memory rose, so others use the device.
    """
    before, held = free_bytes(on), []
    with (process or _process)(on) as stage:
        for _ in range(2):
            reserved = stage()
            # Bytes that the process has taken from the device, without those of torch's allocator.
            held.append(before - free_bytes(on) - reserved)
    context, both = held
    if context <= 0 or both < context:
        raise EnvironmentFault(
            "The context's memory could not be measured: other processes use the device.",
            evidence=f"{context} bytes after a matrix product, {both} after a convolution",
            fix="calibrate while no other process uses the device",
            code="MT104",
        )
    return ContextMemory(context, both - context)


def reserved_bytes(says: IO[str]) -> int:
    """Return the next number that the other process prints, whose libraries may print lines of their own.

    Raises:
        EnvironmentFault: It ended without one.
    """
    for line in iter(says.readline, ""):
        if line.strip().isdigit():
            return int(line)
    raise EnvironmentFault("A second process could not use the device.", code="MT104")


@contextmanager
def _process(on: torch.device) -> Iterator[Stage]:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, on.type], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        asks, says = child.stdin, child.stdout
        assert asks is not None
        assert says is not None
        is_first = True

        def stage() -> int:
            nonlocal is_first
            if not is_first:
                asks.write("\n")
                asks.flush()
            is_first = False
            return reserved_bytes(says)

        try:
            yield stage
        finally:
            # It holds a context, and waits for a line that never comes.
            child.kill()
