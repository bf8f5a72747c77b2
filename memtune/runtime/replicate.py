"""The whole model on every rank, gradients averaged bucket by bucket while backward runs: torch's DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from memtune.errors import ApplyError
from memtune.experts import experts_of
from memtune.runtime.context import Context
from memtune.runtime.nodes import count_collective
from memtune.runtime.ranks import require_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Where DDP looks for the names of parameters that are not its own."""


class Replicas:
    """Wraps the model of `context` and averages its gradients over all ranks after the last micro-batch.

    Parameters, their names and the optimizer stay the user's own; `context.runner` is what must be called.

    Args:
        context: Gets a `runner`, a `sync` and a check.
        bucket_cap_mb: Gradients are averaged in buckets of about this many MiB.
        find_unused_parameters: Search the graph for parameters that get no gradient in this step.

    Raises:
        ApplyError: There is no process group, or the ranks' weights differ.
    """

    def __init__(self, context: Context, *, bucket_cap_mb: int, find_unused_parameters: bool) -> None:
        require_ranks(context, "ddp")
        self._ranks = context.ranks
        self._averaged_bytes = 0
        self._model = context.model
        with _left_out(context):
            self.wrapper = DistributedDataParallel(
                context.model,
                bucket_cap_mb=bucket_cap_mb,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
                init_sync=False,  # the weights are equal already, and the user's are not to be overwritten
            )
        # A lambda, because DDP reads a hook's annotations and takes none that are strings. DDP's C++ keeps it where Python's
        # collector does not look: held by it, the model would never go. The wrapper holds what it calls.
        average = weakref.WeakMethod(self._average)
        self.wrapper.register_comm_hook(None, lambda state, bucket: average()(bucket))  # type: ignore[misc]
        vars(self.wrapper)["_memtune_replicas"] = self
        self._whole_bytes = sum(p.nbytes for p in self.wrapper._module_parameters if p.requires_grad)
        context.runner = self.wrapper
        context.sync, context.averaged = self._sync, True
        context.checks["sharding.states"] = self._check

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        return self._all_averaged() if last else self.wrapper.no_sync()

    @contextmanager
    def _all_averaged(self) -> Iterator[None]:
        """The last micro-batch of a step. torch says in the next one alone that buckets were not full, and so not averaged."""
        before = self._averaged_bytes
        yield
        averaged_bytes = self._averaged_bytes - before
        if averaged_bytes < self._whole_bytes:
            raise ApplyError(
                "Some parameters got no gradient in the last micro-batch of this step, and others were not averaged with them.",
                evidence=f"{averaged_bytes} of {self._whole_bytes} bytes of gradients were.",
                fix="find_unused_parameters: true", code="MT346",
            )  # fmt: skip

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket in place: what DDP does itself, with every byte counted."""
        whole = bucket.buffer().div_(self._ranks)
        self._averaged_bytes += whole.nbytes
        count_collective(dist.distributed_c10d._get_default_group(), 2 * whole.nbytes * (self._ranks - 1) // self._ranks)
        work = dist.all_reduce(whole, async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return averaged

    def _check(self) -> dict[str, Any]:
        if self.wrapper.module is not self._model:
            raise ApplyError("the model is no longer the one that DistributedDataParallel wraps.", code="MT324")
        return {"ranks": self._ranks, "averaged_bytes": self._averaged_bytes}


def _averaged_elsewhere(context: Context) -> list[str]:
    """Modules whose parameters' gradients somebody else averages."""
    if context.averages_experts:
        return [expert.name for expert in experts_of(context.model, context.blocks)]
    return context.blocks if context.averages_blocks else []


@contextmanager
def _left_out(context: Context) -> Iterator[None]:
    """DDP is told of the parameters whose gradients others average, if there are any and others beside them."""
    model: Any = context.model
    mine = {f"{name}." for name in _averaged_elsewhere(context)}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    inside = {name for name in trained if any(name.startswith(block) for block in mine)}
    if not inside or len(inside) == len(trained):
        yield
        return
    before = vars(model).get(_IGNORED)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, {*(before or ()), *inside})
    try:
        yield
    finally:
        vars(model).pop(_IGNORED)
        if before is not None:
            vars(model)[_IGNORED] = before


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
