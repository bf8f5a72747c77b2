"""What must be true of the ranks before a model is divided or replicated over them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from memtune.errors import ApplyError
from memtune.runtime.context import Context


def require_ranks(context: Context, what: str) -> None:
    """Check that this process is one of several that hold the same weights.

    Args:
        context: The model whose weights are compared.
        what: What needs the ranks, for the message: `sharding`.

    Raises:
        ApplyError: There is no process group, or the ranks' weights differ.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ApplyError(
            f"{what} needs several processes, but this one is alone.",
            fix="torchrun --nproc-per-node 2 your_script.py",
            code="MT320",
        )
    _require_same_weights(context)


def _require_same_weights(context: Context) -> None:
    """Sums of the weights' bits are equal on all ranks; nothing is overwritten, so that a failure can be undone."""
    named = [(name, p) for name, p in context.model.named_parameters() if not isinstance(p, FakeTensor)]
    if not named:
        return
    with torch.no_grad():
        sums = torch.stack([p.detach().view(_INTEGER[p.element_size()]).sum(dtype=torch.int64) for _, p in named])
    low, high = sums.to(context.device), sums.to(context.device, copy=True)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    differing = [name for (name, _), same in zip(named, (low == high).tolist(), strict=True) if not same]
    if differing:
        raise ApplyError(
            f"{len(differing)} parameters differ between the {context.ranks} ranks; they must start from one model.",
            evidence=f"First: {differing[0]}.",
            fix="torch.manual_seed(0) on every rank before the model is built, or load one checkpoint on all",
            code="MT323",
        )


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
