"""Gradients that only some ranks have, since their samples used other parameters (an expert, a branch).

A mechanism that averages parameter by parameter must detect them: ranks that each skip their missing
gradients would average different parameters with each other, silently if shapes match.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def missing_here(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """Return the `parameters` without a gradient here and with one on another rank; collective."""
    if not parameters:
        return []
    return [
        parameters[i] for i in missing_indices([p.grad is not None for p in parameters], group, parameters[0])
    ]


def missing_indices(there: Sequence[bool], group: dist.ProcessGroup, like: Tensor) -> list[int]:
    """Return indices of entries that are False here and True on another rank of `group`."""
    # A rank without False entries does not synchronize; with a fake tensor `like` none communicates.
    found = _counted(there, group, like)
    if found is None or all(there):
        return []
    return [place for place, ranks in enumerate(found.tolist()) if ranks and not there[place]]


def inconsistent_indices(there: Sequence[bool], group: dist.ProcessGroup, like: Tensor) -> list[int]:
    """Return indices of entries that some ranks of `group` have and others lack, equal on all ranks."""
    found = _counted(there, group, like)
    return (
        []
        if found is None
        else [place for place, ranks in enumerate(found.tolist()) if 0 < ranks < group.size()]
    )


def _counted(there: Sequence[bool], group: dist.ProcessGroup, like: Tensor) -> Tensor | None:
    """Return (entries,) the number of ranks that have each; None without real peers."""
    # Not `local`, nor `detach`: the values of an offloaded parameter may be in flight, and are not needed.
    if isinstance(getattr(like, "_local_tensor", like), FakeTensor) or dist.get_backend(group) == "fake":
        return None
    # Numpy's memory: the ledger does not count it. Not on the device of `like`: an offloaded parameter shows
    # the host's, from where NCCL sends nothing.
    found = torch.from_numpy(np.array(there, np.int32)).to(message_device(group))
    dist.all_reduce(found, group=group)
    return found


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of small messages in `group`: the host if its backend sends from there."""
    # Private in torch, which puts messages of objects there.
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


@torch.no_grad()
def fill_missing(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Assign zeros to the parameters of `missing_here`: all ranks of `group` have the same gradients."""
    for parameter in missing_here(parameters, group):
        parameter.grad = torch.zeros_like(parameter)
