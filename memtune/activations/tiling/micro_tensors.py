"""Token-wise modules over parts of the tokens that each keep a graph: micro-tensors (TSPLIT).

Instead of one storage per saved tensor there is one per tensor and part, which is offloaded, reloaded and
freed separately: while part i computes, part i - 1 is being copied to the host.

Forward runs part after part, each with a graph from its rows to its output. Backward runs the graphs in
reverse, so that no op runs twice and the tensors offloaded last are reloaded first. Saved tensors pass
through the hooks of the surrounding block, where the activation table keeps or offloads them
(`activations.recompute.activation_table`). The graphs hold neither the rows nor the outputs. Backward frees
the parts' graphs, so a second one (`retain_graph`) fails as torch's does.

Source: Nie et al. 2022, TSPLIT: Fine-grained GPU Memory Management for Efficient DNN Training via Tensor
Splitting, ICDE.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class PartSettings(Protocol):
    """Settings of one module. Legend: N = tokens, D = width of the input, E = width of the output."""

    chunks: int
    anchor: Tensor
    """Any tensor that requires a gradient, which it never gets."""

    def part(self, rows: Tensor, dims: int) -> Tensor:
        """Return the module's output (n, E) for rows (n, D), called with its number of dims."""


class KeptParts(torch.autograd.Function):
    """Module of a `PartSettings` over its parts: x (…, D) and its parameters → (…, E).

    Parameters are arguments and their gradients are returned summed, so hooks on gradients (FSDP2, DDP) see
    one full gradient of each, as with the plain module.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: PartSettings, *parameters: Tensor) -> Tensor:
        """Run forward part by part."""
        rows, out = x.detach().reshape(-1, x.shape[-1]), None
        size = -(-len(rows) // how.chunks)
        edges: list[tuple[GradientEdge | None, GradientEdge]] = []
        for start in range(0, len(rows), size):
            with torch.enable_grad():
                part, entered = rows[start : start + size], None
                if x.requires_grad:
                    part = _Entered.apply(part, how.anchor)  # type: ignore[no-untyped-call]
                    entered = get_gradient_edge(part)
                made = how.part(part, x.dim())
                edges.append((entered, get_gradient_edge(made)))
            if out is None:
                out = made.new_empty(len(rows), made.shape[-1])
            out[start : start + size].copy_(made.detach())
            del part, made  # the edges hold the part's graph, which holds what it has saved
        assert out is not None
        ctx.edges, ctx.parameters, ctx.size, ctx.shape, ctx.dtype = edges, parameters, size, x.shape, x.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Run backward part by part, the last part first; sum the parameters' gradients."""
        given, size = gradient.reshape(-1, gradient.shape[-1]), ctx.size
        dx = given.new_empty(len(given), ctx.shape[-1], dtype=ctx.dtype) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        for number, (entered, left) in reversed(list(enumerate(ctx.edges))):
            mine = slice(number * size, (number + 1) * size)
            wanted = [*ctx.parameters] if dx is None else [entered, *ctx.parameters]
            got = list(torch.autograd.grad(left, wanted, given[mine], allow_unused=True))
            if dx is not None:
                dx[mine].copy_(got.pop(0))
            for i, each in enumerate(got):
                so_far = sums[i]
                sums[i] = each if so_far is None or each is None else so_far.add_(each)
            del got, each  # before the next part's gradients are made
        return (None if dx is None else dx.view(ctx.shape), None, *sums)


class _Entered(torch.autograd.Function):
    """Node at which a part's graph begins: its gradient can be requested, and unlike a leaf it holds no
    tensor.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
