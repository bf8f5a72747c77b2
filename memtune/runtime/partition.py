"""Whole parameters with divided gradients and optimizer state: what ZeRO calls stages 1 and 2.

Five rules:

1. A shard is a view: rank r owns rows r·⌈d/N⌉ to (r+1)·⌈d/N⌉ of every trainable parameter's first dimension d. The optimizer
   holds it as a DTensor and updates these rows in place; after its step the other ranks' rows are gathered.
2. Buckets hold parameters in reverse order of registration, one dtype each, closed when they reach their size. They are
   reduced in this order on every rank: full ones while backward goes on, the others when it ends.
3. A message holds, for every rank, its rows of each gradient, padded, and a flag per parameter: 1 if this rank has a gradient.
   Where no rank has one there is none after the reduction either, so that no optimizer decays what nobody used.
4. What a reduction reads is let go just before the next bucket is packed; until then it runs beside backward.
5. Between backward and the optimizer's step a parameter's `grad` is its shard as a DTensor, the same object as the shard's own:
   clipping by norm and unscaling work on either. Where one of the two is gone, somebody has zeroed the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.ranks import require_ranks
from memtune.runtime.sharding import meshes, rebind
from memtune.runtime.tree import local


@dataclass(eq=False)
class _Part:
    """One parameter in a bucket: its rows on this rank, and where they lie in a rank's part of the message."""

    parameter: nn.Parameter
    rows: int
    """Of every rank's shard, the last ones of it padding."""
    mine: tuple[int, int]
    """First row of this rank, and how many there are."""
    place: slice
    shard: nn.Parameter = field(init=False)
    sum: DTensor | None = None
    """What earlier micro-batches have summed up, while backward makes the next gradient."""

    def divide(self, mesh: DeviceMesh) -> None:
        """Make the view that the optimizer will hold."""
        rows = self.parameter.detach().narrow(0, *self.mine)
        self.shard = nn.Parameter(self.sharded(rows, mesh))

    def sharded(self, rows: Tensor, mesh: DeviceMesh) -> DTensor:
        """This rank's `rows` as a tensor of the parameter's shape."""
        shape, stride = self.parameter.shape, self.parameter.stride()
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def own(self, message: Tensor) -> Tensor:
        """This rank's rows in a message (or in its part of one) that holds one rank's rows of everything."""
        return message[self.place].view(self.rows, *self.parameter.shape[1:])[: self.mine[1]]

    def pieces(self, messages: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the parameter and where they are in the (ranks, size) messages: all full shards, then a shorter one."""
        rows, width = self.parameter.shape[0], self.parameter.shape[1:]
        full, rest = divmod(rows, self.rows)
        whole = self.parameter.detach()
        if full:
            yield (
                whole.narrow(0, 0, full * self.rows).unflatten(0, (full, self.rows)),
                messages[:full, self.place].view(full, self.rows, *width),
            )
        if rest:
            yield whole.narrow(0, full * self.rows, rest), messages[full, self.place].view(self.rows, *width)[:rest]


@dataclass(eq=False)
class _Bucket:
    parts: list[_Part]
    size: int
    """Elements of one rank's part of the message, without the flags."""
    missing: set[_Part] = field(default_factory=set)


class Partition:
    """Divides gradients and optimizer state of the model in `context` over all ranks and rebinds its optimizer to the shards.

    Parameters stay the user's own objects, whole on every rank.

    Args:
        context: Model and optimizer; gets a check, and for `every_micro_batch=False` a `sync`.
        kind: Of the technique, for messages.
        bucket_cap_mb: Gradients are reduced, and weights gathered, in buckets of about this many MiB.
        every_micro_batch: Reduce after each micro-batch and sum up shards (ZeRO-2), else reduce the sums once (ZeRO-1).

    Raises:
        ApplyError: There is no process group, or the ranks' weights differ.
    """

    def __init__(self, context: Context, *, kind: str, bucket_cap_mb: int, every_micro_batch: bool) -> None:
        require_ranks(context, kind)
        self._mesh = meshes(context.device.type, context.ranks)[1]
        self._ranks, self._rank = context.ranks, context.rank
        self._group = self._mesh.get_group().group_name
        self._link = torch.cuda.Stream(context.device) if context.device.type == "cuda" else None
        named = {name: p for name, p in context.model.named_parameters() if p.requires_grad and p.numel()}
        self._buckets = [self._bucket(each) for each in _filled(list(named.values()), bucket_cap_mb << 20)]
        self._parts = [part for bucket in self._buckets for part in bucket.parts]
        self._reduces, self._queued, self._next = True, False, 0
        self._in_flight: tuple[Any, ...] = ()
        self._unsure: list[tuple[_Part, Tensor]] = []
        self._hook(context)
        shards = {part.parameter: part.shard for part in self._parts}
        rebind(context.optimizer, named, {name: shards[p] for name, p in named.items()})
        context.represented.update(shards)
        context.checks["sharding.states"] = self._check
        if not every_micro_batch:
            context.sync = self._sync

    def _bucket(self, parameters: list[nn.Parameter]) -> _Bucket:
        parts, size = [], 0
        for parameter in parameters:
            length = parameter.shape[0]
            rows = -(-length // self._ranks)
            first = min(self._rank * rows, length)
            n = rows * (parameter.numel() // max(length, 1))
            part = _Part(parameter, rows, (first, min(rows, length - first)), slice(size, size + n))
            part.divide(self._mesh)
            parts.append(part)
            size += n
        return _Bucket(parts, size, set(parts))

    def _hook(self, context: Context) -> None:
        for bucket in self._buckets:
            for part in bucket.parts:
                before, after = self._hooks_of(bucket, part)
                for handle in (
                    part.parameter.register_hook(before),
                    part.parameter.register_post_accumulate_grad_hook(after),
                ):
                    context.undo.callback(handle.remove)
        context.optimizer.register_step_pre_hook(self._before_step)
        context.optimizer.register_step_post_hook(self._after_step)

    def _hooks_of(self, bucket: _Bucket, part: _Part) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        def before(gradient: Tensor) -> None:
            self._set_aside(part)

        def after(parameter: Tensor) -> None:
            if self._reduces:
                self._arrived(bucket, part)

        return before, after

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        self._reduces = last
        try:
            yield
        finally:
            self._reduces = True

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _set_aside(self, part: _Part) -> None:
        """Keep the sharded sum of earlier micro-batches where autograd does not add to it; a zeroed one is dropped (rule 5)."""
        gradient = part.parameter.grad
        if isinstance(gradient, DTensor):
            part.sum = gradient if part.shard.grad is gradient else None
            part.parameter.grad = None

    def _arrived(self, bucket: _Bucket, part: _Part) -> None:
        bucket.missing.discard(part)
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce-scatter the next bucket; its gradients are let go once they are packed."""
        bucket = self._buckets[self._next]
        self._next += 1
        self._land()
        message = bucket.size + len(bucket.parts)
        like = bucket.parts[0].parameter
        given = like.new_empty(self._ranks * message)
        used = self._pack(bucket, given)
        taken = like.new_empty(message)
        with self._on_link():
            torch.ops.memtune.reduce_scatter_into_(taken, given, self._group, self._ranks, "avg")
            self._add(bucket, taken, used)
        self._in_flight = (given, taken, self._event())

    def _pack(self, bucket: _Bucket, given: Tensor) -> list[bool]:
        """Lay out the gradients as every rank will get them; returns which of them there are."""
        flags = given.new_ones(self._ranks, len(bucket.parts))
        gradients: list[Tensor] = []
        used = []
        for index, part in enumerate(bucket.parts):
            self._set_aside(part)
            gradient = None if part in bucket.missing else part.parameter.grad
            used.append(gradient is not None)
            if gradient is None:
                gradient = torch.zeros_like(part.parameter)
                flags[:, index].zero_()
            gradients.append(gradient)
            part.parameter.grad = None
        torch._chunk_cat([*gradients, flags], dim=0, num_chunks=self._ranks, out=given.view(self._ranks, -1))
        bucket.missing = set(bucket.parts)
        return used

    def _add(self, bucket: _Bucket, taken: Tensor, used: list[bool]) -> None:
        """Make this rank's rows of the mean the gradients, or add them to what earlier micro-batches left."""
        earlier = [part for part in bucket.parts if part.sum is not None]
        if earlier:
            torch._foreach_add_([local(part.sum) for part in earlier if part.sum is not None], [p.own(taken) for p in earlier])
        for index, part in enumerate(bucket.parts):
            known = used[index] or part.sum is not None
            part.parameter.grad = part.sum if part.sum is not None else part.sharded(part.own(taken), self._mesh)
            part.sum = None
            if not known:
                self._unsure.append((part, taken[bucket.size + index]))

    def _finish(self) -> None:
        """Called when backward ends."""
        while self._next < len(self._buckets):
            self._reduce()
        self._land()
        for part, flag in self._unsure:  # rule 3
            if isinstance(flag, FakeTensor) or not flag.item():
                part.parameter.grad = None
        for part in self._parts:
            part.shard.grad = part.parameter.grad  # rule 5
        self._unsure.clear()
        self._queued, self._next = False, 0

    # -- weights -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """What was zeroed on one side is zeroed on both (rule 5)."""
        for part in self._parts:
            if part.parameter.grad is None or part.shard.grad is None:
                part.parameter.grad = part.shard.grad = None
            elif part.parameter.grad is not part.shard.grad:  # the user has put another one there
                part.shard.grad = part.parameter.grad

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Gather the rows that the other ranks have updated, each bucket while the one before it is copied out.

        From here on only the shards have gradients, so that zeroing the optimizer's lets go of them.
        """
        for part in self._parts:
            part.parameter.grad = None
        coming: tuple[_Bucket, Tensor, Any] | None = None
        for bucket in reversed(self._buckets):
            messages = bucket.parts[0].parameter.new_empty(self._ranks, bucket.size)
            mine = messages[self._rank]
            torch._foreach_copy_([p.own(mine) for p in bucket.parts], [local(p.shard) for p in bucket.parts])
            with self._on_link():
                torch.ops.memtune.all_gather_into_(messages.view(-1), mine, self._group, self._ranks)
            if coming is not None:
                self._copy_out(*coming)
            coming = bucket, messages, self._event()
        if coming is not None:
            self._copy_out(*coming)

    def _copy_out(self, bucket: _Bucket, messages: Tensor, event: Any) -> None:
        if event is not None:
            event.wait()
        pairs = [pair for part in bucket.parts for pair in part.pieces(messages)]
        torch._foreach_copy_([rows for rows, _ in pairs], [source for _, source in pairs])

    # -- the link's own stream -----------------------------------------------------------------------------------------

    def _on_link(self) -> AbstractContextManager[Any]:
        """On CUDA collectives run beside compute; all their memory belongs to compute's stream, which waits in `_land`."""
        if self._link is None:
            return nullcontext()
        self._link.wait_stream(torch.cuda.current_stream(self._link.device))
        return torch.cuda.stream(self._link)

    def _event(self) -> Any:
        return None if self._link is None else self._link.record_event()

    def _land(self) -> None:
        """Wait for the reduction that is under way, and let go of what it read (rule 4)."""
        if self._in_flight and self._in_flight[-1] is not None:
            self._in_flight[-1].wait()
        self._in_flight = ()

    def _check(self) -> dict[str, Any]:
        apart = [part for part in self._parts if not _same_storage(part.parameter, part.shard)]
        if apart:
            raise ApplyError(
                f"{len(apart)} parameters no longer share memory with the shards that the optimizer updates.",
                fix="move or convert the model before memtune.apply, not after",
                code="MT325",
            )
        return {
            "ranks": self._ranks,
            "buckets": len(self._buckets),
            "shard_bytes": sum(local(part.shard).nbytes for part in self._parts),
        }


def _filled(parameters: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Rule 2; what stays open at the end is closed in order of its first parameter."""
    place = {parameter: index for index, parameter in enumerate(reversed(parameters))}
    closed: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in place:
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(each.nbytes for each in bucket) >= cap_bytes:
            closed.append(filling.pop(parameter.dtype))
    return sorted([*closed, *filling.values()], key=lambda bucket: place[bucket[0]])


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == local(other).untyped_storage()._cdata)
