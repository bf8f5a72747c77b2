"""Ops that torch runs in place unless a dispatch mode is active, as it is while recording.

1. Sums of gradients that reach a tensor on several paths. The engine adds into the first gradient if it is
  dense, no view, and has no other reference to it or its storage (torch/csrc/autograd/input_buffer.cpp,
  `can_accumulate_inplace`). References are known from the recording; the other conditions are checked here.
2. Zeros that a backward formula scatters gradients into (torch/csrc/autograd/FunctionsManual.cpp,
  `areAnyTensorSubclassLike`).
3. The bias of `linear` and the mask of attention, added to a product (ATen/native/Linear.cpp,
  transformers/attention.cpp).
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
        ("scatter", "src"),
        ("scatter", "value"),
        ("scatter_add", "default"),
        ("index_add", "default"),
        ("index_put", "default"),
        ("put", "default"),
        ("masked_scatter", "default"),
    )
)
PRODUCT_PLUS_BIAS = frozenset({F.linear, F.scaled_dot_product_attention})
"""Functions that add to their own product (rule 3), where no kernel does both."""
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules whose frames lie between a dispatch mode and the caller of the op."""
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""Code of the frame that calls the engine: the next frame under an op that no Python function called."""


def is_in_place(func: Any, args: tuple[Any, ...], out: Any, made_by: str, made_under: int) -> bool:
    """Return whether a backward op would overwrite its first argument if no mode were active.

    Args:
        func: The op being dispatched.
        args: Its arguments.
        out: Its result.
        made_by: Name of the op that made the first argument's storage.
        made_under: Number of the autograd node under which that op ran, -1 outside of backward.
    """
    # That requires that nothing else refers to the argument.
    # A formula adds into tensors of its own node, the engine into those of another node, unless one
    # node returns several gradients for one input (`x * x`).
    if func in _SCATTERS:
        return "zeros" in made_by and _called_by_engine()
    if (
        func is not SUM
        or made_under < 0
        or len(args) != 2
        or not _can_accumulate_into(args[0], args[1], out)
        or not _called_by_engine()
    ):
        return False
    node: Any = torch._C._current_autograd_node()
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return made_under != sequence_number(node) or len(set(edges)) < len(edges)


def sequence_number(node: Any) -> int:
    """Return the sequence number of an autograd node, as a Step stores it."""
    number: int = node._sequence_nr() % 2**31
    return number


def _can_accumulate_into(first: object, second: object, out: Tensor) -> bool:
    """Return whether `first` can hold the sum of both.

    Same shape and dtype, dense, no view (a view's base is shared).
    """
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first._is_view():
        return False
    if not (first.shape == second.shape == out.shape and first.dtype == out.dtype):
        return False
    return first.untyped_storage()._cdata != second.untyped_storage()._cdata and _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether elements neither overlap nor leave gaps."""
    step = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != step:
            return False
        step *= size
    return True


def _called_by_engine() -> bool:
    """Return whether autograd's C++ code called the current op, not Python or a tensor subclass."""
    frame = sys._getframe(2)
    while frame.f_code.co_name != "__torch_dispatch__" and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") in _WRAPPERS:
        caller = caller.f_back
    # The engine runs an accelerator's nodes in a thread of its own, which Python has not started.
    return caller is None or caller.f_code is _ENGINE
