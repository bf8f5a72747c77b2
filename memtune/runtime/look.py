"""What a saved tensor looks like: two runs of the same code save tensors that look the same."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Look(NamedTuple):
    """What a saved tensor is known by in both runs."""

    made_by: str
    """Name of the autograd node; '' for views, leaves, and functions in Python (FSDP2 has some in one run only)."""
    size: torch.Size
    dtype: torch.dtype


def look(tensor: Tensor) -> Look:
    """What `tensor` is known by."""
    node = None if tensor._is_view() else tensor.grad_fn
    made_by = "" if node is None or isinstance(node, torch.autograd.function.BackwardCFunction) else node.name()
    return Look(made_by, tensor.shape, tensor.dtype)
