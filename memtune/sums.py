"""Sums that autograd makes where a tensor gets gradients from several places: it adds in place where it can.

While a dispatch mode looks on, as it does while a step is recorded, autograd never adds in place
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). So a recording sees one tensor too many at each such sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtune.program import Kind, Step

_PLAIN_NODES = frozenset(
    """Add Sub Mul Div Neg Addmm Mm Bmm Baddbmm Linear T Transpose Permute View UnsafeView ReshapeAlias Expand Squeeze Unsqueeze
    Slice Select Split SplitWithSizes Unbind Unflatten Cat Stack Repeat Clone ToCopy Sum Mean Exp Log Sqrt Rsqrt Tanh Sigmoid Relu
    Gelu Silu Mish Softplus LeakyRelu Elu Hardswish Hardtanh Softmax LogSoftmax NativeLayerNorm NativeBatchNorm NativeGroupNorm
    FusedRmsNorm NativeDropout Convolution ConvolutionOverrideable MkldnnConvolution AvgPool2D AdaptiveAvgPool2D
    MaxPool2DWithIndices Embedding Index IndexSelect Gather Where MaskedFill Topk Max Amax Bernoulli Copy
    ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention
    UpsampleNearest2D PixelShuffle ConstantPadNd Roll Flip Cumsum Glu NllLoss NllLoss2D""".split()
)
"""Backward nodes whose own formula adds nothing, so that a sum seen under them is autograd's."""


class Sum(NamedTuple):
    """A sum of two gradients: the op and rows of storages; -1 for an operand that could not hold the result."""

    op: int
    first: int
    second: int
    out: int


def is_sum_of_gradients(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether autograd, and not the formula of a backward node, called `func`."""
    if func is not torch.ops.aten.add.Tensor or len(args) != 2 or kwargs or torch.is_grad_enabled():
        return False
    node: Any = torch._C._current_autograd_node()
    return node is not None and type(node).__name__.rstrip("0123456789").removesuffix("Backward") in _PLAIN_NODES


def can_hold_the_sum(operand: object, out: Tensor) -> bool:
    """Whether `operand` looks like the sum: what is left to ask is if somebody else needs it."""
    if not isinstance(operand, Tensor) or (operand.shape, operand.dtype) != (out.shape, out.dtype):
        return False
    if operand._is_view():  # it holds its base, and both hold the storage
        return False
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(operand.stride(), operand.shape, strict=True) if size != 1):
        if stride != step:
            return False  # elements share memory, or there are gaps
        step *= size
    return True


def in_place(step: Step, sums: Sequence[Sum]) -> Step:
    """`step` with every sum in the first of its operands that nobody needs any longer.

    The row of the sum takes over that operand's: its producer, uses and saves. The operand's own row stays, as something that
    was there before the step and has no bytes.
    """
    if not sums:
        return step
    n_bytes, producer, kind, mutates = step.bytes.copy(), step.producer.copy(), step.kind.copy(), step.use_mutates.copy()
    now = np.arange(step.n_storages)
    ends = step.held_until.copy()
    np.maximum.at(ends, step.save_storage, step.save_until)
    np.maximum.at(ends, step.use_storage, step.use_op)
    is_free = (step.kind == Kind.TEMPORARY) & (step.producer >= 0)
    for each in sums:
        held = [row for row in (each.first, each.second) if row >= 0 and is_free[row] and ends[row] == each.op]
        if held and each.first != each.second:
            n_bytes[each.out] = n_bytes[held[0]]
            producer[each.out] = producer[held[0]]
            n_bytes[held[0]], producer[held[0]], kind[held[0]] = 0, -1, Kind.BUFFER
            now[now == held[0]] = each.out
            mutates[(step.use_op == each.op) & (step.use_storage == held[0])] = 1
    return replace(
        step,
        bytes=n_bytes,
        producer=producer,
        kind=kind,
        use_mutates=mutates,
        use_storage=now[step.use_storage].astype(step.use_storage.dtype),
        save_storage=now[step.save_storage].astype(step.save_storage.dtype),
    )
