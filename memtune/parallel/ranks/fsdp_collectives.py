"""FSDP2's collectives through the seam, so that a recorder sees them and every byte is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from memtune.device import streams
from memtune.runtime import all_gather_single, reduce_scatter_single

_OP_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


class SeamAllGather(AllGather):
    """All-gather of a unit's parameters as `torch.ops.memtune.all_gather_into_`."""

    is_one_message = True
    """It reads a rank's rows once, at its start: techniques that offload rows load them just before
    (`offload.core.fsdp_shards`).
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` (numel) of all ranks into `output_tensor` (ranks × numel)."""
        if async_op:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        torch.ops.memtune.all_gather_into_(output_tensor, input_tensor, group.group_name, group.size())
        return None


class SeamReduceScatter(ReduceScatter):
    """Reduce-scatter of a unit's gradients as `torch.ops.memtune.reduce_scatter_into_`."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the buffer for the unit's full gradient, or for this rank's shard of the sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` (ranks × numel) over the ranks and keep this rank's part in `output_tensor`
        (numel).
        """
        name = next((name for known, name in _OP_NAMES.items() if op == known), None)
        if async_op or name is None:
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        torch.ops.memtune.reduce_scatter_into_(
            output_tensor, input_tensor, group.group_name, group.size(), name
        )
        return None


class SeamAllReduce:
    """Average of a unit's gradient shard over the copies of the model as `torch.ops.memtune.all_reduce_`.

    FSDP2 calls it as the all-reduce hook, after the reduce-scatter and on a stream of its own.

    Args:
        group: The ranks that hold the same shard, one of each copy.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, shard: Tensor) -> None:
        """Average `shard` in place."""
        torch.ops.memtune.all_reduce_(shard, self._group.group_name, self._group.size(), "avg")
        # The shard belongs to another stream, which would reuse its memory while the all-reduce still reads
        # it.
        streams.used_on(shard)
