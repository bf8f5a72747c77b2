"""Whether autograd keeps what runs now: in a checkpoint of the model's own, or where nothing is saved, nothing is claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_DROPS, _TABLE = "memtune.runtime.boundaries", "memtune.runtime.activations"
_OTHERS = ("torch.utils.checkpoint", _DROPS)
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
    return _hooks_of() not in _OTHERS


def nothing_stays() -> bool:
    """What runs now has no backward of its own: `runtime.boundaries.nothing_saved`."""
    return _hooks_of() == _DROPS


def hooks_of_table() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """What the activation table makes of what a block saves, and back; None where it claims nothing of what runs now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) if _hooks_of() == _TABLE else None


@contextmanager
def without_hooks() -> Iterator[None]:
    """Inside, autograd keeps what it saves."""
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
    """The module whose hooks get what autograd saves, '' where there are none."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else str(getattr(hooks[0], "__module__", ""))
