"""A module that treats every token alike, run over parts of the tokens that each keep a graph: micro-tensors (TSPLIT).

What the module saves for backward is then not one storage per tensor but one per tensor and part, which leaves the device, comes
back and is freed on its own: while part i computes, part i - 1 is on its way to the host.

Rule 1. Forward runs part after part, each with a graph from its rows to its output; backward goes back through the graphs, the
        last part's first, so nothing runs twice and what left last comes back first. What they save passes through the hooks of
        the block around, where the table of claims (`runtime.activations`) keeps or moves it. The graphs hold neither the rows
        nor the outputs themselves.
Rule 2. Parameters go in as arguments and their gradients come out summed: whoever watches gradients (FSDP2, DDP, hooks) sees one
        of each, whole, as from the plain module.
Rule 3. Backward frees the parts' graphs as it goes: a second one through the same graph (`retain_graph`) fails as torch's does.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class How(Protocol):
    """How one module runs. Legend: N = tokens, D = width of the input, E = of the output."""

    chunks: int
    anchor: Tensor
    """Any tensor that requires a gradient, which it never gets."""

    def part(self, rows: Tensor, dims: int) -> Tensor:
        """The module over some rows (n, D), which it is given with as many dims as it is used to; (n, E)."""


class KeptParts(torch.autograd.Function):
    """The module of a `How` over its parts: x (…, D), then its parameters; gives (…, E)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How, *parameters: Tensor) -> Tensor:
        """Rule 1."""
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
            del part, made
        assert out is not None
        ctx.edges, ctx.parameters, ctx.size, ctx.shape, ctx.dtype = edges, parameters, size, x.shape, x.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Rules 1 and 2."""
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
            del got, each
        return (None if dx is None else dx.view(ctx.shape), None, *sums)


class _Entered(torch.autograd.Function):
    """Rows at which a part's graph begins: a node that can be asked for its gradient and, unlike a leaf, holds no tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
