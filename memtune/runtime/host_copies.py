"""Copies on the host of what a device's optimizer works on: weights, masters, state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memtune.errors import ApplyError
from memtune.runtime import transfer
from memtune.runtime.host_update import OWN
from memtune.runtime.huge_pages import in_huge_pages
from memtune.runtime.tiers import HOST, mark, tier
from memtune.runtime.tree import local


def master_of(host: Tensor, narrow_too: bool) -> Tensor:
    """What the native update works on: float32, or in place of bfloat16 a float32 copy.

    Raises:
        ApplyError: It has another type.
    """
    if host.dtype is torch.float32:
        return host
    if host.dtype is torch.bfloat16 and narrow_too:
        with tier(HOST):
            return in_huge_pages(torch.empty_like(host, dtype=torch.float32)).copy_(host)
    raise ApplyError(
        f"The native update has no way to update parameters of {host.dtype}.",
        fix="set  update: master  for offload.states" if host.dtype is torch.bfloat16 else OWN,
        code="MT318",
    )


def to_host_now(tensor: Tensor) -> Tensor:
    """A host copy of `tensor`, complete."""
    host: Tensor = torch.ops.memtune.to_host(tensor.detach())
    transfer.finish(host)
    return host


def state_to_host(value: Any) -> Any:
    """A host copy of a state tensor, `value` itself if it is no tensor."""
    if not isinstance(value, Tensor):
        return value
    host = to_host_now(local(value))
    mark(host, HOST)
    return host
