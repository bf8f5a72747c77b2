"""Gradients that a rank lacks and others have, whose samples went another way through the model (an expert, a branch).

Whoever averages parameter by parameter must know of them: ranks that each left out what they lack would average one parameter
with another, silently where the two have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.runtime.tree import local


def missing_here(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """Those of `parameters` that have no gradient here and one on another rank of `group`; all ranks must ask of the same."""
    if not parameters:
        return []
    return [parameters[i] for i in lacking([p.grad is not None for p in parameters], group, parameters[0])]


def lacking(there: Sequence[bool], group: dist.ProcessGroup, like: Tensor) -> list[int]:
    """Places of what is not `there` here and is on another rank of `group`; only a rank that lacks something waits to hear.

    Args:
        there: Whether each is here.
        group: Whose ranks all ask.
        like: Says on which device; fake, nobody is asked.
    """
    found = _counted(there, group, like)
    if found is None or all(there):
        return []
    return [place for place, ranks in enumerate(found.tolist()) if ranks and not there[place]]


def apart(there: Sequence[bool], group: dist.ProcessGroup, like: Tensor) -> list[int]:
    """Places of what some ranks of `group` have and others lack, the same on all of them; arguments are those of `lacking`."""
    found = _counted(there, group, like)
    return [] if found is None else [place for place, ranks in enumerate(found.tolist()) if 0 < ranks < group.size()]


def _counted(there: Sequence[bool], group: dist.ProcessGroup, like: Tensor) -> Tensor | None:
    """(places,) how many ranks have each; None where no other rank is there: neither with fake tensors nor in a fake group."""
    if isinstance(local(like.detach()), FakeTensor) or dist.get_backend(group) == "fake":
        return None
    found = torch.from_numpy(np.array(there, np.int32)).to(like.device)  # numpy's memory: no byte of a tier, on CPU
    dist.all_reduce(found, group=group)
    return found


@torch.no_grad()
def fill_missing(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Zeros in the place of what `missing_here` finds, so that all ranks of `group` have gradients of the same parameters."""
    for parameter in missing_here(parameters, group):
        parameter.grad = torch.zeros_like(parameter)
