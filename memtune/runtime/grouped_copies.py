"""Copies of many tensors between host and device, small ones together.

The call of an operator, its event and the wake-up of a copy thread take the host longer than the copy of a
small tensor. Neighbours of at most `GROUP_BYTES` together are therefore copied by one call. A dispatch mode,
and fake tensors, see the seam's operator of each tensor, in the order in which the copies start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.runtime import transfer
from memtune.runtime.memory_tiers import HOST, mark

GROUP_BYTES: Final = 1 << 20
"""Bytes that one call copies; both ends of a group exist at once, as those of one large tensor do."""


def is_observed(tensor: Tensor) -> bool:
    """Return whether a dispatch mode, or a recording, must see the operators on `tensor`, no DTensor."""
    return bool(torch._C._len_torch_dispatch_stack()) or isinstance(tensor, FakeTensor)


def groups(tensors: list[Tensor]) -> Iterator[slice]:
    """Yield the consecutive parts of `tensors` that are copied together; single ones if they are observed.

    Holds none of them while it yields, so that the caller can free a part before the next one.
    """
    n_bytes = [each.nbytes for each in tensors]
    room_bytes = 0 if tensors and is_observed(tensors[0]) else GROUP_BYTES
    del tensors
    first, held = 0, 0
    for i, size in enumerate(n_bytes):
        if i > first and held + size > room_bytes:
            yield slice(first, i)
            first, held = i, 0
        held += size
    if n_bytes:
        yield slice(first, len(n_bytes))


def to_host_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Start the copies of `tensors`, no DTensors, to new host tensors; see `transfer.to_host`."""
    if not tensors:
        return []
    if not is_observed(tensors[0]):
        return transfer.to_host_together(tensors)
    hosts = [torch.ops.memtune.to_host(each) for each in tensors]
    for host in hosts:
        mark(host, HOST)
    return hosts


def copy_to_device_together(tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy each of `hosts` into the one of `tensors`, no DTensors, at its place."""
    if tensors and not is_observed(tensors[0]):
        transfer.copy_to_device_together(tensors, hosts)
        return
    for tensor, host in zip(tensors, hosts, strict=True):
        torch.ops.memtune.copy_to_device_(tensor, host)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor on `device` with the values of `host`; see `transfer.to_device`."""
    if is_observed(host):
        found: Tensor = torch.ops.memtune.to_device(host, device)
        return found
    return transfer.to_device(host, device)
