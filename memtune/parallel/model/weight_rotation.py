"""Rotated tensor parallelism: each rank has its own samples and one shard of every rotated weight; shards
pass round a ring.

Six rules:

1. A weight of n rows is a DTensor of the plain shape, n/ranks rows on each rank. In forward the shards pass
  round the ring once, and each rank computes with the current one while the next is in flight: a linear
  layer's outputs, an embedding's rows, a convolution's output channels; of a transposed one, whose rows are
  input channels, a summand of all outputs.
2. In backward they pass round again, shifted by one, so that a rank's own shard is its last. The sum of each
  shard's gradient rotates with it: it starts one rank after the shard's owner and is complete, over all
  ranks, when it reaches the owner.
3. Out of place, a rank holds its own shard and two others, one in use and one in flight: `ranks - 1` hops a
  round. In place, received shards overwrite the own one: one other shard, and one more hop, which restores
  the own shard.
4. Only the input and the own shard are saved for backward.
5. Parameters that are not rotated are replicated; their gradients are averaged in buckets during the last
  backward, those of the rotated weights between groups after it (a ring is consecutive ranks). If states are
  sharded among the ranks that hold the same shards (`parallel.ranks.replica_groups`), that mechanism averages
  between the rings, and gradients of replicated parameters are averaged inside a ring, once per step.
6. All ranks of a ring must call the same layers in the same order, or a rank would receive a shard of another
  weight. Experts, whose calls depend on the samples, are called in a fixed order by all ranks
  (`parallel.model.rotated_experts`), those of one module are called by every rank's router
  (`parallel.model.rotated_stacks`), and in the 1st, 2nd, 4th, 8th … forward ranks compare their calls.

Source: Luo et al. 2023, RTP (arXiv:2311.01635).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from memtune import refusals
from memtune.deferred_init import keep_only
from memtune.errors import ApplyError
from memtune.parallel.model.rotated_experts import (
    expert_of,
    expert_refusal,
    order_experts,
    remove_gradients_of_unused,
)
from memtune.parallel.model.rotated_stacks import RotatedStack, rotation_refusal
from memtune.parallel.model.stacked_experts import is_named_experts, stack_refusal
from memtune.parallel.model.tensor_parallel import average_whole, mix_plain_and_sharded, part
from memtune.parallel.ranks import Ring, RingRound, RingSums, require_groups, require_ranks
from memtune.parallel.sharding import meshes, rebind
from memtune.runtime import Context, UncopiedHook, local


def _add_product(sums: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `sums + left @ right` in the memory of `sums`, of `dtype`."""
    # Under autocast it differs from the factors'.
    right = right.to(left.dtype)
    if sums is None:
        return (left @ right).to(dtype)
    return sums.addmm_(left, right) if sums.dtype == left.dtype else sums.add_(left @ right)


def _by_shards(ring: Ring, weight: Tensor, dim: int, run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the outputs of `run(shard, index)` of all shards of `weight`, of one shape, joined in `dim`."""
    # Forward begins with the own shard, so compute starts at once. Backward begins one hop later
    # (`prefetch`), so that it ends with the own one.
    shards, whole = RingRound(ring, weight.detach(), prefetch=False), None
    for hop in range(ring.ranks):
        index = ring.owner(hop)
        part = run(shards.next(), index)  # the shard has no name here: it is freed before `whole` is made
        rows = part.shape[dim]
        if whole is None:
            shape = list(part.shape)
            # The first part tells shape, dtype (autocast) and layout of the joined output, which is allocated
            # only once.
            shape[dim] = rows * ring.ranks
            # A channels-last input gives channels-last parts; the plain convolution would have kept that
            # layout.
            layout = suggest_memory_format(part) if dim == 1 else torch.contiguous_format
            whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout)
        whole.narrow(dim, index * rows, rows).copy_(part)
        del part  # before the next one is made
    shards.finish()
    assert whole is not None
    return whole


def _sum_by_shards(ring: Ring, weight: Tensor, run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return the sum of the outputs of `run(shard, index)` of all shards of `weight`."""
    shards, total = RingRound(ring, weight.detach(), prefetch=False), None
    for hop in range(ring.ranks):
        part = run(shards.next(), ring.owner(hop))
        total = part if total is None else total.add_(part)
        del part
    shards.finish()
    assert total is not None
    return total


class _Linear(torch.autograd.Function):
    """`F.linear` with a rotating weight (rules 1, 2 and 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ring: Ring, always: bool) -> Tensor:
        # The own shard, not the joined weight: backward passes the shards round again (rule 4). A frozen
        # weight needs no input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.ring, ctx.always = ring, always
        shares = [None] * ring.ranks if bias is None else bias.chunk(ring.ranks)
        return _by_shards(ring, weight, -1, lambda shard, index: F.linear(x, shard, shares[index]))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x, weight), ring = ctx.saved_tensors, ctx.ring
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        flat, rows, of_x, of_weight = _flat(gradient), weight.shape[0], None, None
        # Whether the ring runs must not depend on this rank's samples: another rank would wait for a shard
        # (rule 6).
        shards = RingRound(ring, weight.detach(), prefetch=True) if to_x or ctx.always else None
        sums = RingSums(ring)
        for hop in range(1, ring.ranks + 1):
            part = flat.narrow(1, ring.owner(hop) * rows, rows)
            if to_weight:
                of_weight = None  # what was passed on is the hop's
                of_weight = sums.add(_add_product(sums.next(), part.t(), _flat(x), weight.dtype))
            if shards is not None:
                of_x = _add_product(of_x, part, shards.next(), gradient.dtype)
        return (
            of_x.view(*gradient.shape[:-1], weight.shape[1]) if to_x and of_x is not None else None,
            of_weight,
            flat.sum(0) if to_bias else None,
            None,
            None,
        )


@dataclass(frozen=True)
class _ConvSettings:
    """Arguments of a convolution, per dim.

    A shard has some output channels, or if it is transposed some input channels; with groups both.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None
    """None unless the convolution is transposed."""

    @property
    def sums(self) -> bool:
        """True if each shard has a summand of all output channels."""
        return self.output_padding is not None and self.groups == 1

    @property
    def reads_all(self) -> bool:
        """True if each shard reads all input channels."""
        return self.output_padding is None and self.groups == 1

    def inputs(self, x: Tensor, shard: int, ranks: int) -> Tensor:
        """Return the channels of `x` (batch, all input channels, …) that `shard` reads."""
        return x if self.reads_all else _channels(x, shard, ranks)

    def outputs(self, y: Tensor, shard: int, ranks: int) -> Tensor:
        """Return the channels of `y` (batch, all output channels, …) that `shard` makes."""
        return y if self.sums else _channels(y, shard, ranks)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: int) -> Tensor:
        """Return the output channels of a shard from its inputs."""
        groups = max(self.groups // ranks, 1)
        if self.output_padding is None:
            convolve = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
            return convolve(x, weight, bias, self.stride, self.padding, self.dilation, groups)
        transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
        sizes = self.stride, self.padding, self.output_padding
        return transposed(x, weight, bias, *sizes, groups, self.dilation)

    def gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, ranks: int, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of a shard's inputs and weight, those that are `wanted`."""
        found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
            gradient,
            x.to(gradient.dtype),
            weight.to(gradient.dtype),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.output_padding is not None,
            self.output_padding or (0,) * len(self.stride),
            max(self.groups // ranks, 1),
            (*wanted, False),
        )
        return found[:2]


def _channels(x: Tensor, shard: int, ranks: int) -> Tensor:
    size = x.shape[1] // ranks
    return x.narrow(1, shard * size, size)


class _Convolution(torch.autograd.Function):
    """A convolution whose weight rotates, some channels at a time (rules 1, 2 and 4)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: _ConvSettings, ring: Ring
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.ring = settings, ring
        shares: Sequence[Tensor | None] = [None] * ring.ranks if bias is None else bias.chunk(ring.ranks)
        if settings.sums:
            shares = [bias if index == ring.rank else None for index in range(ring.ranks)]

        def run(shard: Tensor, index: int) -> Tensor:
            return settings.run(settings.inputs(x, index, ring.ranks), shard, shares[index], ring.ranks)

        return _sum_by_shards(ring, weight, run) if settings.sums else _by_shards(ring, weight, 1, run)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x, weight), settings, ring = ctx.saved_tensors, ctx.settings, ctx.ring
        to_x, to_weight, to_bias, *_ = ctx.needs_input_grad
        of_weight = None
        of_x = torch.empty_like(x, dtype=gradient.dtype) if to_x and not settings.reads_all else None
        shards = RingRound(ring, weight.detach(), prefetch=True) if to_x else None
        sums = RingSums(ring)
        for hop in range(1, ring.ranks + 1):
            index = ring.owner(hop)
            received = sums.next() if to_weight else None
            of_inputs, mine = settings.gradients(
                settings.outputs(gradient, index, ring.ranks),
                settings.inputs(x, index, ring.ranks),
                # Without a gradient of the input only the weight's shape is used.
                weight.detach() if shards is None else shards.next(),
                ring.ranks,
                (to_x, to_weight),
            )
            if mine is not None:
                mine = mine.to(weight.dtype)
                of_weight = sums.add(mine if received is None else received.add_(mine))
            if of_inputs is not None and not settings.reads_all:
                assert of_x is not None
                settings.inputs(of_x, index, ring.ranks).copy_(of_inputs)
            elif of_inputs is not None:
                of_x = of_inputs if of_x is None else of_x.add_(of_inputs)
            del received, of_inputs, mine
        of_bias = gradient.transpose(0, 1).flatten(1).sum(1) if to_bias else None
        return of_x, of_weight, of_bias, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding` with a rotating weight; every index is a row of one shard (rules 1, 2 and 4)."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, ring: Ring) -> Tensor:
        ctx.save_for_backward(index)
        # The weight is not saved: the gradient of an embedding depends on the indices alone, so no shard
        # passes in backward.
        ctx.ring, ctx.shape, ctx.dtype = ring, weight.shape, weight.dtype
        # An index outside of all shards would silently give zeros.
        torch._assert_async(((index >= 0) & (index < weight.shape[0] * ring.ranks)).all())
        shards, whole = RingRound(ring, weight.detach(), prefetch=False), None
        for hop in range(ring.ranks):
            row, is_remote = _rows(index, ring.owner(hop), weight.shape[0])
            part = F.embedding(row, shards.next()).masked_fill_(is_remote, 0)
            whole = part if whole is None else whole.add_(part)
            del part
        shards.finish()
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (index,), ring, of_weight = ctx.saved_tensors, ctx.ring, None
        sums = RingSums(ring)
        for hop in range(1, ring.ranks + 1):
            row, is_remote = _rows(index, ring.owner(hop), ctx.shape[0])
            of_weight = sums.next()
            if of_weight is None:
                of_weight = gradient.new_zeros(ctx.shape, dtype=ctx.dtype)
            # Indices of other shards point at row 0 and add zeros there: shapes then depend on no values, and
            # nothing synchronizes.
            part = _flat(gradient.masked_fill(is_remote, 0)).to(ctx.dtype)
            of_weight = sums.add(of_weight.index_add_(0, row.view(-1), part))
            del part
        assert of_weight is not None
        return None, of_weight, None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rows(index: Tensor, shard: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each index in a shard (0 elsewhere), and a (…, 1) mask of those elsewhere."""
    row = index - shard * rows
    is_remote = (row < 0) | (row >= rows)
    return row.masked_fill_(is_remote, 0), is_remote.unsqueeze(-1)


class _SameCalls:
    """Compares at intervals which layers the ranks of a ring call (rule 6).

    Args:
        context: Its model gets hooks.
        layers: Layers with rotating weights.
        group: The ranks of the ring.
    """

    def __init__(self, context: Context, layers: Sequence[str], group: dist.ProcessGroup) -> None:
        self._group, self._device, self._forwards = group, context.device, 0
        model, end = context.model, "the end of the model"
        registrations = (
            partial(model.register_forward_pre_hook, UncopiedHook(self._begins)),
            partial(model.register_forward_hook, UncopiedHook(partial(self._calls, end))),
            *(
                partial(
                    model.get_submodule(n).register_forward_pre_hook, UncopiedHook(partial(self._calls, n))
                )
                for n in layers
            ),
        )
        for register in registrations:  # one by one: those before an error are undone
            context.undo.callback(register().remove)

    def _begins(self) -> None:
        self._forwards += 1

    def _calls(self, name: str) -> None:
        """Raise if the ranks of a ring are about to call different layers."""
        # True for powers of two: divergence shows early, and the cost of the comparison vanishes in a long
        # run.
        if not self._forwards or self._forwards & (self._forwards - 1):
            return
        # Python's `hash` of a string differs between processes.
        number = zlib.crc32(name.encode())
        # numpy's memory: the ledger does not count it.
        ends = torch.from_numpy(np.array([number, -number])).to(self._device)
        # A recomputed block compares again, on all ranks: its guard against collectives must not see it.
        with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        # The largest number and the negated smallest one: their sum is 0 if all are equal.
        if ends.sum().item():
            raise ApplyError(
                f"Ranks of a ring call other layers than others: this one has come to {name}.",
                evidence="Each would get a shard of a weight that another one is at.",
                fix="parallel: {kind: tensor}, whose ranks work on one micro-batch together, or {kind: none}",
                code="MT391",
            )


class RotatedLinear(nn.Linear):
    """A linear layer whose weight rotates among the ranks."""

    ring: Ring
    always_rotates: bool = False
    """The weight rotates in backward even if this rank's input needs no gradient, as another rank's may."""

    def forward(self, input: Tensor) -> Tensor:
        """Return all outputs of this rank's samples."""
        weight, bias = local(self.weight), self._parameters["bias"]
        made: Tensor = _Linear.apply(input, weight, bias, self.ring, self.always_rotates)  # type: ignore[no-untyped-call]
        return made


class _RotatedConvolution(nn.modules.conv._ConvNd):
    """A convolution whose weight rotates among the ranks."""

    ring: Ring

    def forward(self, input: Tensor) -> Tensor:
        """Return all output channels of this rank's samples."""
        weight, bias, padding = local(self.weight), self._parameters["bias"], self.padding
        assert not isinstance(padding, str), "`rotatable` refuses padding by name"
        settings = _ConvSettings(self.stride, padding, self.dilation, self.groups)
        has_batch = input.dim() == weight.dim()
        x = input if has_batch else input.unsqueeze(0)
        made: Tensor = _Convolution.apply(x, weight, bias, settings, self.ring)  # type: ignore[no-untyped-call]
        return made if has_batch else made.squeeze(0)


class _RotatedTransposedConvolution(nn.modules.conv._ConvTransposeNd):
    """A transposed convolution whose weight rotates among the ranks."""

    ring: Ring

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Return all output channels of this rank's samples."""
        weight, bias, padding = local(self.weight), self._parameters["bias"], self.padding
        assert not isinstance(padding, str), "torch refuses it for transposed convolutions"
        more = self._output_padding(  # a private method, which three public layers share
            input,
            output_size,
            list(self.stride),
            list(padding),
            list(self.kernel_size),
            weight.dim() - 2,
            list(self.dilation),
        )
        settings = _ConvSettings(self.stride, padding, self.dilation, self.groups, tuple(more))
        has_batch = input.dim() == weight.dim()
        x = input if has_batch else input.unsqueeze(0)
        made: Tensor = _Convolution.apply(x, weight, bias, settings, self.ring)  # type: ignore[no-untyped-call]
        return made if has_batch else made.squeeze(0)


class RotatedConv1d(_RotatedConvolution, nn.Conv1d):
    """A 1D convolution whose weight rotates among the ranks."""


class RotatedConv2d(_RotatedConvolution, nn.Conv2d):
    """A 2D convolution whose weight rotates among the ranks."""


class RotatedConv3d(_RotatedConvolution, nn.Conv3d):
    """A 3D convolution whose weight rotates among the ranks."""


class RotatedConvTranspose1d(_RotatedTransposedConvolution, nn.ConvTranspose1d):
    """A transposed 1D convolution whose weight rotates among the ranks."""


class RotatedConvTranspose2d(_RotatedTransposedConvolution, nn.ConvTranspose2d):
    """A transposed 2D convolution whose weight rotates among the ranks."""


class RotatedConvTranspose3d(_RotatedTransposedConvolution, nn.ConvTranspose3d):
    """A transposed 3D convolution whose weight rotates among the ranks."""


class RotatedEmbedding(nn.Embedding):
    """An embedding whose rows rotate among the ranks."""

    ring: Ring

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of this rank's samples."""
        made: Tensor = _Embedding.apply(input, local(self.weight), self.ring)  # type: ignore[no-untyped-call]
        return made


_ROTATED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RotatedLinear,
    nn.Embedding: RotatedEmbedding,
    nn.Conv1d: RotatedConv1d,
    nn.Conv2d: RotatedConv2d,
    nn.Conv3d: RotatedConv3d,
    nn.ConvTranspose1d: RotatedConvTranspose1d,
    nn.ConvTranspose2d: RotatedConvTranspose2d,
    nn.ConvTranspose3d: RotatedConvTranspose3d,
}
_KINDS = nn.Linear | nn.Embedding | nn.modules.conv._ConvNd


def rotatable(model: nn.Module, degree: int) -> tuple[list[str], list[str]]:
    """Return the layers and stacked experts whose weights can rotate among `degree` ranks, and a line on each
    other one.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _KINDS)}
    refused = {name: why for name, module in layers.items() if (why := _not_plain(name, module, degree))}
    for name, module in layers.items():
        expert = "" if name in refused else expert_of(name)
        if expert and (why := expert_refusal(module, model.get_submodule(expert))):
            refused[name] = why
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    weights = {name: owners[id(module.weight)] for name, module in layers.items() if name not in refused}
    # Until nothing changes: a refused layer refuses all that share its weight.
    while strange := {
        name: other
        for name, shared in weights.items()
        for other in sorted(shared)
        if other.removesuffix(".weight") not in weights
    }:
        for name, other in strange.items():
            del weights[name]
            refused[name] = f"shares its weight with {other}"
    stacks = {
        name: module
        for name, module in model.named_modules()
        if is_named_experts(name, module) and module._parameters and not isinstance(module, _KINDS)
    }
    by_identity = {key: sorted(names) for key, names in owners.items()}
    for name, module in stacks.items():
        if why := stack_refusal(module, degree, by_identity) or rotation_refusal(module):
            refused[name] = why
    found = [*weights, *(name for name in stacks if name not in refused)]
    return found, [f"{name} {why}" for name, why in refused.items()]


def _not_plain(name: str, module: nn.Module, degree: int) -> str:
    if type(module) not in _ROTATED:
        return f"is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return "has hooks or a forward of its own"
    if isinstance(module, nn.Embedding):
        if (
            module.max_norm is not None
            or module.sparse
            or module.scale_grad_by_freq
            or module.padding_idx is not None
        ):
            return (
                "is an embedding with settings of its own (padding_idx, max_norm, sparse, scale_grad_by_freq)"
            )
    if isinstance(module, nn.modules.conv._ConvNd):
        if expert_of(name):
            return "is a convolution of an expert"
        if why := _not_plain_convolution(module, degree):
            return why
    rows = int(module._parameters["weight"].shape[0])  # type: ignore[union-attr]
    what = {nn.Linear: "outputs", nn.Embedding: "rows"}.get(type(module), "output channels")
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        what = "input channels"
    return f"has {rows} {what}, which {degree} ranks do not divide" if rows % degree else ""


def _not_plain_convolution(module: nn.modules.conv._ConvNd, degree: int) -> str:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return f"is a convolution with padding {module.padding} of {module.padding_mode}"
    if module.groups > 1 and module.groups % degree:
        return f"has {module.groups} groups, which {degree} ranks do not divide"
    weight = module._parameters["weight"]
    assert weight is not None
    # A hop sends contiguous memory, of which a channels-last weight has other strides.
    return "" if weight.is_contiguous() else "has a weight in channels-last memory"


def rotate_layers(model: nn.Module, layers: Sequence[str], ring: Ring) -> list[str]:
    """Replace the weights of `layers` in `model` by this rank's shards; return the names."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in layers:
        module = model.get_submodule(name)
        if type(module) not in _ROTATED:
            n_experts = len(next(module.parameters()))
            for each, stacked in module._parameters.items():
                if stacked is not None:
                    module._parameters[each] = made[stacked] = part(stacked, ring.piece, ring.mesh)
            RotatedStack(module, name, n_experts, ring)
            continue
        whole = module._parameters["weight"]
        assert whole is not None
        module._parameters["weight"] = (
            made[whole] if whole in made else made.setdefault(whole, part(whole, ring.piece, ring.mesh))
        )
        module.__class__ = _ROTATED[type(module)]
        module.ring = ring  # type: ignore[assignment]
        if isinstance(module, RotatedLinear):
            module.always_rotates = bool(expert_of(name))
    mine = {id(parameter) for parameter in made.values()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in mine]


def rotate(context: Context, layers: Sequence[str], degree: int, *, in_place: bool) -> None:
    """Shard the weights of `layers` over rings of `degree` ranks and rebind the optimizer.

    Args:
        context: Model and optimizer, changed in place; gets a `sync`.
        layers: Linear layers, convolutions, embeddings and stacked experts, by name.
        degree: Ranks of a ring; divides the number of ranks.
        in_place: Overwrite the own shard (rule 3).

    Raises:
        ApplyError: There is no process group, `degree` does not divide it, the ranks' weights differ, or a
            layer does not rotate.
    """
    require_ranks(context, "rotated tensor parallelism")
    require_groups(context, degree)
    found, refused = rotatable(context.model, degree)
    for name in layers:
        if name not in found:
            why = next((line for line in refused if line.startswith(f"{name} ")), f"{name} is not there")
            raise refusals.error_of(refusals.does_not_rotate(why))
    # Refusals are above: from here on the model changes, which a failed `apply` restores.
    copies, mesh = meshes(context.device.type, degree)
    before = dict(context.model.named_parameters())
    ring = Ring(mesh.get_group().group_name, degree, mesh.get_local_rank(), in_place, mesh)
    rotated = rotate_layers(context.model, layers, ring)
    orders = order_experts(context.model, layers)
    keep_only(context.model, dict.fromkeys(rotated, ring.piece))
    rebind(context.optimizer, before, dict(context.model.named_parameters()))
    mix_plain_and_sharded()
    # A recording has no other ranks to compare with.
    if not isinstance(local(context.model.get_parameter(rotated[0]).detach()), FakeTensor):
        _SameCalls(context, layers, mesh.get_group())
    if orders:
        remove_gradients_of_unused(context, orders, dist.distributed_c10d._get_default_group())
    context.placement.model_parallel_size = degree
    # Not now: whether `sharding.states` averages between the rings is known once that slot is applied.
    context.events.states_sharded.subscribe(lambda: average_whole(context, rotated, mesh, copies))
    context.checks["sharding.parallel"] = lambda: _check(context, layers, rotated, degree)


def _check(context: Context, layers: Sequence[str], rotated: Sequence[str], degree: int) -> dict[str, Any]:
    for name in layers:
        module = context.model.get_submodule(name)
        rotates = type(module) in _ROTATED.values() or "forward" in vars(module)
        if not rotates or not any(isinstance(each, DTensor) for each in module._parameters.values()):
            raise ApplyError(f"the weight of {name} does not go round the ranks.", code="MT392")
    n_bytes = sum(local(context.model.get_parameter(name)).nbytes for name in rotated)
    return {"degree": degree, "layers": len(layers), "rotated_bytes": n_bytes}
