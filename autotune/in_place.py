"""What torch does in place as long as no dispatch mode looks on; while a step is recorded, one does.

1. Sums, where a tensor gets gradients from several places. The engine adds to the gradient that came first if that is dense, no
   view, and nobody else holds it or its memory (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). Who holds it is
   told by the recording; the rest is asked here.
2. Zeros that a backward formula scatters gradients into (torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`).
3. The bias of a `linear` and the mask of attention, added to a product (ATen/native/Linear.cpp, transformers/attention.cpp).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SUM = torch.ops.aten.add.Tensor
_SCATTERS = frozenset(
    getattr(getattr(torch.ops.aten, op), overload)
    for op, overload in (
        ("scatter", "src"), ("scatter", "value"), ("scatter_add", "default"), ("index_add", "default"), ("index_put", "default"),
        ("put", "default"), ("masked_scatter", "default"),
    )
)  # fmt: skip
ADDS_TO_ITS_PRODUCT = frozenset({F.linear, F.scaled_dot_product_attention})
"""Functions that add to a product of theirs by rule 3, where they have no kernel that does both."""
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules whose frames lie between a dispatch mode and who called the op."""
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""The frame that calls the engine: it is next on the stack under ops that run for no Python function."""


def is_in_place(func: Any, args: tuple[Any, ...], out: Any, made_by: str, made_under: int) -> bool:
    """Whether an op of backward would change its first argument, if nobody else holds it, where no mode looks on.

    A formula adds what its own node has made, the engine adds to what another node has made, unless one node gives several
    gradients to one place (`x * x`).

    Args:
        func: The op, which is being dispatched.
        args: Its arguments.
        out: What it returned.
        made_by: Name of the op that made the first argument's storage.
        made_under: Number of the autograd node under which it did, -1 where that was not in backward.
    """
    if func in _SCATTERS:
        return "zeros" in made_by and _called_by_engine()
    if func is not SUM or made_under < 0 or len(args) != 2 or not _can_hold(args[0], args[1], out) or not _called_by_engine():
        return False
    node: Any = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return made_under != number_of(node) or len(set(edges)) < len(edges)


def number_of(node: Any) -> int:
    """The sequence number of an autograd node, as a Step holds it."""
    number: int = node._sequence_nr() % 2**31
    return number


def _can_hold(first: object, second: object, out: Tensor) -> bool:
    """Whether `first` looks like the sum of two tensors, and holds its memory alone (a view's base does too)."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first._is_view():
        return False
    if not (first.shape == second.shape == out.shape and first.dtype == out.dtype):
        return False
    return first.untyped_storage()._cdata != second.untyped_storage()._cdata and _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """No two elements share memory, and there are no gaps."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _called_by_engine() -> bool:
    """Whether the op that is being dispatched was called by C++ code of autograd, and by no Python function or subclass."""
    frame = sys._getframe(2)
    while frame.f_code.co_name != "__torch_dispatch__" and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") in _WRAPPERS:
        caller = caller.f_back
    return caller is not None and caller.f_code is _ENGINE
