"""Rows sent to the ranks that own their experts, and their outputs sent back.

Four rules:

1. Rank r of a group of n owns experts r·J to (r + 1)·J - 1, J = experts/n. A token has one row for each
  expert that it is routed to. Rows are sorted by owner and expert, so that every message is contiguous.
2. Ranks exchange the numbers of rows per expert first, then the rows: one collective each.
3. Hierarchical: rows cross the node's link to the rank whose place in its node is that of the owner, are
  sorted by the owner's node, and cross the network between ranks of one place. The network carries the same
  rows, in messages to nodes - 1 ranks instead of all ranks of the other nodes.
4. Backward sends gradients of outputs as forward sends rows, and gradients of rows as forward sends outputs.
  The loss of each rank is a mean over its own samples, so a parameter's gradient is the mean over ranks:
  gradients are divided by n on their way to the owner, and multiplied by n on their way back.

Sources: Rajbhandari et al. 2022, DeepSpeed-MoE (arXiv:2201.05596), section 5.3; Hwang et al. 2023, Tutel
(arXiv:2206.03382), section 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.autograd.function import once_differentiable

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)

_OPS = torch.ops.memtune


@dataclass(frozen=True)
class Owners:
    """The ranks that own the experts of a layer, in the order of the experts."""

    levels: tuple[tuple[str, int], ...]
    """Group and size of each exchange: all ranks, or those of this node, then those of its place (rule 3)."""

    @property
    def ranks(self) -> int:
        """Number of owners."""
        return math.prod(ranks for _, ranks in self.levels)


class Load(NamedTuple):
    """Rows of one call of a layer of experts."""

    routed: int
    """Rows of this rank's tokens: the rows of each owner, if experts are chosen evenly."""
    arriving: int
    """Rows that have arrived."""


@dataclass(frozen=True)
class Hop:
    """One exchange of rows."""

    group: str
    ranks: int
    sent: list[int]
    """Rows to each rank of the group."""
    arriving: list[int]
    """Rows from each."""

    def send(self, rows: Tensor) -> Tensor:
        """Return the rows that arrive here for `rows`."""
        arriving = rows.new_empty((sum(self.arriving), *rows.shape[1:]))
        _OPS.all_to_all_rows_(arriving, rows, self.group, self.ranks, self.arriving, self.sent)
        return arriving

    def send_back(self, rows: Tensor) -> Tensor:
        """Return, for `rows` in the order in which `send` gave them, those of the rows sent."""
        arriving = rows.new_empty((sum(self.sent), *rows.shape[1:]))
        _OPS.all_to_all_rows_(arriving, rows, self.group, self.ranks, self.sent, self.arriving)
        return arriving


@dataclass(frozen=True)
class Route:
    """Way of a layer's rows to the owners of their experts."""

    hops: tuple[Hop, ...]
    orders: tuple[Tensor, ...]
    """Rows in the order in which each hop sends them."""
    experts: Tensor
    """Expert of each row that arrives, counted from this rank's first."""

    @property
    def ranks(self) -> int:
        """Number of owners."""
        return math.prod(hop.ranks for hop in self.hops)

    @classmethod
    def from_index(cls, index: Tensor, experts: int, owners: Owners) -> Route:
        """Return the route of the rows of `index`, the expert of each, among `experts`; all ranks call it."""
        *inner, (_, outer) = owners.levels
        places = inner[0][1] if inner else 1
        mine = experts // owners.ranks
        # (nodes, places, experts of an owner) → (places, nodes, experts): the first hop goes by place.
        node, rest = index // (places * mine), index % (places * mine)
        key = (rest // mine) * (outer * mine) + node * mine + rest % mine
        first = places if inner else outer
        counts = torch.zeros(experts, dtype=torch.int64, device=index.device)
        counts = counts.scatter_add(0, key, torch.ones_like(key)).view(first, -1)
        hops, orders = list[Hop](), list[Tensor]()
        for group, ranks in owners.levels:
            if hops:
                # (ranks of the last hop, ranks of this one, experts): rows are sorted by the next rank.
                counts = counts.view(len(counts), ranks, mine).transpose(0, 1).contiguous().view(ranks, -1)
                key = key // mine
            # Stable, so that an expert adds up the gradients of its rows in the same order in each run.
            orders.append(torch.argsort(key, stable=True))
            hop, counts = _exchanged(counts, group, ranks, len(key))
            hops.append(hop)
            key = _repeated(counts, sum(hop.arriving))
        return cls(tuple(hops), tuple(orders), key % mine)


def _repeated(counts: Tensor, rows: int) -> Tensor:
    """Return the column in `counts` of each of `rows` rows, which are ordered by row and column."""
    columns = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    return torch.repeat_interleave(columns, counts.reshape(-1), output_size=rows)


def _exchanged(counts: Tensor, group: str, ranks: int, rows: int) -> tuple[Hop, Tensor]:
    """Return the hop that sends `rows` rows by `counts`, (ranks, experts), and the counts that arrive."""
    arriving = torch.empty_like(counts)
    _OPS.all_to_all_into_(arriving, counts, group, ranks)
    if isinstance(counts, FakeTensor) or dist.get_backend() == "fake":
        return _assumed(counts, group, ranks, rows)
    # One read of both: each waits for the device.
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    return Hop(group, ranks, sent, received), arriving


def _assumed(counts: Tensor, group: str, ranks: int, rows: int) -> tuple[Hop, Tensor]:
    """Return the hop and counts of the busiest rank if all send alike, for recordings."""
    try:
        sent = counts.sum(1).tolist()
    except DataDependentOutputException:
        sent = []
    if sum(sent) != rows:  # the choices are not known: they are spread evenly
        sent = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return Hop(group, ranks, sent, sent), counts
    busiest = sent.index(max(sent))
    return Hop(group, ranks, sent, [sent[busiest]] * ranks), counts[busiest].repeat(ranks, 1)


def _send(x: Tensor, hops: Sequence[Hop], orders: Sequence[Tensor], copies: int) -> Tensor:
    """Return the rows that arrive for `copies` rows of each row of `x`."""
    for at, (hop, order) in enumerate(zip(hops, orders, strict=True)):
        x = hop.send(x.index_select(0, order if at or copies == 1 else order // copies))
    return x


def _send_back(rows: Tensor, hops: Sequence[Hop], orders: Sequence[Tensor]) -> Tensor:
    """Return `rows`, which are ordered as those that arrived, in the order before `_send`."""
    for hop, order in zip(reversed(hops), reversed(orders), strict=True):
        rows = hop.send_back(rows)
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
    return rows


class _Dispatched(torch.autograd.Function):
    """Rows and weights of tokens (T, H), (T, K) at their experts' owners: (R, H), (R); K may be 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, hops: Sequence[Hop], ranks: int, *orders: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*orders)
        ctx.hops, ctx.ranks, ctx.chosen = hops, ranks, (len(x), 1) if weights is None else weights.shape
        # One node for both: all ranks send them in one order, in backward too.
        return (
            _send(x, hops, orders, ctx.chosen[1]),
            None if weights is None else _send(weights.reshape(-1), hops, orders, 1),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: Tensor, of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        of_x = of_chosen = None
        # Read once: a second read would recompute the block again.
        orders = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            of_x = _summed(_send_back(of_rows.contiguous(), ctx.hops, orders), ctx.chosen[1])
            of_x.mul_(ctx.ranks)  # rule 4
        if ctx.needs_input_grad[1]:
            assert of_weights is not None
            of_chosen = _send_back(of_weights.contiguous(), ctx.hops, orders).view(ctx.chosen)
            of_chosen.mul_(ctx.ranks)
        return of_x, of_chosen, None, None, *[None] * len(ctx.hops)


class _Combined(torch.autograd.Function):
    """Outputs (R, H) of the rows of `_Dispatched`, summed at their tokens: (T, H)."""

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, hops: Sequence[Hop], ranks: int, chosen: int, *orders: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*orders)
        ctx.hops, ctx.ranks, ctx.chosen = hops, ranks, chosen
        return _summed(_send_back(made.contiguous(), hops, orders), chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sent = _send(gradient / ctx.ranks, ctx.hops, ctx.saved_tensors, ctx.chosen)  # rule 4
        return sent, None, None, None, *[None] * len(ctx.hops)


class _Unused(torch.autograd.Function):
    """Outputs of no rows, which depend on them and on others."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *others)
        return torch.empty_like(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(each) if needed else None for each, needed in pairs)


def _summed(rows: Tensor, chosen: int) -> Tensor:
    """Return the sums of `chosen` consecutive rows each."""
    return rows if chosen == 1 else rows.view(-1, chosen, *rows.shape[1:]).sum(1)


def dispatched(x: Tensor, weights: Tensor | None, route: Route) -> tuple[Tensor, Tensor | None]:
    """Return the rows of all ranks' tokens for this rank's experts, and their weights if there are any.

    Args:
        x: This rank's tokens, (tokens, features).
        weights: Weights of the experts that each is routed to, (tokens, chosen); None: each has one expert.
        route: The way of their rows.
    """
    made: tuple[Tensor, Tensor | None] = _Dispatched.apply(x, weights, route.hops, route.ranks, *route.orders)  # type: ignore[no-untyped-call]
    return made


def unused(rows: Tensor, *others: Tensor) -> Tensor:
    """Return the outputs of a rank that gets no rows, (0, …); backward gives `others` gradients of zero."""
    made: Tensor = _Unused.apply(rows, *others)  # type: ignore[no-untyped-call]
    return made


def combined(made: Tensor, chosen: int, route: Route) -> Tensor:
    """Return the sum of each of this rank's tokens' `chosen` outputs from those of the dispatched rows."""
    found: Tensor = _Combined.apply(made, route.hops, route.ranks, chosen, *route.orders)  # type: ignore[no-untyped-call]
    return found
