"""Detection of user checkpoints and dropped saves, where the activation table may claim nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_DROPS = "memtune.offload.layer_major.boundary_activations"
_TABLE = ("memtune.activations.recompute.activation_table", "memtune.activations.recompute.call_moves")
"""Modules that define the activation table's hooks."""
_OTHERS = ("torch.utils.checkpoint", _DROPS)
"""Modules whose hooks recompute or drop saved tensors."""


def autograd_saves() -> bool:
    """Return whether autograd keeps what it saves, and no checkpoint of the user's own handles it."""
    # `torch.utils.checkpoint(use_reentrant=True)` runs a forward without gradients, and again inside
    # the backward of a Python function; with `use_reentrant=False` saved tensors pass, both times,
    # through its hooks. A pack's forward-only run drops them.
    if not torch.is_grad_enabled():
        return False
    node: object = torch._C._current_autograd_node()
    if isinstance(node, BackwardCFunction):
        return False
    return _hooks_of() not in _OTHERS


def saves_are_dropped() -> bool:
    """Return whether this run has no backward (`boundary_activations.discard_saved`)."""
    return _hooks_of() == _DROPS


def hooks_of_table() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the activation table's pack and unpack hooks, or None without a claim on the current block."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) if _hooks_of() in _TABLE else None


@contextmanager
def without_hooks() -> Iterator[None]:
    """Disable saved-tensor hooks in this context: autograd keeps what it saves."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _hooks_of() -> str:
    """Return the module that defines the current saved-tensor hooks, '' without hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else str(getattr(hooks[0], "__module__", ""))
