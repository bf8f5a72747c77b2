"""Whether autograd keeps what runs now: in a checkpoint of the model's own, or where nothing is saved, nothing is claimed."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_OTHERS = ("torch.utils.checkpoint", "memtune.runtime.boundaries")
"""Whose hooks take care of what is saved, or drop it."""


def autograd_sees() -> bool:
    """Autograd looks on, and what it saves is neither what a checkpoint of the model's own takes care of nor dropped at once.

    `use_reentrant=True` runs a forward without gradients and runs it again inside a Python function's backward; otherwise what
    is saved, both times, goes through hooks of `torch.utils.checkpoint`. Packs that run forward alone drop what is saved.
    """
    if not torch.is_grad_enabled():
        return False
    node: object = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction):
        return False
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or getattr(hooks[0], "__module__", "") not in _OTHERS
