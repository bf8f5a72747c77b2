"""Small helpers on tensors that may be sharded."""

from __future__ import annotations

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that is on this rank: its local shard for a DTensor, itself otherwise."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
