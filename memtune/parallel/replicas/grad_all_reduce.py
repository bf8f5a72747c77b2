"""Replicas that all-reduce each gradient as soon as it is ready, so that it can be offloaded at once: `ddp`
with gradient offload, by a `GradientReducer` whose buckets are single gradients.

Three rules, which the pass `offload.optimizer.grad_offload_pass` follows:

1. When autograd has accumulated a gradient, it is averaged over all ranks, one message each, and is then
  ready (`Events.grad_ready`). This happens in every micro-batch, since the sums of micro-batches are on the
  host; a sum on the device that has been averaged before is equal on all ranks, so averaging it again with
  the new gradient does not change its earlier part.
2. Every rank must have every gradient, in each backward. A rank that lacks some sends zeros in their places,
  in the order of the first backward, and raises at the end of its own.
3. Buffers follow the first rank's, as under DistributedDataParallel (`parallel.replicas.broadcast_buffers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from memtune import refusals
from memtune.parallel.ranks import require_ranks
from memtune.parallel.replicas.broadcast_buffers import BroadcastBuffers
from memtune.parallel.replicas.gradient_reducer import GradientReducer
from memtune.runtime import BackwardEnd, Context, call_when_grad_ready, weakly


class AllReduceGrads:
    """Averages the gradients of the model in `context` one by one, and emits `grad_ready` for each.

    Args:
        context: Emits `grad_ready` there; gets a `sync` and a check.

    Raises:
        ApplyError: There is no process group, or the ranks' weights differ.
    """

    def __init__(self, context: Context) -> None:
        require_ranks(context, "ddp")
        group = dist.distributed_c10d._get_default_group()
        self._model, self._ranks = context.model, group.size()
        self._parameters = _trained(context.model)
        alone = [[each] for each in self._parameters]
        self._reducer = GradientReducer(group, alone, self._averaged, context.device)
        self._at_end, self._grad_ready = BackwardEnd(self._ends), context.events.grad_ready
        self._buffers = BroadcastBuffers(context, group)
        call_when_grad_ready(context, dict.fromkeys(self._parameters, weakly(self._arrived)))
        self._grad_ready.emit_from(lambda: None)  # the hooks above emit with or without subscribers
        context.loop.sync, context.placement.states_average_grads = self._sync, True
        context.checks["sharding.states"] = self._check

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        yield
        if last:
            self._buffers.step_ends()

    def _arrived(self, parameter: Tensor) -> None:
        """Average a gradient (rule 1)."""
        assert isinstance(parameter, nn.Parameter)
        if self._at_end.expect():
            # The first gradient of a backward: `expect` is True once per backward. The last may have raised.
            self._reducer.abandon()
        if parameter.grad is not None:  # a hook of the user's may have used and freed it
            self._reducer.add(parameter)

    def _averaged(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient
        self._grad_ready.emit(parameter)

    def _ends(self) -> None:
        """Check rule 2 at the end of backward."""
        if missing := self._reducer.finish():
            raise refusals.not_averaged(len(missing))

    def _check(self) -> dict[str, Any]:
        if _trained(self._model) != self._parameters:
            raise refusals.error_of(refusals.other_parameters())
        return {"ranks": self._ranks, "averaged_bytes": self._reducer.averaged_bytes}


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
