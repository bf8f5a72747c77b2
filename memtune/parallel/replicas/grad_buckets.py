"""Gradients averaged bucket by bucket during backward, as in DistributedDataParallel, among copies of a part.

DDP's reducer takes plain tensors that all ranks of its group hold; parameters of which a rank has a part are
DTensors. Its rules, which `parallel.replicas.ddp_pass` has as well, apply here too:

1. Buckets are filled in the order in which gradients become ready, closed when they reach their size, one
  dtype each, and never freed. In the first step the order is unknown: gradients are averaged when backward
  ends, and that step gives the order.
2. A gradient is copied into its bucket as soon as autograd has accumulated it, and becomes a view of it. With
  several micro-batches that happens in the last one.
3. A full bucket is averaged during backward, in order; all are done before backward returns. A parameter
  without a gradient is an error or, with `find_unused_parameters`, counts as zeros if another rank has one,
  else as no gradient.
4. If a rank runs stages of a pipeline, no micro-batch is the last one of all stages: buckets are filled, in
  reverse order of registration, and averaged when the last backward has ended.
5. Buffers are broadcast from the first copy before the first forward of a step
  (`parallel.replicas.broadcast_buffers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from memtune import refusals
from memtune.parallel.ranks import message_device, missing_here, require_ranks, rows_like, same_part_group
from memtune.parallel.replicas.broadcast_buffers import BroadcastBuffers
from memtune.parallel.replicas.ddp_pass import BUCKET_CAP_MB
from memtune.runtime import (
    HOST,
    BackwardEnd,
    Context,
    SyncContext,
    call_when_grad_ready,
    count_collective,
    local,
    tier,
)


@dataclass(eq=False)
class _Bucket:
    """Gradients that are averaged in one message."""

    parameters: list[nn.Parameter]
    whole: Tensor
    views: dict[nn.Parameter, Tensor]
    missing: set[nn.Parameter] = field(default_factory=set)
    work: Any = None


class GradBuckets:
    """Averages the gradients of `parameters` over the ranks of `group`, after the last micro-batch.

    Args:
        context: Its `undo` removes the hooks.
        parameters: Equal on all ranks.
        group: The ranks.
        bucket_cap_mb: Gradients are averaged in buckets of about this many MiB.
        find_unused_parameters: Ask all ranks which parameters got no gradient in this step.
        in_backward: Start while backward runs; otherwise a caller of `finish` says when it has ended.
        outer: Further context of a micro-batch.
    """

    def __init__(
        self,
        context: Context,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        bucket_cap_mb: int = BUCKET_CAP_MB,
        find_unused_parameters: bool = True,
        in_backward: bool = True,
        outer: SyncContext | None = None,
    ) -> None:
        self._parameters, self._group = list(parameters), group
        self._cap_bytes, self._finds_unused = bucket_cap_mb << 20, find_unused_parameters
        self._outer = outer or (lambda last: nullcontext())
        self._arrival: list[nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._last, self._next = True, 0
        self._at_end = BackwardEnd(self.finish, self._give_up)
        self.averaged_bytes = 0
        if in_backward:
            call_when_grad_ready(context, dict.fromkeys(self._parameters, self._arrived))

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch."""
        self._last = last
        try:
            with self._outer(last):
                yield
        except BaseException:
            self._give_up()
            raise
        finally:
            self._last = True

    def _give_up(self) -> None:
        """Clean up after a backward that raised."""
        # torch drops the callbacks queued for its end. Tensors of collectives in flight are held until those
        # are complete.
        self._next, self._arrival = 0, []
        # A new bucket where one is in flight: the collective still writes the old memory.
        self._buckets = [
            _bucket(each.parameters) if each.work is not None else each for each in self._buckets
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)

    # -- gradients -------------------------------------------------------------------------------------------

    def _arrived(self, parameter: Tensor) -> None:
        if not self._last:
            return
        assert isinstance(parameter, nn.Parameter)
        self._at_end.expect()
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            self._arrival.append(parameter)
            return
        self._copy_in(bucket, parameter)
        self._average_what_is_full()

    @torch.no_grad()
    def _copy_in(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        # A gradient that was zeroed in place is the view already, and is not copied.
        gradient, view = parameter.grad, bucket.views[parameter]
        bucket.missing.discard(parameter)
        if gradient is None:
            view.zero_()
        elif local(gradient).untyped_storage()._cdata != view.untyped_storage()._cdata:
            view.copy_(local(gradient))
            parameter.grad = _like(view, parameter)

    def _average_what_is_full(self) -> None:
        # In order only, whichever bucket fills first: all ranks must start the same message next.
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            self._next += 1
            ranks = self._group.size()
            # Before the sum, as DDP does.
            bucket.whole.div_(ranks)
            self.averaged_bytes += bucket.whole.nbytes
            count_collective(self._group, 2 * bucket.whole.nbytes * (ranks - 1) // ranks)
            bucket.work = dist.all_reduce(bucket.whole, group=self._group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Average the remaining gradients when backward has ended."""
        if not self._buckets:
            self._fill()
        if not self._finds_unused:
            self._require_gradients()
        for bucket in self._buckets:
            for parameter in tuple(bucket.missing):
                self._copy_in(bucket, parameter)
        self._average_what_is_full()
        # Waits last: all remaining messages are in flight together.
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work, bucket.missing = None, set(bucket.parameters)
        # After the buckets: some of which other ranks may have averaged inside backward.
        for parameter in missing_here(self._parameters, self._group) if self._finds_unused else ():
            parameter.grad = _like(self._bucket_of[parameter].views[parameter], parameter)
        self._next = 0

    def _require_gradients(self) -> None:
        missing = [parameter for parameter in self._parameters if parameter.grad is None]
        if missing:
            raise refusals.error_of(
                refusals.missing_gradients(len(missing), "step", "find_unused_parameters: true"),
                f"One has the shape {tuple(missing[0].shape)}.",
            )

    def _fill(self) -> None:
        """Make the buckets by rule 1."""
        place = {parameter: index for index, parameter in enumerate(self._arrival)}
        not_arrived = [p for p in reversed(self._parameters) if p not in place]
        open_: dict[torch.dtype, list[nn.Parameter]] = {}
        closed: list[list[nn.Parameter]] = []
        # Buckets must be equal on all ranks, or messages of other parameters would be added.
        order = self._as_first_copy([*self._arrival, *not_arrived])
        for parameter in order:
            # A message has one dtype; DDP divides buckets in the same way.
            filling = open_.setdefault(parameter.dtype, [])
            filling.append(parameter)
            if sum(local(each).nbytes for each in filling) >= self._cap_bytes:
                closed.append(open_.pop(parameter.dtype))
        place = {parameter: index for index, parameter in enumerate(order)}
        for parameters in sorted([*closed, *open_.values()], key=lambda bucket: place[bucket[0]]):
            self._buckets.append(_bucket(parameters))
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._arrival = []

    def _as_first_copy(self, order: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return the order of the first copy: ranks whose batches used other branches have another one."""
        if isinstance(local(order[0].detach()), FakeTensor):
            return order
        number = {parameter: index for index, parameter in enumerate(self._parameters)}
        with tier(HOST):
            numbers = torch.tensor(
                [number[parameter] for parameter in order], device=message_device(self._group)
            )
            dist.broadcast(numbers, group=self._group, group_src=0)
            return [self._parameters[index] for index in numbers.tolist()]


class Buckets(GradBuckets):
    """Averages the gradients of the model in `context` over the ranks that hold the same part: `ddp`.

    Args:
        context: Gets a `sync` and a check.
        bucket_cap_mb: Gradients are averaged in buckets of about this many MiB.
        find_unused_parameters: Ask all ranks which parameters got no gradient in this step.

    Raises:
        ApplyError: There is no process group, or the weights of these ranks differ.
    """

    def __init__(self, context: Context, *, bucket_cap_mb: int, find_unused_parameters: bool) -> None:
        placement = context.placement
        require_ranks(context, "ddp")
        self._model, self._absent = context.model, frozenset(placement.absent)
        # Its schedule decides when the last backward ends, so no hooks are needed.
        pipeline: Any = context.loop.pipeline
        super().__init__(
            context,
            self._trained(),
            same_part_group(context),
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            in_backward=pipeline is None,
        )
        if pipeline is not None:  # rule 4
            pipeline.reduce = self.finish
        self._buffers = BroadcastBuffers(context, self._group)
        context.loop.sync, placement.states_average_grads = self.sync, True
        context.checks["sharding.states"] = self._check

    def finish(self) -> None:
        """Average the remaining gradients, and broadcast buffers before the next step."""
        self._buffers.step_ends()
        super().finish()

    def _trained(self) -> list[nn.Parameter]:
        """Return the trainable parameters of this rank."""
        return [
            p for name, p in self._model.named_parameters() if p.requires_grad and name not in self._absent
        ]

    def _check(self) -> dict[str, Any]:
        mine = set(self._trained())
        if mine != set(self._parameters):
            raise refusals.error_of(refusals.other_parameters())
        return {"ranks": self._group.size(), "averaged_bytes": self.averaged_bytes}


def _bucket(parameters: list[nn.Parameter]) -> _Bucket:
    sizes = [local(each).numel() for each in parameters]
    whole = local(parameters[0]).detach().new_empty(sum(sizes))
    parts = whole.split(sizes)
    views = {p: part.view(local(p).shape) for p, part in zip(parameters, parts, strict=True)}
    return _Bucket(parameters, whole, views, set(parameters))


def _like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return `part` as a gradient of `parameter`."""
    return rows_like(part, parameter) if isinstance(parameter, DTensor) else part
