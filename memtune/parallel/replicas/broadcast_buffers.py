"""Buffers broadcast from the first copy before the first forward of a step, as in DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtune.runtime import Context


class BroadcastBuffers:
    """Broadcasts one message per dtype; an evaluation sends nothing, since only some ranks may run one.

    Args:
        context: Its model gets a hook.
        group: The ranks that hold copies.
    """

    def __init__(self, context: Context, group: dist.ProcessGroup) -> None:
        self._group, self._is_first = group, True
        context.undo.callback(context.model.register_forward_pre_hook(self._send).remove)

    def step_ends(self) -> None:
        """Mark that the next forward is the first one of a step."""
        self._is_first = True

    @torch.no_grad()
    def _send(self, model: nn.Module, args: Any) -> None:
        if not model.training:
            return
        buffers = [buffer for buffer in model.buffers() if buffer.numel()] if self._is_first else []
        # Once per step, not per micro-batch: buffers that a forward changes (batch norm) then follow this
        # rank's samples within the step, as under DDP's `no_sync`.
        self._is_first = False
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            # In the model's order, which is equal on all ranks; a message has one type.
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for same in by_type.values():
            message = torch.cat([buffer.reshape(-1) for buffer in same])
            dist.broadcast(message, group=self._group, group_src=0)
            for buffer, sent in zip(same, message.split([b.numel() for b in same]), strict=True):
                buffer.copy_(sent.view_as(buffer))
