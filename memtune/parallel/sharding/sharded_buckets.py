"""Gradients and optimizer state sharded by rows over a group of ranks: buckets, messages and shards.

Subclasses decide when a bucket is reduced. Five rules:

1. A shard is a view: of its input's d rows, rank r of the n in the group owns r·⌈d/n⌉ to (r+1)·⌈d/n⌉. The
  optimizer holds it as a DTensor and updates these rows in place; after its step the other ranks' rows are
  gathered. An input is a parameter, or a shard of it.
2. Buckets hold inputs in reverse order of registration, one dtype each, closed when they reach their size.
  They are reduced in this order on every rank.
3. A message holds, for every rank, its rows of each gradient, padded, and a flag per input: 1 if this rank
  has a gradient. If no rank has one, there is none after the reduction either, so that no optimizer decays an
  unused parameter.
4. The input of a reduction is freed just before the next bucket is packed; until then the reduction overlaps
  with backward.
5. Between backward and the optimizer's step a parameter's `grad` is its shard as a DTensor, the same object
  as the shard's own: clipping by norm and unscaling work on either. If one of the two is None, the gradients
  have been zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from memtune.device import streams
from memtune.parallel.ranks import PARTS, FullParameter, allow_nested_collectives
from memtune.runtime import Context, GradReady, local, locals_of

T = TypeVar("T")


@dataclass(frozen=True)
class ShardAxes:
    """The group that shards rows, and the replicas of its shards."""

    mesh: DeviceMesh
    """The ranks that share a copy; its last dim is the group that shards the rows, the dims before it have
    sharded them already, or hold parts of the model (`parallel.ranks.replica_groups`).
    """
    copies: dist.ProcessGroup | None = None
    """Ranks that hold the same rows in the end, if this is the last division of several copies."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that shard the rows."""
        return self.mesh.get_group(self.mesh.ndim - 1)


@dataclass(eq=False)
class Part:
    """One input in a bucket: its rows on this rank, and its slice of a rank's part of the message."""

    parameter: nn.Parameter
    mesh: DeviceMesh
    rows: int
    """Rows of every rank's shard, including padding at the end."""
    mine: tuple[int, int]
    """First row of this rank, and the number of its rows."""
    numel: int
    """Elements of a rank's rows, including padding."""
    shard: nn.Parameter = field(init=False)
    last: Part = field(init=False)
    """The part of this one, or of later divisions of it, whose shard the optimizer holds."""
    sum: DTensor | None = None
    """Sum of earlier micro-batches, while backward makes the next gradient."""
    _shape: tuple[int, ...] | None = field(init=False)
    """Shape of a rank's rows in a message; None if they are a vector, as the message is."""
    _specs: dict[torch.dtype, Any] = field(default_factory=dict)
    """DTensor specs of the rows, which `from_local` would work out again for each gradient."""

    def __post_init__(self) -> None:
        """Until a later division, the optimizer holds this part's shard, a view of the parameter."""
        whole = local(self.parameter.detach())
        # A division further inside replaces `last`; the shard that the optimizer holds is then smaller.
        self.last, self._shape = self, (self.rows, *whole.shape[1:]) if whole.dim() > 1 else None
        self.shard = nn.Parameter(self.sharded(whole.narrow(0, *self.mine)))

    def sharded(self, rows: Tensor) -> DTensor:
        """Return this rank's `rows` as a DTensor of the parameter's shape."""
        spec = self._specs.get(rows.dtype)
        if spec is None:
            found = self._from_local(rows)
            self._specs[rows.dtype] = found._spec
            return found
        # Without `__init__`, which does nothing, at three times the cost.
        return DTensor.__new__(DTensor, rows, spec, requires_grad=False)

    def _from_local(self, rows: Tensor) -> DTensor:
        mesh = self.mesh
        if (mesh.mesh_dim_names or ())[:1] == (PARTS,):
            return FullParameter.from_parameter(self.parameter).rows(rows, mesh)
        shape, stride = self.parameter.shape, self.parameter.stride()
        return DTensor.from_local(
            rows, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=stride
        )

    def own_rows(self, message: Tensor) -> Tensor:
        """Return this rank's rows, without padding, in its slice of a message."""
        rows = message if self._shape is None else message.view(self._shape)
        return rows[: self.mine[1]] if self.mine[1] < self.rows else rows

    def flat_rows(self) -> Tensor | None:
        """Return this rank's rows as one vector; None if they are padded in messages, or not contiguous."""
        rows = local(self.shard.detach())
        return rows.view(-1) if self.mine[1] == self.rows and rows.is_contiguous() else None

    def pieces(self, ranks: int) -> list[tuple[Tensor, slice | int | None]]:
        """Return pieces of the parameter and their places in its (ranks, n) part of the messages."""
        whole = local(self.parameter.detach())
        full, rest = divmod(len(whole), self.rows) if self.rows else (0, 0)
        # The common case, in one copy: no padding, so the parameter has the layout of the messages.
        if full == ranks and whole.is_contiguous():
            return [(whole.view(ranks, -1), None)]
        pieces: list[tuple[Tensor, slice | int | None]] = []
        if full:
            pieces.append((whole[: full * self.rows].unflatten(0, (full, self.rows)), slice(full)))
        if rest:
            pieces.append((whole[full * self.rows :], full))
        return pieces


class _KeptViews(Generic[T]):
    """Views of tensors, made again when user code has given a tensor other memory (`parameter.data = …`).

    Args:
        make: Makes the views.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._at: list[tuple[Any, Any]] | None = None

    def views_of(self, tensors: list[Tensor]) -> T:
        """Return the views of the memory that `tensors` have now."""
        # The views hold their storages, so no other storage has the address of one.
        at = [(each.untyped_storage()._cdata, each.storage_offset()) for each in tensors]
        if at != self._at:
            self._at, self._views = at, self._make()
        return self._views


@dataclass(eq=False)
class Bucket:
    """Inputs whose gradients are reduced in one message."""

    parts: list[Part]
    ranks: int
    keeps_views: bool
    """True if nothing else moves the parameters, so that views of them can be kept."""
    size: int = field(init=False)
    """Elements of one rank's part of the message, without the flags."""
    missing: set[Part] = field(init=False)
    _lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """All gradients are missing."""
        self._lengths = [part.numel for part in self.parts]
        self.size, self.missing = sum(self._lengths), set(self.parts)
        self._rows, self._weights = _KeptViews(self._flat_rows), _KeptViews(self._pieces)

    def own_rows(self, message: Tensor) -> list[Tensor]:
        """Return this rank's rows of each input in its part of a reduced message."""
        # One split instead of a slice for each input: a view costs about as much as a small op.
        *parts, _ = message.split_with_sizes([*self._lengths, len(message) - self.size])
        return [part.own_rows(each) for part, each in zip(self.parts, parts, strict=True)]

    def copy_in(self, message: Tensor) -> None:
        """Copy this rank's rows of the weights into its part of a message."""
        flat = (
            self._rows.views_of([local(part.shard) for part in self.parts])
            if self.keeps_views
            else self._flat_rows()
        )
        places = list(message.split_with_sizes(self._lengths))
        rows = list[Tensor]()
        for index, (part, each) in enumerate(zip(self.parts, flat, strict=True)):
            if each is None:
                places[index] = part.own_rows(places[index])
                each = local(part.shard)
            rows.append(each)
        torch._foreach_copy_(places, rows)

    def copy_out(self, messages: Tensor) -> None:
        """Copy the weights of all ranks out of their (ranks, size) messages."""
        if self.keeps_views:
            pieces = self._weights.views_of([local(part.parameter) for part in self.parts])
        else:
            pieces = self._pieces()
        sources: list[Tensor] = list(messages.split_with_sizes(self._lengths, 1))
        # A part without rows on this rank has no piece.
        if len(pieces) < len(sources) or any(place is not None for _, place, _ in pieces):
            sources = [
                sources[part] if place is None else _piece(sources[part][place], weight)
                for weight, place, part in pieces
            ]
        weights = [weight for weight, _, _ in pieces]
        if weights:
            torch._foreach_copy_(weights, sources)

    def _flat_rows(self) -> list[Tensor | None]:
        return [part.flat_rows() for part in self.parts]

    def _pieces(self) -> list[tuple[Tensor, slice | int | None, int]]:
        return [(*piece, index) for index, part in enumerate(self.parts) for piece in part.pieces(self.ranks)]


def _piece(message: Tensor, weight: Tensor) -> Tensor:
    """Return what a message has of a piece of the weights, without padding."""
    return (message if message.dim() > 1 else message[: weight.numel()]).view(weight.shape)


class ShardedBuckets:
    """Shards the rows of `inputs` over a group; subclasses detect when gradients are ready.

    Args:
        context: Gives the device of the model.
        inputs: Parameters, or DTensor shards of them from other groups.
        axes: The group, and the ranks that hold the same rows.
        bucket_cap_mb: Gradients are reduced, and weights gathered, in buckets of about this many MiB.
        every_micro_batch: Reduce after each micro-batch and accumulate shards, else reduce the sums in the
            last one.
    """

    def __init__(
        self,
        context: Context,
        inputs: Sequence[nn.Parameter],
        axes: ShardAxes,
        *,
        bucket_cap_mb: int,
        every_micro_batch: bool,
    ) -> None:
        self._axes, self._mesh = axes, axes.mesh
        # Shards of shards are gathered dim by dim, on purpose; torch would warn of that.
        allow_nested_collectives(axes.mesh)
        self._ranks, self._rank = axes.group.size(), axes.group.rank()
        self._group = axes.group.group_name
        self._link = streams.new_stream(context.device)
        keeps_views = context.placement.offload.moves == "none"
        self._buckets = [
            Bucket([self._part(each) for each in inputs_of], self._ranks, keeps_views)
            for inputs_of in _filled(list(inputs), bucket_cap_mb << 20)
        ]
        self.parts = [part for bucket in self._buckets for part in bucket.parts]
        self._every_micro_batch, self.is_last, self._next = every_micro_batch, True, 0
        self._in_flight: tuple[Any, ...] = ()
        self._unsure: list[tuple[Part, Tensor]] = []
        self.grad_ready: GradReady | None = None
        """Emitted on the link's stream for each input with a reduced gradient; None without subscribers."""

    def _part(self, parameter: nn.Parameter) -> Part:
        length, numel = local(parameter).shape[0], local(parameter).numel()
        # Rounded up as `Shard(0)` does, so that DTensor's own functions agree about the rows.
        rows = -(-length // self._ranks)
        first = min(self._rank * rows, length)
        # Padded to equal size: reduce-scatter and all-gather take equal parts.
        padded = rows * (numel // max(length, 1))
        return Part(parameter, self._mesh, rows, (first, min(rows, length - first)), padded)

    @property
    def reduces(self) -> bool:
        """True if this micro-batch is reduced."""
        return self._every_micro_batch or self.is_last

    # -- gradients -------------------------------------------------------------------------------------------

    def set_aside(self, part: Part) -> None:
        """Move the sharded sum of earlier micro-batches out of `grad`; drop it if zeroed (rule 5)."""
        gradient = part.parameter.grad
        # A gradient that autograd has made has the parameter's own placements, and belongs to this backward.
        if isinstance(gradient, DTensor) and gradient.placements != getattr(
            part.parameter, "placements", None
        ):
            for each in {part, part.last}:
                if each.shard.grad is gradient:
                    each.sum = gradient
            part.parameter.grad = None

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduce-scatter the next bucket; its gradients are freed once they are packed."""
        bucket = self._buckets[self._next]
        self._next += 1
        self._wait_reduction()
        # Before the next message is allocated: one message exists at a time (rule 4).
        message = bucket.size + len(bucket.parts)
        like = local(bucket.parts[0].parameter)
        given = like.new_empty(self._ranks * message)
        used = self._pack(bucket, given)
        taken = like.new_empty(message)
        with self._on_link():
            # Averages, sums and hooks are queued behind the reduction on the same stream.
            torch.ops.memtune.reduce_scatter_into_(taken, given, self._group, self._ranks, "avg")
            if self._axes.copies is not None and self.is_last:
                self._average(bucket, taken, self._axes.copies)
            self._add(bucket, taken, used)
            self._tell(bucket)
        self._in_flight = (given, taken, self._event())

    def _pack(self, bucket: Bucket, given: Tensor) -> list[bool]:
        """Copy the gradients into the message, rank by rank; return True for each part with a gradient."""
        # In the message itself: a second collective per bucket would cost another latency.
        flags = given.new_ones(self._ranks, len(bucket.parts))
        gradients: list[Tensor] = []
        used = []
        for index, part in enumerate(bucket.parts):
            gradient = part.parameter.grad  # may come from an earlier micro-batch only
            if gradient is None or isinstance(gradient, DTensor):
                self.set_aside(part)
                gradient = part.parameter.grad
                if gradient is not None:
                    gradient = local(gradient)
            # A sum counts as used: an earlier micro-batch of this step had the gradient.
            used.append(gradient is not None or part.sum is not None)
            if gradient is None:
                # The message has a fixed layout, so a missing gradient is sent as zeros with flag 0.
                gradient = torch.zeros_like(local(part.parameter))
                flags[:, index].zero_()
            else:
                part.parameter.grad = None
            if part.rows:
                gradients.append(gradient)
        # As FSDP2 packs: rank by rank, padded, in one kernel.
        torch._chunk_cat([*gradients, flags], dim=0, num_chunks=self._ranks, out=given.view(self._ranks, -1))
        bucket.missing = set(bucket.parts)
        return used

    def _average(self, bucket: Bucket, taken: Tensor, copies: dist.ProcessGroup) -> None:
        """All-reduce shards, sums included, between the copies; sums equal on all copies do not change."""
        rows_of = dict(zip(bucket.parts, bucket.own_rows(taken), strict=True))
        earlier = [part for part in bucket.parts if part.sum is not None]
        if earlier:
            torch._foreach_add_(
                [rows_of[p] for p in earlier], [local(p.sum) for p in earlier if p.sum is not None]
            )
        for part in earlier:
            # The sum's memory belongs to compute's stream, which must not reuse it while the link reads it.
            if self._link is not None and part.sum is not None:
                streams.used_on(local(part.sum), self._link)
            part.sum = part.shard.grad = None
        torch.ops.memtune.all_reduce_(taken, copies.group_name, copies.size(), "avg")

    def _add(self, bucket: Bucket, taken: Tensor, used: list[bool]) -> None:
        """Assign this rank's rows of the mean as gradients, or add them to earlier micro-batches' sums."""
        rows = bucket.own_rows(taken)
        sums = {index: part.sum for index, part in enumerate(bucket.parts) if part.sum is not None}
        if sums:
            torch._foreach_add_(locals_of(sums.values()), [rows[index] for index in sums])
        for index, part in enumerate(bucket.parts):
            # A view of the message, which stays allocated until the step: no second copy of the shard.
            part.parameter.grad = part.sharded(rows[index]) if part.sum is None else part.sum
            part.sum = None
            if not used[index]:
                # Read when backward ends: `.item()` here would wait for the reduction.
                self._unsure.append((part, taken[bucket.size + index]))

    def _tell(self, bucket: Bucket) -> None:
        if self.grad_ready is None:
            return
        # Subscribers must not see the zeros of a parameter that no rank has used.
        self._drop_unused()
        for part in bucket.parts:
            if part.parameter.grad is not None:
                self.grad_ready.emit(part.parameter)

    def _drop_unused(self) -> None:
        """Drop gradients of parameters that no rank used (rule 3)."""
        for part, flag in self._unsure:
            # Only parameters that this rank did not use: the others need no synchronization.
            if isinstance(flag, FakeTensor) or not flag.item():
                part.parameter.grad = None
        self._unsure.clear()

    def _reduce_the_rest(self) -> None:
        """Reduce all remaining buckets; called when backward ends."""
        while self._next < len(self._buckets):
            self._reduce()
        self._wait_reduction()
        self._drop_unused()
        for part in self.parts:
            part.shard.grad = part.parameter.grad  # rule 5
        self._next = 0

    # -- weights ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """All-gather the rows that other ranks have updated, while the bucket before is copied out."""
        # From here on only the shards have gradients, so that zeroing the optimizer's gradients frees them.
        for part in self.parts:
            part.parameter.grad = None
        in_flight: tuple[Bucket, Tensor, Any] | None = None
        # In forward order: the weights that the next forward reads first are gathered first.
        for bucket in reversed(self._buckets):
            messages = local(bucket.parts[0].parameter).new_empty(self._ranks, bucket.size)
            mine = messages[self._rank]
            bucket.copy_in(mine)
            with self._on_link():
                torch.ops.memtune.all_gather_into_(messages.view(-1), mine, self._group, self._ranks)
            if in_flight is not None:
                self._copy_out(*in_flight)
            in_flight = bucket, messages, self._event()
        if in_flight is not None:
            self._copy_out(*in_flight)

    def _copy_out(self, bucket: Bucket, messages: Tensor, event: Any) -> None:
        if event is not None:
            streams.wait(event)
        bucket.copy_out(messages)

    # -- the link's own stream -------------------------------------------------------------------------------

    def _on_link(self) -> AbstractContextManager[Any]:
        """Return the link's stream, which first waits for compute."""
        # On it collectives overlap with compute; all their memory belongs to compute's stream, which waits in
        # `_wait_reduction`.
        if self._link is not None:
            streams.wait_current(self._link, self._link.device)
        return streams.on(self._link)

    def _event(self) -> Any:
        return streams.end_of(self._link)

    def _wait_reduction(self) -> None:
        """Wait for the reduction in flight, and free its input (rule 4)."""
        if self._in_flight and self._in_flight[-1] is not None:
            streams.wait(self._in_flight[-1])
        self._in_flight = ()

    # -- proof -----------------------------------------------------------------------------------------------

    def count_detached_inputs(self) -> int:
        """Return the number of inputs that have lost the memory of the shards that the optimizer updates."""
        return sum(not _same_storage(part.parameter, part.shard) for part in self.parts)

    def shard_bytes(self) -> int:
        """Return the bytes of the shards on this rank."""
        return sum(local(part.shard).nbytes for part in self.parts)

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._buckets)


def _filled(parameters: list[nn.Parameter], cap_bytes: int) -> list[list[nn.Parameter]]:
    """Fill buckets by rule 2; open ones are closed at the end, in order of their first parameter."""
    place = {parameter: index for index, parameter in enumerate(reversed(parameters))}
    closed: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in place:
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(local(each).nbytes for each in bucket) >= cap_bytes:
            closed.append(filling.pop(parameter.dtype))
    # By the first parameter: on every rank the same order, which collectives require.
    return sorted([*closed, *filling.values()], key=lambda bucket: place[bucket[0]])


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return bool(local(one).untyped_storage()._cdata == local(other).untyped_storage()._cdata)
