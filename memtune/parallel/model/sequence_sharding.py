"""Sequence sharding: positions divided over ranks from the first block's input to the last block's output.

The first block's input is divided along dim 1, and its gradient is gathered; the last block's output is
gathered, and every rank takes its own part of the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from memtune.errors import ApplyError
from memtune.parallel.model.tensor_parallel import Average
from memtune.parallel.sharding import units_of
from memtune.runtime import Context
from memtune.workload import Pair, unsharded_in_blocks


@dataclass(frozen=True)
class SequenceLayout:
    """Positions of each rank of a group.

    A sequence is `units` pieces of equal length; `order` has, rank by rank, (first, number) of consecutive
    units.
    """

    group: str
    rank: int
    units: int
    order: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def contiguous(cls, group: str, ranks: int, rank: int) -> SequenceLayout:
        """Return the layout in which consecutive ranks hold consecutive, equal shares."""
        return cls(group, rank, ranks, tuple(((first, 1),) for first in range(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks of the group."""
        return len(self.order)

    def shard(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's positions, in memory of their own."""
        pieces = self._pieces(whole, dim)
        if len(pieces) > 1:
            return torch.cat([whole.narrow(dim, *piece) for piece in pieces], dim)
        # A copy: a view would keep all positions alive for as long as the blocks save their input.
        return torch.narrow_copy(whole, dim, *pieces[0])

    def shard_view(self, whole: Tensor, dim: int) -> Tensor:
        """Return the same as `shard` for a tensor that remains unsharded: a view if possible."""
        pieces = self._pieces(whole, dim)
        return whole.narrow(dim, *pieces[0]) if len(pieces) == 1 else self.shard(whole, dim)

    def gather(self, share: Tensor) -> Tensor:
        """Return all positions (dim 1) from each rank's share."""
        gathered = gather_positions(share, self.group, self.ranks)
        unit, places, at = gathered.shape[1] // self.units, list[tuple[int, int, int]](), 0
        for first, number in (piece for pieces in self.order for piece in pieces):
            places.append((first, at * unit, number * unit))
            at += number
        # Shares arrive rank by rank, which is another order than the positions' if a rank holds two pieces.
        if places == sorted(places):
            return gathered
        return torch.cat([gathered.narrow(1, start, length) for _, start, length in sorted(places)], 1)

    def _pieces(self, whole: Tensor, dim: int) -> list[tuple[int, int]]:
        unit = whole.shape[dim] // self.units
        return [(first * unit, number * unit) for first, number in self.order[self.rank]]


def gather_positions(share: Tensor, group: str, ranks: int) -> Tensor:
    """All-gather the shares of `group` along dim 1, in the order of the ranks."""
    whole = share.new_empty((share.shape[0], share.shape[1] * ranks, *share.shape[2:]))
    # Along dim 1 in place: gathered along dim 0 it would be copied once more.
    torch.ops.memtune.all_gather_positions_(whole, share.contiguous(), group, ranks)
    return whole


class _ShardPositions(torch.autograd.Function):
    """Input of the blocks: this rank's positions; the gradient is that of all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout = layout
        return layout.shard(x.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.gather(gradient), None


class _GatherPositions(torch.autograd.Function):
    """Output of the last block: all positions; every rank has the full gradient, and takes its own part."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, layout: SequenceLayout) -> Tensor:
        ctx.layout = layout
        return layout.gather(share.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.shard(gradient), None


def shard_positions(x: Tensor, layout: SequenceLayout) -> Tensor:
    """Return this rank's positions (dim 1) of `x`; the gradient of `x` is that of all positions."""
    share: Tensor = _ShardPositions.apply(x, layout)  # type: ignore[no-untyped-call]
    return share


class SharedDropout(nn.Dropout):
    """Dropout of this rank's positions, drawn for all: the numbers are those of a single rank."""

    layout: SequenceLayout

    def forward(self, input: Tensor) -> Tensor:
        """Return the dropout of one rank, for this rank's positions."""
        if not self.training or self.p == 0:
            return input
        with torch.no_grad():
            # As many draws from the generator as a single rank makes.
            shape = (input.shape[0], input.shape[1] * self.layout.ranks, *input.shape[2:])
            kept = self.layout.shard_view(F.dropout(input.new_ones(shape), self.p), 1) != 0
        return input * kept * (1 / (1 - self.p) if self.p < 1 else 0.0)


def dropouts(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return names of the blocks' dropout modules."""
    inside = (named for block in blocks for named in model.get_submodule(block).named_modules(prefix=block))
    return [name for name, module in inside if type(module) is nn.Dropout]


def share_dropouts(model: nn.Module, blocks: Sequence[str], layout: SequenceLayout) -> None:
    """Replace the blocks' dropouts by ones that draw for all positions."""
    for name in dropouts(model, blocks):
        module = model.get_submodule(name)
        # The same object, so that its hooks and the user's references remain.
        module.__class__ = SharedDropout
        vars(module).update(layout=layout)


def summed_parameters(
    model: nn.Module, pairs: Sequence[Pair], blocks: Sequence[str], fix: str = ""
) -> list[str]:
    """Return the names of the blocks' trainable parameters that are not sharded: each rank has a summand of
    their gradients.

    Raises:
        ApplyError: The blocks are not one chain, or share a weight with the rest of the model.
    """
    if len({block.rpartition(".")[0] for block in blocks}) > 1:
        raise not_divisible(f"{blocks[0]} and {blocks[-1]} are not in one chain of blocks", fix)
    inside, outside = dict[int, str](), dict[int, str]()
    prefixes = tuple(f"{block}." for block in blocks)
    # A tied weight has several names, of which one may be outside of the blocks.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        (inside if name.startswith(prefixes) else outside).setdefault(id(parameter), name)
    for key in inside.keys() & outside.keys():
        raise not_divisible(f"{inside[key]} is {outside[key]} too, which sees all positions", fix)
    return unsharded_in_blocks(
        [name for name, p in model.named_parameters() if p.requires_grad], pairs, blocks
    )


def scaled_by(ranks: int) -> Callable[[Tensor], Tensor]:
    """Return a hook for gradients of which each rank has a summand: averages over `ranks` then are sums."""
    return lambda gradient: gradient * ranks


def sum_gradients(context: Context, mesh: DeviceMesh, names: Sequence[str]) -> None:
    """Sum the gradients of `names`, of which each rank of `mesh` has a summand, after the last backward."""
    context.events.states_sharded.subscribe(lambda: _sum_gradients(context, mesh, names))


def _sum_gradients(context: Context, mesh: DeviceMesh, names: Sequence[str]) -> None:
    """Register the hooks when the sharding is known."""
    # FSDP2 unshards and frees a parameter, and the optimizer holds a shard of it.
    # FSDP2 assigns the gradient of a shard itself: a tensor hook on the shard would never run. Its unsharded
    # parameter, which autograd sees, exists while the block runs.
    of_fsdp_units = {parameter for _, unit in units_of(context.model) for parameter in unit}
    summed = [context.model.get_parameter(name) for name in names]
    for name in context.blocks:
        inside = [
            each
            for each in names
            if each.startswith(f"{name}.") and context.model.get_parameter(each) in of_fsdp_units
        ]
        if inside:
            scaled = ScaledGradients(mesh.size(), [each.removeprefix(f"{name}.") for each in inside])
            context.undo.callback(context.model.get_submodule(name).register_forward_pre_hook(scaled).remove)
    for parameter in summed:
        if parameter not in of_fsdp_units:
            context.undo.callback(parameter.register_hook(scaled_by(mesh.size())).remove)
    # Else what averages over all ranks averages over these as well.
    if context.placement.model_parallel_size > 1 or not context.placement.states_average_grads:
        context.loop.sync = Average(context, mesh.get_group(), summed, outer=context.loop.sync).sync


class ScaledGradients:
    """Pre-forward hook of a block whose parameters exist only while it runs: hooks their gradients."""

    def __init__(self, ranks: int, names: Sequence[str]) -> None:
        self.names, self._hook = frozenset(names), scaled_by(ranks)
        self._seen: dict[str, weakref.ref[Tensor]] = {}

    def __call__(self, block: nn.Module, args: Any) -> None:
        """Put a hook on each parameter that has none yet; FSDP2 reuses the same objects in every step."""
        for name in self.names:
            parameter = block.get_parameter(name)
            seen = self._seen.get(name)
            if parameter.requires_grad and (seen is None or seen() is not parameter):
                self._seen[name] = weakref.ref(parameter)
                parameter.register_hook(self._hook)


def is_summed(model: nn.Module, blocks: Sequence[str], name: str) -> bool:
    """Return True if `name`'s gradient in `blocks` is scaled so that its average is the sum."""
    if model.get_parameter(name)._backward_hooks:
        return True
    block = next(each for each in blocks if name.startswith(f"{each}."))
    hooks = model.get_submodule(block)._forward_pre_hooks.values()
    return any(
        isinstance(hook, ScaledGradients) and name.removeprefix(f"{block}.") in hook.names for hook in hooks
    )


def not_divisible(why: str, fix: str) -> ApplyError:
    """Return the error for positions that cannot be divided, with the reason."""
    return ApplyError(f"positions cannot be divided over ranks: {why}.", fix=fix, code="MT390")


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a block's activation input: its first floating-point tensor argument."""
    return next(
        (each for each in [*args, *kwargs.values()] if isinstance(each, Tensor) and each.is_floating_point()),
        None,
    )


def replaced(args: tuple[Any, ...], kwargs: Mapping[str, Any], old: Tensor, new: Tensor) -> tuple[Any, Any]:
    """Return the arguments with `old` replaced by `new`."""
    return tuple(new if each is old else each for each in args), {
        k: new if each is old else each for k, each in kwargs.items()
    }


def shard_input(forward: Callable[..., Any], layout: SequenceLayout, fix: str) -> Callable[..., Any]:
    """Return `forward` of the first block with its input divided by positions."""

    def on_shard(*args: Any, **kwargs: Any) -> Any:
        x = first_tensor(args, kwargs)
        shape = () if x is None else tuple(x.shape)
        if x is None or len(shape) < 3 or shape[1] % layout.units or shape[1] == layout.units:
            unit = "" if layout.units == layout.ranks else f" in {layout.units} equal pieces"
            raise ApplyError(
                f"{layout.ranks} ranks cannot each take an equal share of two positions and more{unit}.",
                evidence=(
                    f"The blocks are given a tensor of shape {shape}."
                    if shape
                    else "The blocks are given no tensor."
                ),
                fix=f"sequences whose length is a multiple of {layout.units}, or {fix}",
                code="MT394",
            )
        # This frame may not hold all positions while the block runs.
        args, kwargs = replaced(args, kwargs, x, shard_positions(x, layout))
        del x
        return forward(*args, **kwargs)

    return on_shard


def gather_output(forward: Callable[..., Any], layout: SequenceLayout) -> Callable[..., Any]:
    """Return `forward` of the last block with its output gathered to all positions."""

    def gathered(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if isinstance(out, tuple | list):
            return type(out)((_GatherPositions.apply(out[0], layout), *out[1:]))  # type: ignore[no-untyped-call]
        return _GatherPositions.apply(out, layout)  # type: ignore[no-untyped-call]

    return gathered
