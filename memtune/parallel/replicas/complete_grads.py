"""Averages and sums of complete gradients, after the last backward of a step, one message each.

Unlike a `GradientReducer` they keep no order from one step to the next, so ranks may lack gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.parallel.ranks import fill_missing
from memtune.runtime import local


@torch.no_grad()
def average_now(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average complete gradients in place, one message each; collective.

    A gradient that this rank lacks and another one has counts as zeros.
    """
    fill_missing(parameters, group)
    for each in parameters:
        if each.grad is not None:
            torch.ops.memtune.all_reduce_(local(each.grad), group.group_name, group.size(), "avg")


@torch.no_grad()
def sum_now(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients of tied weights in place, also where this rank has none; collective."""
    for each in parameters:
        gradient = torch.zeros_like(each) if each.grad is None else each.grad
        torch.ops.memtune.all_reduce_(gradient, group.group_name, group.size(), "sum")
        each.grad = gradient
