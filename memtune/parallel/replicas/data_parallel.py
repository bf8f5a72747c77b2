"""DistributedDataParallel: replicas, with gradients averaged bucket by bucket during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from memtune.errors import ApplyError
from memtune.parallel.ranks import require_ranks
from memtune.parallel.replicas.broadcast_buffers import BroadcastBuffers
from memtune.runtime import Context, count_collective

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute in which DDP looks up the names of parameters to ignore."""


class ReplicatedModel(DistributedDataParallel):
    """DDP's wrapper with the attributes of the model: a loss may call its submodules and methods.

    Every backward averages gradients. DDP prepares one at each forward, so of two backwards through one
    forward, or after two forwards, it would leave the second one's gradients to each rank.

    Pickled or copied, it is the model itself, which needs neither memtune nor a process group to be loaded.
    """

    _is_prepared = False
    """A forward has prepared the average of a backward that has not begun."""
    _backward = -1
    """Number of the last backward that reached an output."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output, at which each backward is noticed."""
        out = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._is_prepared = True
            reached = weakref.WeakMethod(self._reached)
            for each in tree_leaves(out):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(lambda _, reached=reached: _call(reached))
        return out

    def _reached(self) -> None:
        """Prepare the reducer for a backward that no forward has prepared.

        Raises:
            ApplyError: Unused parameters are looked for, in an output that only its forward has.
        """
        number = torch._C._current_graph_task_id()
        if number == self._backward or not self._fills_gradients():
            return
        self._backward = number
        if self._is_prepared:
            self._is_prepared = False
        elif self.find_unused_parameters:
            raise ApplyError(
                "A second backward of one step runs through the model, and find_unused_parameters: true looks"
                " for unused parameters in the output of each forward once.",
                fix="find_unused_parameters: false, or one backward of the sum of the losses",
                code="MT315",
            )
        else:
            # Private in torch: of what DDP's forward does, all but the broadcast of buffers.
            self.reducer._rebuild_buckets()
            self.reducer.prepare_for_backward([])

    def _fills_gradients(self) -> bool:
        """Return whether the current backward accumulates into `grad`, unlike `torch.autograd.grad`."""
        trained = (each for each in self.module.parameters() if each.requires_grad)
        try:
            # Private in torch; it raises for what `torch.autograd.grad` is to return.
            return any(torch._C._will_engine_execute_node(get_gradient_edge(each).node) for each in trained)
        except RuntimeError:
            return False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model where the wrapper has none.

        Raises:
            ApplyError: It is a submodule, and unused parameters are looked for in what the whole model
                returns.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self._modules:  # before torch's constructor has set it
                raise
        found = getattr(self.module, name)
        if torch.is_grad_enabled() and isinstance(found, (nn.Module, Tensor, MethodType)):
            self._expect_backward(name)
        return found

    def _expect_backward(self, name: str) -> None:
        """Prepare the average of gradients, as forward of the wrapper would."""
        if not self.require_backward_grad_sync or torch._C._current_graph_task_id() >= 0:
            return
        if self.find_unused_parameters:
            raise ApplyError(
                f"The loss uses {name!r} of the model, and find_unused_parameters: true looks for unused"
                " parameters in what a call of the whole model returns.",
                fix="find_unused_parameters: false, or call the model itself in the loss",
                code="MT315",
            )
        # Private in torch: what DDP's forward does before it calls the module.
        self._pre_forward()  # type: ignore[no-untyped-call]
        self.reducer.prepare_for_backward([])
        self._is_prepared = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the model, so that a saved one is loaded anywhere."""
        return itemgetter(0), ((self.module,),)


class Replicas:
    """Wraps the model of `context` and averages its gradients over all ranks after the last micro-batch.

    Parameters, their names and the optimizer remain the user's own; call `context.loop.runner` instead of the
    model.

    Args:
        context: Gets a `runner`, a `sync` and a check.
        bucket_cap_mb: Gradients are averaged in buckets of about this many MiB.
        find_unused_parameters: Search the graph for parameters that get no gradient in this step.

    Raises:
        ApplyError: There is no process group, or the ranks' weights differ.
    """

    def __init__(self, context: Context, *, bucket_cap_mb: int, find_unused_parameters: bool) -> None:
        require_ranks(context, "ddp")
        self._ranks = context.placement.world_size
        self._averaged_bytes = 0
        self._model = context.model
        if _ddp_averages_nothing(context):
            self._average_nothing(context)
            return
        with _excluded(context):
            self.wrapper = ReplicatedModel(
                context.model,
                bucket_cap_mb=bucket_cap_mb,
                # Gradients live in the buckets: the model's gradients exist once.
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
                init_sync=False,  # the weights are already compared, and the user's must not be overwritten
            )
        # A lambda, because DDP checks a hook's annotations and rejects strings. A weak method, because DDP's
        # C++ holds the hook where Python's garbage collector does not see it, and the model would never be
        # freed; the wrapper's own dictionary keeps `self` alive.
        average = weakref.WeakMethod(self._average)
        self.wrapper.register_comm_hook(None, lambda state, bucket: average()(bucket))  # type: ignore[misc]
        vars(self.wrapper)["_memtune_replicas"] = self
        self._whole_bytes = sum(p.nbytes for p in self.wrapper._module_parameters if p.requires_grad)
        context.loop.runner = self.wrapper
        context.loop.sync, context.placement.states_average_grads = self._sync, True
        context.checks["sharding.states"] = self._check

    def _average_nothing(self, context: Context) -> None:
        """Only broadcast buffers: DDP refuses a model none of whose gradients it averages."""
        buffers = BroadcastBuffers(context, dist.distributed_c10d._get_default_group())

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            yield
            if last:
                buffers.step_ends()

        context.loop.runner = context.model
        context.loop.sync, context.placement.states_average_grads = sync, True
        context.checks["sharding.states"] = lambda: {"ranks": self._ranks, "averaged_bytes": 0}

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        return self._last_micro_batch() if last else self.wrapper.no_sync()

    @contextmanager
    def _last_micro_batch(self) -> Iterator[None]:
        """Run the last micro-batch of a step."""
        # torch reports only in the next one that buckets were not full, and so not averaged.
        # Counted by bytes in the comm hook, because the reducer's own state cannot be read from Python.
        before = self._averaged_bytes
        yield
        averaged_bytes = self._averaged_bytes - before
        if averaged_bytes < self._whole_bytes:
            raise ApplyError(
                "Some parameters got no gradient in the last micro-batch of this step, and others were not"
                " averaged with them.",
                evidence=f"{averaged_bytes} of {self._whole_bytes} bytes of gradients were.",
                fix="find_unused_parameters: true",
                code="MT346",
            )

    def _average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket in place, as DDP does, with every byte counted."""
        # Before the sum, as DDP does: in 16 bits the sum of many ranks could overflow.
        whole = bucket.buffer().div_(self._ranks)
        self._averaged_bytes += whole.nbytes
        count_collective(
            dist.distributed_c10d._get_default_group(), 2 * whole.nbytes * (self._ranks - 1) // self._ranks
        )
        work = dist.all_reduce(whole, async_op=True)
        averaged: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return averaged

    def _check(self) -> dict[str, Any]:
        if self.wrapper.module is not self._model:
            raise ApplyError(
                "the model is no longer the one that DistributedDataParallel wraps.", code="MT324"
            )
        return {"ranks": self._ranks, "averaged_bytes": self._averaged_bytes}


def _not_reduced_by_ddp(context: Context) -> list[str]:
    """Return the modules whose parameters' gradients another component averages."""
    return context.blocks if context.placement.offload.averages == "blocks" else []


def _names_not_reduced_by_ddp(context: Context) -> set[str]:
    """Return the parameters whose gradients another component averages, and the frozen ones next to them."""
    # These may rest off the device, where DDP accepts none.
    mine = tuple(f"{name}." for name in _not_reduced_by_ddp(context))
    return {name for name, _ in context.model.named_parameters() if name.startswith(mine)}


def _ddp_averages_nothing(context: Context) -> bool:
    inside = _names_not_reduced_by_ddp(context)
    trained = {name for name, parameter in context.model.named_parameters() if parameter.requires_grad}
    return bool(inside) and trained <= inside


@contextmanager
def _excluded(context: Context) -> Iterator[None]:
    """Exclude from DDP the parameters whose gradients other mechanisms average, if there are any."""
    model: Any = context.model
    inside = _names_not_reduced_by_ddp(context)
    if not inside:
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


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (found := method()) is not None:
        found()


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
