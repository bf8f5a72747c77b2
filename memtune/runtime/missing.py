"""Gradients that a rank lacks and others have, whose samples went another way through the model (an expert, a branch).

Whoever averages parameter by parameter must know of them: ranks that each left out what they lack would average one parameter
with another, silently where the two have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.runtime.tiers import HOST, tier
from memtune.runtime.tree import local


def missing_here(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """Those of `parameters` that have no gradient here and one on another rank of `group`.

    All ranks must ask, of the same parameters. Only one that lacks some waits for the answer.
    """
    if not parameters or isinstance(local(parameters[0].detach()), FakeTensor):
        return []
    with tier(HOST):
        used = torch.tensor([int(p.grad is not None) for p in parameters], dtype=torch.int32)
        used = used.to(parameters[0].device)
        dist.all_reduce(used, group=group)
        if all(p.grad is not None for p in parameters):
            return []
        return [p for p, ranks in zip(parameters, used.tolist(), strict=True) if p.grad is None and ranks]


@torch.no_grad()
def fill_missing(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Zeros in the place of what `missing_here` finds, so that all ranks of `group` have gradients of the same parameters."""
    for parameter in missing_here(parameters, group):
        parameter.grad = torch.zeros_like(parameter)
