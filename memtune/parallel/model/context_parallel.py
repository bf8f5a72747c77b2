"""Context parallelism in two dimensions: positions divided over ranks, which in attention exchange heads
(all-to-all) and pass contexts round rings.

Five rules:

1. `heads` × `contexts` ranks hold a share of the positions each, from the first block's input to the last
  one's output (`parallel.model.sequence_sharding`). In attention the ranks of one context exchange positions
  for heads: each has some heads of the context.
2. Keys and values pass round the contexts, and queries attend to the current ones; results are merged by
  their log-sum-exp (`parallel.model.block_attention`). In backward they pass round again, with the sums of
  their gradients, which end on the owner.
3. There may be two levels of rings: inner rings of consecutive contexts, in which a block of keys and values
  makes a full round while it is also sent to the next inner ring.
4. With a causal mask, contiguous contexts have unequal work: the last one attends to all. In zigzag each
  context has a piece from the front and its mirror image from the back, so half of every block but its own is
  unmasked; or ranks help each other (`parallel.model.balanced_attention`).
5. Saved tensors: queries, keys, values and output by heads, the log-sum-exp, and the pairs of positions that
  dropout keeps (`parallel.model.attention_dropout`).

Source: Gu et al. 2024, LoongTrain (arXiv:2406.18485).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memtune import refusals
from memtune._replaced import replaced
from memtune.errors import ApplyError
from memtune.parallel.model import balanced_attention
from memtune.parallel.model.attention_dropout import PairDropout, draw_pairs
from memtune.parallel.model.block_attention import (
    Attended,
    WeightMask,
    accumulation_dtype,
    attend,
    attend_backward,
    merge,
)
from memtune.parallel.model.context_groups import Grid, Split, grid_of
from memtune.parallel.model.sequence_sharding import (
    SequenceLayout,
    first_tensor,
    gather_output,
    is_summed,
    not_divisible,
    scaled_by,
    shard_input,
    shard_positions,
    share_dropouts,
    sum_gradients,
    summed_parameters,
)
from memtune.parallel.model.tensor_parallel import share_step
from memtune.parallel.ranks import RingRound, RingSums, require_groups, require_ranks
from memtune.parallel.sharding import meshes
from memtune.runtime import Context
from memtune.workload import map_tensors

FIX = "parallel: {kind: none}"
HEAD_CONTEXT = "head context "
"""Prefix of a division's name in `Target.sharded`."""
Dropout = balanced_attention.Dropout
Attention = Callable[..., Tensor]
"""With the arguments of `F.scaled_dot_product_attention`."""


# -- attention (rules 2, 3 and 5) ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One call of attention."""

    grid: Grid
    causal: bool
    scale: float | None
    dropout_p: float

    @property
    def helped(self) -> bool:
        """True if ranks attend for others."""
        return self.causal and self.grid.split.work_sharing

    def dropout(self, pairs: Sequence[Tensor | None]) -> Dropout:
        """Return the weights that are kept, by contexts of queries and keys."""
        rows, columns = pairs
        if rows is None:
            return lambda queries, keys: None
        return PairDropout(self.grid, self.dropout_p, rows, columns).of

    def forward(self, query: Tensor, pair: Tensor, kept: Dropout) -> Attended:
        """Return attention of queries (B, H, P, D) here to all contexts' keys and values (2, B, G, P, D)."""
        if self.helped:
            return balanced_attention.forward(self.grid.inner, query, pair, self.scale, kept)
        total: Attended | None = None
        grid = self.grid
        # The outer ring's hop is in flight during a full round of the inner one: links between nodes get that
        # much time (rule 3).
        outer = RingRound(grid.outer, pair, prefetch=False)
        for round_ in range(grid.outer.ranks):
            inner = RingRound(grid.inner, outer.next(), prefetch=False)
            for step in range(grid.inner.ranks):
                total = self._attend(total, query, inner.next(), grid.source(round_, step), kept)
            del inner
        assert total is not None
        return Attended(total.out.to(query.dtype), total.lse)

    def _attend(
        self, total: Attended | None, query: Tensor, pair: Tensor, source: int, kept: Dropout
    ) -> Attended | None:
        # A block that the causal mask hides entirely is passed on without compute: other ranks need it.
        seen = self.grid.visible_slices(source, query.shape[2], self.causal)
        if seen is None:
            return total
        rows, columns, causal = seen
        drop = self._part(kept, source, rows, columns)
        more = attend(query[:, :, rows], *pair[:, :, :, columns], causal=causal, scale=self.scale, kept=drop)
        if total is None:
            # Sums over contexts are kept wide, because merging rescales them once per context.
            alone = self.grid.split.contexts == 1
            return more if alone else Attended(more.out.to(accumulation_dtype(query.dtype)), more.lse)
        merge(Attended(total.out[:, :, rows], total.lse[:, :, rows]), more)
        return total

    def _part(self, kept: Dropout, source: int, rows: slice, columns: slice) -> WeightMask | None:
        drop = kept(self.grid.context, source)
        return None if drop is None else drop.part(rows, columns)

    def backward(
        self, gradient: Tensor, query: Tensor, pair: Tensor, all_keys: Attended, kept: Dropout
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of `query` and `pair`, of this rank's own positions and heads."""
        if self.helped:
            return balanced_attention.backward(
                self.grid.inner, gradient, query, pair, all_keys, self.scale, kept
            )
        grid = self.grid
        # Summed in float32 over contexts, as FlashAttention sums over its blocks of keys.
        to_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
        outer, outer_sums = RingRound(grid.outer, pair, prefetch=True), RingSums(grid.outer, mean=False)
        to_pair: Tensor | None = None
        for round_ in range(1, grid.outer.ranks + 1):
            # `mean=False`: queries of all ranks belong to one sample, so gradients of keys are a sum, not an
            # average.
            inner, sums = RingRound(grid.inner, outer.next(), prefetch=True), RingSums(grid.inner, mean=False)
            for step in range(1, grid.inner.ranks + 1):
                to_pair = None  # what was passed on is the hop's
                block, to_pair = inner.next(), sums.next()
                if to_pair is None:
                    to_pair = torch.zeros_like(block, dtype=accumulation_dtype(block.dtype))
                # Shifted by one against forward: the own block is the last, and its sums end on the owner.
                source = grid.source(round_ % grid.outer.ranks, step % grid.inner.ranks)
                self._add_gradients(to_query, to_pair, source, gradient, query, block, all_keys, kept)
                del block
                sums.add(to_pair)
            del inner, sums
            before = outer_sums.next()
            assert to_pair is not None
            to_pair = outer_sums.add(to_pair if before is None else before.add_(to_pair))
            del before
        assert to_pair is not None
        return to_query.to(query.dtype), to_pair.to(pair.dtype)

    def _add_gradients(
        self,
        to_query: Tensor,
        to_pair: Tensor,
        source: int,
        gradient: Tensor,
        query: Tensor,
        pair: Tensor,
        all_keys: Attended,
        kept: Dropout,
    ) -> None:
        # As in forward: a hidden block is passed on, and its sums with it, for the ranks that see it.
        seen = self.grid.visible_slices(source, query.shape[2], self.causal)
        if seen is None:
            return
        rows, columns, causal = seen
        given = Attended(all_keys.out[:, :, rows], all_keys.lse[:, :, rows])
        key, value = pair[:, :, :, columns]
        found = attend_backward(
            gradient[:, :, rows],
            query[:, :, rows],
            key,
            value,
            given,
            causal=causal,
            scale=self.scale,
            kept=self._part(kept, source, rows, columns),
        )
        to_query[:, :, rows].add_(found[0])
        to_pair[0, :, :, columns].add_(found[1])
        to_pair[1, :, :, columns].add_(found[2])


class _Attention(torch.autograd.Function):
    """Attention of this rank's positions to all positions of the group."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call, *pairs: Tensor | None
    ) -> Tensor:
        grid = call.grid
        mine, pair = grid.by_heads(query)[0], grid.by_heads(key, value)
        attended = call.forward(mine, pair, call.dropout(pairs))
        # By heads, so that backward exchanges only gradients between positions and heads.
        ctx.save_for_backward(mine, pair, *attended, *pairs)
        ctx.call = call
        return grid.by_positions(attended.out.unsqueeze(0))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, out, lse, *pairs = ctx.saved_tensors
        grid, kept = ctx.call.grid, ctx.call.dropout(pairs)
        to_query, to_pair = ctx.call.backward(
            grid.by_heads(gradient)[0], query, pair, Attended(out, lse), kept
        )
        to_query = grid.by_positions(to_query.unsqueeze(0))[0]
        to_key, to_value = grid.by_positions(to_pair)
        return to_query, to_key, to_value, None, None, None


def divided_attention(grid: Grid) -> Attention:
    """Return the replacement of `F.scaled_dot_product_attention` on the ranks of `grid`."""

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall(*args, **kwargs)
        # Refused at the call, because the recorded step cannot show all arguments that a later batch may
        # bring.
        call.require_plain()
        key, value = require_heads(call.query, call.key, call.value, grid.split.heads)
        # The replaced function is on autocast's list, a custom Function is not: torch would have cast these
        # inputs.
        query, key, value = (_as_autocast_wants(each) for each in (call.query, key, value))
        ours = _Call(grid, call.is_causal, call.scale, call.dropout_p)
        pairs = draw_pairs(grid, query, ours.dropout_p, helps=ours.helped) if ours.dropout_p else (None, None)
        made: Tensor = _Attention.apply(query, key, value, ours, *pairs)  # type: ignore[no-untyped-call]
        return made

    return attention


def _as_autocast_wants(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    cast = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if cast else tensor


class AttentionCall(NamedTuple):
    """Arguments of `F.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def require_plain(self) -> None:
        """Check that the call can be divided.

        Raises:
            ApplyError: It has a mask, its tensors are not samples × heads × positions × features, or its keys
                do not match its queries.
        """
        if self.attn_mask is not None:
            raise not_divisible("attention is given a mask other than is_causal", FIX)
        query, key, value = shapes = [tuple(each.shape) for each in self[:3]]
        like = len(query) == 4 and key == value == (query[0], key[1], *query[2:])
        if not like or (query[1] != key[1] and not (self.enable_gqa and query[1] % key[1] == 0)):
            raise not_divisible(
                f"attention's query, key and value have shapes {', '.join(map(str, shapes))}", FIX
            )


def require_heads(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return key and value with a number of heads that `ranks` divide, repeated if queries share too few.

    Raises:
        ApplyError: `ranks` do not divide the heads of `query`.
    """
    heads, shared = query.shape[1], key.shape[1]
    if heads % ranks:
        raise not_divisible(
            f"{ranks} ranks do not divide the {heads} heads of attention",
            "a head_degree that divides the heads",
        )
    # Repeated as little as possible: every repetition is sent round the ring.
    each = ranks // gcd(ranks, shared)
    if each == 1:
        return key, value
    each = each if heads % (shared * each) == 0 else heads // shared
    return key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)


# -- the model -----------------------------------------------------------------------------------------------


def divide_blocks(
    model: nn.Module, blocks: Sequence[str], layout: SequenceLayout, attention: Attention
) -> None:
    """Make `blocks` work on this rank's positions, with `attention` instead of torch's (rule 1)."""
    share_dropouts(model, blocks, layout)
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = _on_shares(block.forward, name, layout, attention)
    first, last = model.get_submodule(blocks[0]), model.get_submodule(blocks[-1])
    first.forward = shard_input(
        first.forward, layout, FIX if layout.units == layout.ranks else "load_balance: none"
    )
    last.forward = gather_output(last.forward, layout)


def _on_shares(
    forward: Callable[..., Any], name: str, layout: SequenceLayout, attention: Attention
) -> Callable[..., Any]:
    """Return a block's `forward` for a share of the positions; arguments by position are divided too."""
    attending = with_attention(forward, attention)

    def run(*args: Any, **kwargs: Any) -> Any:
        x = first_tensor(args, kwargs)
        if x is None or x.dim() < 2:
            raise not_divisible(f"{name} is given no tensor of positions", FIX)
        length = x.shape[1] * layout.ranks
        args, kwargs = map_tensors(
            (args, kwargs), lambda each: each if each is x else _own_of(each, length, name, layout)
        )
        return attending(*args, **kwargs)

    return run


def with_attention(forward: Callable[..., Any], attention: Attention) -> Callable[..., Any]:
    """Return a block's `forward` with `attention` instead of torch's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # The attribute that models call; replaced only inside a block's forward.
        with replaced(F, scaled_dot_product_attention=attention):
            return forward(*args, **kwargs)

    return run


def _own_of(given: Tensor, length: int, name: str, layout: SequenceLayout) -> Tensor:
    """Return this rank's part of a block's further argument, such as rotary tables or position indices.

    Raises:
        ApplyError: It is indexed by pairs of positions; or its gradient would differ between ranks.
    """
    # By size, because an argument's dims have no names.
    dims = [dim for dim, size in enumerate(given.shape) if size == length]
    if len(dims) > 1:
        raise not_divisible(
            f"{name} is given a tensor of shape {tuple(given.shape)}, by pairs of positions (a mask?)", FIX
        )
    if not given.requires_grad:
        return layout.shard_view(given, dims[0]) if dims else given
    if dims != [1]:
        raise not_divisible(
            f"{name} is given a tensor of shape {tuple(given.shape)} that needs a gradient", FIX
        )
    return shard_positions(given, layout)


def shard_fake_blocks(
    model: nn.Module, blocks: Sequence[str], layout: SequenceLayout, attention: Attention
) -> None:
    """Do the same as `divide_blocks` on a model that is only recorded."""
    names = summed_parameters(model, (), blocks, FIX)
    divide_blocks(model, blocks, layout, attention)
    for name in names:
        # The recorded model has no `Average`, but the op that scales must be in the Step.
        model.get_parameter(name).register_hook(scaled_by(layout.ranks))


def divide_sequence(context: Context, split: Split) -> None:
    """Divide the positions of the model in `context` by `split`; a group's ranks work on one micro-batch at a
    time.

    Args:
        context: Model, changed in place; gets a micro-batch rotation and a `sync`.
        split: Its ranks divide the number of ranks.

    Raises:
        ApplyError: There is no process group, `split` does not divide it, the ranks' weights differ, or the
            blocks are not one chain.
    """
    require_ranks(context, "head-context parallelism")
    require_groups(context, split.ranks)
    names = summed_parameters(context.model, (), context.blocks, FIX)
    copies, mesh = meshes(context.device.type, split.ranks)
    group, rank = mesh.get_group().group_name, mesh.get_local_rank()
    ours = grid_of(split, context.device.type, group, context.placement.world_size // split.ranks, rank)
    divide_blocks(context.model, context.blocks, ours.layout, divided_attention(ours))
    share_step(context, mesh, copies)
    sum_gradients(context, mesh, names)
    context.checks["sharding.parallel"] = lambda: _check(context, split, names)


def _check(context: Context, split: Split, summed: Sequence[str]) -> dict[str, Any]:
    for name in context.blocks:
        if "forward" not in vars(context.model.get_submodule(name)):
            raise ApplyError(f"{name} does not work on a share of the positions.", code="MT392")
    for name in summed:
        if not is_summed(context.model, context.blocks, name):
            raise refusals.error_of(refusals.unsummed_gradient(name))
    return {
        "heads": split.heads,
        "contexts": split.contexts,
        "blocks": len(context.blocks),
        "summed_parameters": len(summed),
    }
