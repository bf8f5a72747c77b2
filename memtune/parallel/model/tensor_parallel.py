"""Tensor parallelism: linear layers sharded over a group of ranks by heads and features; partial outputs are
summed.

Four rules:

1. A weight is a DTensor of the plain weight's shape whose part on this rank the layer computes with (torch's
   `ColwiseParallel` and `RowwiseParallel` divide alike); the code between the layers sees plain tensors with
   this rank's heads or features.
2. Forward sums the row layer's outputs, backward the gradients of the column layers' shared input: one
   all-reduce each. A row's bias is added once, after the sum.
3. All other parameters are replicated in a group, whose ranks therefore work on one micro-batch at a time:
   `MicroBatchRotation` broadcasts the micro-batches of all its ranks, each with one seed, so that random
   draws outside of the pairs are equal too.
4. Groups are consecutive ranks. Gradients are averaged between groups when the last backward has ended; if
   states are sharded among the ranks that hold the same part (`parallel.ranks.replica_groups`), that
   mechanism averages them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from memtune.deferred_init import Piece, keep_only
from memtune.errors import ApplyError
from memtune.parallel.ranks import MicroBatchRotation, require_groups, require_ranks
from memtune.parallel.replicas import GradBuckets, average_now
from memtune.parallel.sharding import meshes, rebind
from memtune.runtime import BackwardEnd, Context, call_when_grad_ready, local
from memtune.workload import Pair, tensors_of

_SCALE = torch.ops.aten.mul_.Tensor
_MIXED: list[AbstractContextManager[Any]] = []
"""Entered permanently: replicated parameters are plain tensors, and clipping mixes them with DTensors."""


class _Copied(torch.autograd.Function):
    """The shared input of the column layers: identity; its gradient is summed over the ranks (rule 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Reduced in place: only this node references the gradient, a product of the column layers' backward.
        whole = gradient.contiguous()
        torch.ops.memtune.all_reduce_(whole, ctx.group, ctx.ranks, "sum")
        return whole, None, None


class _Summed(torch.autograd.Function):
    """Sum of a partial product over the ranks, in the same memory (rule 2)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str, ranks: int) -> Tensor:
        # In place: nothing else uses the partial product, whose linear layer saves its input, not its output.
        whole = part.detach().contiguous()
        torch.ops.memtune.all_reduce_(whole, group, ranks, "sum")
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


@dataclass(eq=False)
class Sharers:
    """The ranks that share a pair, and the last input of its column layers."""

    group: str
    ranks: int
    columns: int
    _given: weakref.ref[Tensor] | None = field(default=None, repr=False)
    _copied: Tensor | None = field(default=None, repr=False)
    _taken: int = field(default=0, repr=False)

    def entered(self, x: Tensor) -> Tensor:
        """Return `x` for a column layer."""
        # The same object for all layers with the same `x`: autograd sums their gradients before the
        # all-reduce.
        copied = self._copied
        if copied is None or self._given is None or self._given() is not x:
            copied = _Copied.apply(x, self.group, self.ranks)  # type: ignore[no-untyped-call]
            # Weakly: the last input must not outlive the forward if a column layer is not called.
            self._given, self._copied, self._taken = weakref.ref(x), copied, 0
        # Counted, not compared with the last column's name: models call q, k and v in any order.
        self._taken += 1
        # All column layers have it, so no reference is needed any more.
        if self._taken == self.columns:
            self.forget()
        assert copied is not None
        return copied

    def forget(self) -> None:
        """Drop the references to the input."""
        self._given = self._copied = None


class ColumnLinear(nn.Linear):
    """A linear layer of which this rank computes some outputs."""

    sharers: Sharers

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs."""
        bias = self._parameters["bias"]
        return F.linear(
            self.sharers.entered(input), local(self.weight), None if bias is None else local(bias)
        )


class RowLinear(nn.Linear):
    """A linear layer of which this rank has some inputs."""

    sharers: Sharers

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs, equal on every rank."""
        # The row layer ends the pair, also if some column layer was not called.
        self.sharers.forget()
        part, bias = F.linear(input, local(self.weight)), self._parameters["bias"]
        whole: Tensor = _Summed.apply(part, self.sharers.group, self.sharers.ranks)  # type: ignore[no-untyped-call]
        # After the sum: before it the bias would count once per rank.
        return whole if bias is None else whole + bias


def cut(context: Context, pairs: Sequence[Pair], degree: int) -> None:
    """Shard `pairs` of the model in `context` over groups of `degree` ranks and rebind its optimizer.

    Args:
        context: Model and optimizer, changed in place; gets a rotation, and a `sync` if there are several
            groups.
        pairs: Pairs of linear layers to shard.
        degree: Ranks of a group; divides the number of ranks.

    Raises:
        ApplyError: There is no process group, `degree` does not divide it, the ranks' weights differ, or a
            layer cannot be sharded.
    """
    require_ranks(context, "tensor parallelism")
    require_groups(context, degree)
    require_linear(context.model, pairs, degree)
    copies, mesh = meshes(context.device.type, degree)
    before = dict(context.model.named_parameters())
    place = Place(mesh.get_group().group_name, degree, mesh.get_local_rank(), mesh)
    # A deferred model then materializes, or loads from a checkpoint, only this rank's piece of each weight.
    keep_only(context.model, cut_layers(context.model, pairs, place))
    # The optimizer holds the old parameter objects; its groups and state follow the names.
    rebind(context.optimizer, before, dict(context.model.named_parameters()))
    mix_plain_and_sharded()
    context.placement.model_parallel_size = degree
    share_step(context, mesh, copies)
    context.checks["sharding.parallel"] = lambda: _check(context, pairs, degree)


def share_step(context: Context, mesh: DeviceMesh, copies: DeviceMesh | None) -> None:
    """Rotate micro-batches among `mesh`, and average gradients over `copies` (rules 3 and 4)."""
    # Gradients are averaged here only if no other mechanism shards or replicates states.
    context.loop.rotation = MicroBatchRotation(mesh.get_group())
    handles: list[Any] = []
    handles.append(
        # A list, because the hook removes itself by a handle that exists only after its registration.
        context.model.register_forward_pre_hook(_same_batch(mesh.get_group(), handles), with_kwargs=True)
    )
    if copies is not None:
        # After `sharding.states` is applied: a mechanism there may average between copies itself (rule 4).
        context.events.states_sharded.subscribe(lambda: _average_copies(context, copies.get_group()))


def _average_copies(context: Context, copies: dist.ProcessGroup) -> None:
    if not context.placement.states_average_grads:
        context.loop.sync = Average(
            context, copies, [p for p in context.model.parameters() if p.requires_grad]
        ).sync


def mix_plain_and_sharded() -> None:
    """Make clipping and optimizers accept plain tensors with DTensors, until the process ends."""
    if not _MIXED:
        _MIXED.append(implicit_replication())
        # Never left: optimizers and clipping run long after `apply`.
        _MIXED[0].__enter__()
        _handlers()[_SCALE] = _scale


def _handlers() -> dict[Any, Callable[..., Any]]:
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _scale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scale a plain tensor by a sharded number (a norm), which torch supports for lists of tensors only."""
    if not isinstance(args[0], DTensor) and args[1].dim() == 0:
        return op(args[0], args[1].full_tensor())
    # Without our handler, or the dispatcher would call it again without end.
    own = _handlers().pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        _handlers()[op] = own


@dataclass(frozen=True)
class Place:
    """This rank in the group that shares layers."""

    group: str
    ranks: int
    rank: int
    mesh: DeviceMesh | None = None
    """None if weights stay plain tensors, as while a step is recorded."""


def cut_layers(model: nn.Module, pairs: Sequence[Pair], place: Place) -> dict[str, Piece]:
    """Replace every pair in `model` by this rank's part; return the piece of each parameter."""
    pieces = dict[str, Piece]()
    for pair in pairs:
        sharers = Sharers(place.group, place.ranks, len(pair.columns))
        columns = [(name, ColumnLinear, {"weight": 0, "bias": 0}) for name in pair.columns]
        for name, kind, dims in [*columns, (pair.row, RowLinear, {"weight": 1})]:
            mine = {each: Piece(dim, place.ranks, place.rank) for each, dim in dims.items()}
            _shard_module(model.get_submodule(name), kind, sharers, mine, place)
            pieces |= {f"{name}.{each}": piece for each, piece in mine.items()}
    return pieces


def _shard_module(
    module: nn.Module, kind: type[nn.Linear], sharers: Sharers, pieces: Mapping[str, Piece], place: Place
) -> None:
    for name, piece in pieces.items():
        whole = module._parameters[name]
        if whole is not None:
            module._parameters[name] = part(whole, piece, place.mesh)
    # The class changes, not the object: hooks, the user's references and `named_modules` remain.
    module.__class__ = kind
    module.sharers = sharers  # type: ignore[assignment]


def part(whole: nn.Parameter, piece: Piece, mesh: DeviceMesh | None) -> nn.Parameter:
    """Return this rank's piece of a parameter: a DTensor over `mesh`, a plain tensor without one."""
    # A copy, so that the whole weight can be freed.
    mine = piece(whole.detach()).clone(memory_format=torch.contiguous_format)
    if mesh is None:
        return nn.Parameter(mine, requires_grad=whole.requires_grad)
    placed = DTensor.from_local(
        mine, mesh, [Shard(piece.dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(placed, requires_grad=whole.requires_grad)


def require_linear(model: nn.Module, pairs: Sequence[Pair], degree: int) -> None:
    """Check that modules with a linear layer's name and shape are linear layers, and that `degree` divides
    the heads.

    Raises:
        ApplyError: A layer of `pairs` is of another class, has hooks, or shares its weight; or a rank would
            get part of a head.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for pair in pairs:
        for name in (*pair.columns, pair.row):
            module = model.get_submodule(name)
            if type(module) is not nn.Linear:
                raise uncuttable_error(f"{name} is a {type(module).__name__}, not a plain nn.Linear")
            if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
                raise uncuttable_error(f"{name} has hooks or a forward of its own")
            shared = [
                other
                for p in module.parameters()
                for other in owners[id(p)]
                if not other.startswith(f"{name}.")
            ]
            if shared:
                raise uncuttable_error(f"{name} shares its weight with {shared[0]}")
        if pair.attention:
            _require_heads(model, pair, degree)


def _require_heads(model: nn.Module, pair: Pair, degree: int) -> None:
    size = getattr(model.get_submodule(pair.owner), "head_dim", None)
    for name in pair.columns:
        outputs = model.get_parameter(f"{name}.weight").shape[0]
        if isinstance(size, int) and size > 0 and outputs // size % degree:
            raise uncuttable_error(f"{degree} ranks do not divide the {outputs // size} heads of {name}")


def uncuttable_error(why: str) -> ApplyError:
    """Return the error for layers that cannot be sharded, with the reason."""
    fix = "another degree or  layers: mlp, or parallel: {kind: none}"
    return ApplyError(f"these layers cannot be cut over ranks: {why}.", fix=fix, code="MT390")


class LastBackward:
    """A function that is called when the last backward of a step has ended.

    Args:
        context: Its `undo` removes the hooks.
        parameters: Parameters of which a gradient of that backward tells that it runs.
        ends: The function.
        outer: Further context of a micro-batch.
        is_last: Call it after the functions that others queue in this backward.
    """

    def __init__(
        self,
        context: Context,
        parameters: Iterable[nn.Parameter],
        ends: Callable[[], None],
        outer: Callable[[bool], AbstractContextManager[Any]] | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        # `_last` is True outside of `sync`: a loop that announces no micro-batch averages in every backward.
        # Averages of equal values do not change, so sums stay correct.
        self._last, self._at_end = True, BackwardEnd(ends, is_last=is_last)
        self._exchange = outer or (lambda last: nullcontext())
        call_when_grad_ready(context, dict.fromkeys(parameters, self._arrived))

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch."""
        self._last = last
        try:
            with self._exchange(last):
                yield
        finally:
            self._last = True

    def _arrived(self, parameter: Tensor) -> None:
        if self._last:
            self._at_end.expect()


class Average(LastBackward):
    """Gradients averaged over a group when the last backward has ended (rule 4).

    Args:
        context: Its `undo` removes the hooks.
        group: Ranks over which gradients are averaged.
        parameters: Parameters whose gradients are averaged.
        outer: Further context of a micro-batch.
    """

    def __init__(
        self,
        context: Context,
        group: dist.ProcessGroup,
        parameters: Sequence[nn.Parameter],
        outer: Callable[[bool], AbstractContextManager[Any]] | None = None,
    ) -> None:
        super().__init__(context, parameters, partial(average_now, parameters, group), outer)


def average_whole(
    context: Context, divided: Sequence[str], mesh: DeviceMesh, copies: DeviceMesh | None
) -> None:
    """Average gradients over the ranks, each of which has samples of its own, when states have been sharded.

    Args:
        context: Gets a `sync`.
        divided: Parameters of which each rank of `mesh` has a part, whose gradient its layers have averaged
            inside `mesh`.
        mesh: The ranks that hold a copy together. Gradients of other parameters are averaged over all ranks
            during backward, or, if a mechanism shards states, over these after it.
        copies: The ranks that hold the same part.
    """
    trainable = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
    alone = not context.placement.states_average_grads
    whole = [p for name, p in trainable.items() if name not in divided]
    if not alone:
        context.loop.sync = Average(context, mesh.get_group(), whole, context.loop.sync).sync
        return
    everyone = dist.distributed_c10d._get_default_group()
    context.loop.sync = GradBuckets(context, whole, everyone, outer=context.loop.sync).sync
    if copies is not None:
        here = trainable.keys() - context.placement.absent.keys()
        mine = [trainable[name] for name in divided if name in here]
        # An expert has no gradient where no row was sent to it, but all copies take part in its average.
        ends = partial(average_now, mine, copies.get_group())
        context.loop.sync = LastBackward(context, [*whole, *mine], ends, context.loop.sync).sync


def _same_batch(group: dist.ProcessGroup, handles: list[Any]) -> Any:
    """Return a hook that compares the first input between a group's ranks once, and removes itself."""

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        for handle in handles:
            handle.remove()
        tensors = [t for t in tensors_of([args, kwargs]) if t.numel() and not isinstance(t, FakeTensor)]
        if not tensors:
            return
        with torch.no_grad():
            # A sum per tensor: cheap, and different micro-batches hardly ever agree in it.
            sums = torch.stack([t.detach().double().sum() for t in tensors])
            low, high = sums.clone(), sums.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        # NaN is not equal to itself; a padded batch may hold NaN on all ranks alike.
        if not torch.equal(low.nan_to_num(), high.nan_to_num()):
            raise ApplyError(
                "ranks that share layers were given different micro-batches.",
                evidence=f"{group.size()} consecutive ranks work on each micro-batch together.",
                fix="Tuned.step, which hands them round, or the same samples on these ranks",
                code="MT391",
            )

    return compare


def _check(context: Context, pairs: Sequence[Pair], degree: int) -> dict[str, Any]:
    layers = {name: ColumnLinear for pair in pairs for name in pair.columns} | {
        pair.row: RowLinear for pair in pairs
    }
    n_bytes = 0
    for name, kind in layers.items():
        module = context.model.get_submodule(name)
        if not (isinstance(module, kind) and isinstance(module.weight, DTensor)):
            raise ApplyError(f"{name} is not cut over the ranks.", code="MT392")
        n_bytes += local(module.weight).nbytes
    return {"degree": degree, "pairs": len(pairs), "layers": len(layers), "cut_bytes": n_bytes}
