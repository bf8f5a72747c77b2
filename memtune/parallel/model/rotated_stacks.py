"""Experts stacked in one module, whose weights rotate: each rank has its own tokens and one shard of experts.

Rules, besides those of `parallel.model.weight_rotation`:

1. A shard has consecutive experts. With each shard the module's own forward runs for the rows of this rank's
  tokens that have chosen one of its experts, with no rows too. Tokens are sent nowhere.
2. Tokens, choices and own shards alone are saved for backward: what the module's code would save has the
  shards in it, and would keep the whole layer. So backward runs the code again, shard by shard, as each
  passes with the sum of its gradient. The code must draw no random numbers.

Source: Luo et al. 2023, RTP (arXiv:2311.01635).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.autograd.function import once_differentiable

from memtune.parallel.model.stacked_experts import StackedExperts
from memtune.parallel.ranks import Ring, RingRound, RingSums
from memtune.runtime import local


class RotatedStack(StackedExperts):
    """A module of experts whose weights rotate among the ranks; they have been divided."""

    def __init__(self, module: nn.Module, name: str, experts: int, ring: Ring) -> None:
        super().__init__(module, name, experts, "their rotation")
        self.ring, self.each = ring, experts // ring.ranks

    def run_routed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of this rank's tokens, summed over their experts."""
        return self._apply(x, index.flatten(), weights, weights.dtype)

    def run_sorted(self, x: Tensor, index: Tensor, kind: torch.dtype) -> Tensor:
        """Return the outputs of this rank's rows."""
        return self._apply(x, index, None, kind)

    def _apply(self, x: Tensor, index: Tensor, weights: Tensor | None, kind: torch.dtype) -> Tensor:
        own = {name: local(each) for name, each in self.module._parameters.items() if each is not None}
        call = _Call(self, tuple(own), kind, _Autocast.now(x.device.type), self._rows_by_shard(index))
        order = torch.argsort(index, stable=True)
        made: Tensor = _Rotated.apply(x, weights, index.index_select(0, order), order, call, *own.values())  # type: ignore[no-untyped-call]
        return made

    def _rows_by_shard(self, index: Tensor) -> list[int]:
        """Return the number of rows of each shard."""
        ranks, rows = self.ring.ranks, len(index)
        owner = index // self.each
        counts = torch.zeros(ranks, dtype=torch.int64, device=index.device)
        counts = counts.scatter_add(0, owner, torch.ones_like(owner))
        try:
            return counts.tolist()
        except DataDependentOutputException:  # the choices are not known: they are spread evenly
            return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


class _Autocast(NamedTuple):
    """Casts of the forward, under which backward runs its code again."""

    kind: str
    on: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> _Autocast:
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        return torch.autocast(self.kind, self.dtype, enabled=self.on, cache_enabled=False)


@dataclass(frozen=True)
class _Call:
    """One call of a module."""

    stack: RotatedStack
    names: tuple[str, ...]
    """Of its weights."""
    kind: torch.dtype
    """Type of the numbers of rows, if rows arrive sorted."""
    autocast: _Autocast
    rows: list[int]
    """Number of rows of each shard."""

    def part(self, shard: int) -> slice:
        """Return where the rows of a shard are, sorted by expert."""
        first = sum(self.rows[:shard])
        return slice(first, first + self.rows[shard])

    def run(
        self, held: Sequence[Tensor], shard: int, rows: Tensor, experts: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the outputs of the rows of a shard."""
        each = self.stack.each
        other = self.kind if weights is None else weights
        return self.stack.run_with(
            dict(zip(self.names, held, strict=True)), each, rows, experts - shard * each, other
        )


class _Rotated(torch.autograd.Function):
    """Outputs of tokens (T, H) by all experts.

    Args:
        x: Tokens, or rows.
        weights: (T, K), None for rows.
        index: Experts, sorted.
        order: The place of each among the choices of all tokens.
        call: The call.
        shards: This rank's shard of each weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor | None,
        index: Tensor,
        order: Tensor,
        call: _Call,
        *shards: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weights, index, order, *shards)
        ctx.call = call
        ring, chosen = call.stack.ring, 1 if weights is None else weights.shape[1]
        rounds, total = [RingRound(ring, each.detach(), prefetch=False) for each in shards], None
        for hop in range(ring.ranks):
            shard = ring.owner(hop)
            part = call.part(shard)
            at = order[part]
            token = at // chosen
            of_rows = None if weights is None else weights.reshape(-1).index_select(0, at)
            held = [each.next() for each in rounds]
            made = call.run(held, shard, x.index_select(0, token), index[part], of_rows)
            del held, of_rows
            if total is None:
                total = made.new_zeros((len(x), *made.shape[1:]))
            total.index_add_(0, token, made)
            del made
        for each in rounds:
            each.finish()
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, index, order, *shards = ctx.saved_tensors
        call: _Call = ctx.call
        ring, chosen = call.stack.ring, 1 if weights is None else weights.shape[1]
        to_x, to_weights, *_ = ctx.needs_input_grad
        trained = ctx.needs_input_grad[5:]
        of_x = torch.zeros_like(x) if to_x else None
        of_weights = torch.zeros_like(weights) if to_weights else None
        of_shards: list[Tensor | None] = [None] * len(shards)
        rounds = [RingRound(ring, each.detach(), prefetch=True) for each in shards]
        sums = [RingSums(ring) for _ in shards]
        for hop in range(1, ring.ranks + 1):
            shard = ring.owner(hop)
            part = call.part(shard)
            at = order[part]
            token = at // chosen
            of_shards = [None] * len(shards)  # what was passed on is the hop's
            with torch.enable_grad(), call.autocast.again():
                rows = x.index_select(0, token).detach().requires_grad_(to_x)
                of_rows = None
                if weights is not None:
                    of_rows = weights.reshape(-1).index_select(0, at).detach().requires_grad_(to_weights)
                held = [
                    each.next().detach().requires_grad_(on) for each, on in zip(rounds, trained, strict=True)
                ]
                made = call.run(held, shard, rows, index[part], of_rows)
            wanted = [each for each in (rows, of_rows, *held) if each is not None and each.requires_grad]
            gradients = torch.autograd.grad(
                made,
                wanted,
                gradient.index_select(0, token).to(made.dtype),
                allow_unused=True,
                materialize_grads=True,
            )
            found = iter(gradients)
            del made, wanted, gradients
            if of_x is not None:
                of_x.index_add_(0, token, next(found))
            if of_weights is not None:
                of_weights.view(-1).index_copy_(0, at, next(found))
            del rows, of_rows
            for number, on in enumerate(trained):
                if on:
                    received, mine = sums[number].next(), next(found)
                    of_shards[number] = sums[number].add(mine if received is None else received.add_(mine))
                    del received, mine
            del found, held
        return of_x, of_weights, None, None, None, *of_shards


def rotation_refusal(module: nn.Module) -> str:
    """Return why stacked experts that ranks can divide cannot rotate, or an empty string."""
    drops = any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p for each in module.modules())
    return "draws random numbers, and its code runs again in backward" if drops else ""
