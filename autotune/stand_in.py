"""What a recording gives autograd in place of a tensor that it saves (Rule 2 of the tracer)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def stand_in_for(tensor: Tensor) -> Tensor:
    """A tensor like `tensor` in memory of its own; a real one has its values."""
    if isinstance(tensor, FakeTensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        whole = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())
