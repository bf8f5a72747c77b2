"""Whether the model checkpoints what runs now by itself: such a call of a block is the model's, nothing is claimed of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_CHECKPOINT = "torch.utils.checkpoint"


def autograd_sees() -> bool:
    """Autograd looks on, and what it saves is not what a checkpoint of the model's own takes care of.

    `use_reentrant=True` runs a forward without gradients and runs it again inside a Python function's backward; otherwise what
    is saved, both times, goes through hooks of `torch.utils.checkpoint`.
    """
    if not torch.is_grad_enabled():
        return False
    node: object = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction):
        return False
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or getattr(hooks[0], "__module__", "") != _CHECKPOINT
