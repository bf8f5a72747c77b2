"""Sequence parallelism with tensor parallelism: between the sharded layers each rank holds its share of the
positions.

Five rules:

1. From the first block's input to the last block's output a rank holds its share of the positions (dim 1),
  and only there: embeddings, the last norm and the head are replicated (`parallel.model.sequence_sharding`).
2. Modules with sharded layers get all positions as input (all-gather) and return this rank's
  (reduce-scatter), in backward in the opposite order: as many bytes as the two all-reduces of
  `parallel.model.tensor_parallel`.
3. Column layers save their share for backward, not the gathered input; backward gathers it again, once for
  all that share it.
4. A replicated parameter of the blocks has seen a share of the positions (or heads): its gradient is the sum
  over the ranks. Each micro-batch's is multiplied by the ranks, and averaged when the last backward has
  ended: averaging equal values changes nothing, so that a loop that does not mark the last micro-batch is
  correct as well.
5. Dropout draws for all positions and uses this rank's, so that the numbers are those of a single rank.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memtune import refusals
from memtune.errors import ApplyError
from memtune.parallel.model.sequence_sharding import (
    SequenceLayout,
    first_tensor,
    gather_output,
    gather_positions,
    is_summed,
    replaced,
    scaled_by,
    shard_input,
    share_dropouts,
    sum_gradients,
    summed_parameters,
)
from memtune.parallel.model.tensor_parallel import ColumnLinear, Place, RowLinear, cut
from memtune.parallel.sharding import meshes
from memtune.runtime import Context, local
from memtune.workload import Pair

_FIX = "parallel: {kind: tensor}"


def _summed_share(part: Tensor, group: str, ranks: int) -> Tensor:
    """Return this rank's positions of the sum of every rank's `part`, which is overwritten."""
    share = part.new_empty((part.shape[0], part.shape[1] // ranks, *part.shape[2:]))
    torch.ops.memtune.reduce_scatter_positions_(share, part.contiguous(), group, ranks)
    return share


class _Gathered(torch.autograd.Function):
    """The shared input of column layers: all positions; its gradient is summed, then cut (rule 2)."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return gather_positions(share.detach(), group, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Summed in place: only this node references the gradient, a product of the column layers' backward.
        return _summed_share(gradient, ctx.group, ctx.ranks), None, None


class _Scattered(torch.autograd.Function):
    """Sum of a partial product over the ranks, for this rank's positions (rule 2)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return _summed_share(part.detach(), group, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # The adjoint of a sum over ranks followed by a slice is the gather of every rank's slice.
        return gather_positions(gradient, ctx.group, ctx.ranks), None, None


@dataclass(eq=False)
class _Entry:
    """One call of column layers: their input, and the input gathered again in backward (rule 3)."""

    group: str
    ranks: int
    users: int = 0
    """Column layers whose backward will need the full input."""
    again: Tensor | None = None

    def gather(self, share: Tensor) -> Tensor:
        """Return all positions, gathered for the first column layer's backward and freed after the last."""
        whole = self.again if self.again is not None else gather_positions(share, self.group, self.ranks)
        self.users -= 1
        self.again = whole if self.users > 0 else None
        return whole


class _Product(torch.autograd.Function):
    """`F.linear(whole, weight, bias)` that saves this rank's positions of its input (rule 3)."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, share: Tensor, weight: Tensor, bias: Tensor | None, entry: _Entry
    ) -> Tensor:
        # Only the weight's gradient is a product with the input.
        if ctx.needs_input_grad[2]:
            entry.users += 1
        # The point of rule 3: `whole` is `ranks` times as large, and is freed after the last column layer's
        # forward.
        ctx.save_for_backward(share, weight)
        ctx.entry = entry
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        share, weight = ctx.saved_tensors
        to_whole, _, to_weight, to_bias, _ = ctx.needs_input_grad
        flat, of_whole, of_weight, of_bias = gradient.flatten(0, -2), None, None, None
        if to_whole:
            of_whole = gradient @ weight.to(gradient.dtype)  # under autocast they differ
        if to_weight:
            of_weight = flat.t() @ ctx.entry.gather(share).flatten(0, -2).to(gradient.dtype)
        if to_bias:
            of_bias = flat.sum(0)
        return of_whole, None, of_weight, of_bias, None


@dataclass(eq=False)
class ColumnInput:
    """Input side of one pair's layers, with its last input."""

    group: str
    ranks: int
    columns: int
    at_owner: bool
    """True if the module of the pair gathers and its code sees all positions; else column layers gather."""
    _share: Tensor | None = field(default=None, repr=False)
    _whole: Tensor | None = field(default=None, repr=False)
    _entry: _Entry | None = field(default=None, repr=False)
    _taken: int = field(default=0, repr=False)

    def gathered(self, share: Tensor) -> Tensor:
        """Return all positions of `share`, which is held until the column layers have run."""
        whole: Tensor = _Gathered.apply(share, self.group, self.ranks)  # type: ignore[no-untyped-call]
        self._share, self._whole, self._entry, self._taken = share, whole, _Entry(self.group, self.ranks), 0
        return whole

    def product(self, name: str, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return a column layer's output for the owner's gathered input, or for a share of the positions."""
        if not self.at_owner:
            # By identity: q, k and v layers get the same tensor object, and gather it once.
            given = self._whole if given is self._share and self._whole is not None else self.gathered(given)
        whole, share, entry = self._whole, self._share, self._entry
        if whole is None or share is None or entry is None or not _is_same_tensor(given, whole):
            raise ApplyError(
                f"{name} is not given what the module that holds it was given.",
                evidence="Only that is known to hold all positions.",
                fix="parallel: {kind: tensor}",
                code="MT394",
            )
        self._taken += 1
        if self._taken == self.columns:
            # Held any longer, all positions would be live beyond their last use.
            self._share = self._whole = self._entry = None
        made: Tensor = _Product.apply(given, share, weight, bias, entry)  # type: ignore[no-untyped-call]
        return made


def _is_same_tensor(given: Tensor, whole: Tensor) -> bool:
    """Return True if `given` is `whole`, or a view of its rows in the same order."""
    same = given.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return same and given.numel() == whole.numel() and given.is_contiguous()


class SequenceColumnLinear(ColumnLinear):
    """A linear layer of which this rank computes some outputs, for all positions."""

    column_input: ColumnInput
    name: str

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's outputs."""
        bias = self._parameters["bias"]
        return self.column_input.product(
            self.name, input, local(self.weight), None if bias is None else local(bias)
        )


class SequenceRowLinear(RowLinear):
    """A linear layer of which this rank has some inputs, for all positions."""

    column_input: ColumnInput

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs for this rank's positions."""
        bias = self._parameters["bias"]
        part = F.linear(input, local(self.weight))
        share: Tensor = _Scattered.apply(part, self.column_input.group, self.column_input.ranks)  # type: ignore[no-untyped-call]
        del part  # otherwise the sum below would be allocated while it is live
        # Each rank would add the bias to its part of the sum.
        return share if bias is None else share + bias


def divide(context: Context, pairs: Sequence[Pair], degree: int) -> None:
    """Shard `pairs` as `parallel.model.tensor_parallel.cut` does and divide the positions between them;
    arguments are the same.

    Raises:
        ApplyError: As in `cut`; or the blocks are not one chain, or share a weight with the rest of the
            model.
    """
    shared = summed_parameters(context.model, pairs, context.blocks, _FIX)
    cut(context, pairs, degree)
    mesh = meshes(context.device.type, degree)[1]
    divide_positions(
        context.model,
        pairs,
        context.blocks,
        Place(mesh.get_group().group_name, degree, mesh.get_local_rank()),
    )
    sum_gradients(context, mesh, shared)
    # `cut` has put its check there; the audit reports both under one slot.
    of_layers = context.checks["sharding.parallel"]
    context.checks["sharding.parallel"] = lambda: {**of_layers(), **_check(context, pairs, shared)}


def shard_fake_sequence(model: nn.Module, pairs: Sequence[Pair], blocks: Sequence[str], place: Place) -> None:
    """Divide the positions of a model that is only recorded, whose layers have been sharded."""
    divide_positions(model, pairs, blocks, place)
    for name in summed_parameters(model, pairs, blocks, _FIX):
        model.get_parameter(name).register_hook(scaled_by(place.ranks))


def divide_positions(model: nn.Module, pairs: Sequence[Pair], blocks: Sequence[str], place: Place) -> None:
    """Make the sharded layers, dropouts and ends of the chain of blocks work on shares of the positions."""
    for pair in pairs:
        column_input = ColumnInput(
            place.group, place.ranks, len(pair.columns), at_owner=pair.owner not in blocks
        )
        for name in pair.columns:
            column = model.get_submodule(name)
            column.__class__ = SequenceColumnLinear
            vars(column).update(column_input=column_input, name=name)
        row = model.get_submodule(pair.row)
        row.__class__ = SequenceRowLinear
        vars(row).update(column_input=column_input)
        # The owner (attention, MLP) is a block's child: its own code, between the layers, then sees all
        # positions.
        if column_input.at_owner:
            model.get_submodule(pair.owner).register_forward_pre_hook(
                _entered(column_input), with_kwargs=True
            )
    layout = SequenceLayout.contiguous(place.group, place.ranks, place.rank)
    share_dropouts(model, blocks, layout)
    first, last = model.get_submodule(blocks[0]), model.get_submodule(blocks[-1])
    first.forward = shard_input(first.forward, layout, _FIX)
    last.forward = gather_output(last.forward, layout)


def _entered(column_input: ColumnInput) -> Any:
    def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
        share = first_tensor(args, kwargs)
        return None if share is None else replaced(args, kwargs, share, column_input.gathered(share))

    return gather


def _check(context: Context, pairs: Sequence[Pair], summed: Sequence[str]) -> dict[str, Any]:
    for name in (name for pair in pairs for name in pair.columns):
        if not isinstance(context.model.get_submodule(name), SequenceColumnLinear):
            raise ApplyError(f"{name} does not gather its positions.", code="MT392")
    for name in summed:
        if not is_summed(context.model, context.blocks, name):
            raise refusals.error_of(refusals.unsummed_gradient(name))
    return {"summed_parameters": len(summed)}
