"""The autograd nodes that stand for a region under a schedule (`runtime.frozen`, rules 3 and 4).

Each knows the run that it belongs to: one forward of the region and the backward that follows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memtune.runtime.tape import Slot


def whole(run: Any, *flow: Tensor) -> Tensor:
    """The token behind the one node whose backward is all of the run's: `flow` are parameters, then inputs, with gradients."""
    return _apply(_Whole, run, *flow)  # type: ignore[no-any-return]


def end(run: Any, *flow: Tensor) -> Tensor:
    """The token behind the last node of a chain: `flow` are inputs with gradients."""
    return _apply(_End, run, *flow)  # type: ignore[no-any-return]


def land(run: Any, number: int, token: Tensor, parameter: Tensor) -> Tensor:
    """The token behind the node of one parameter."""
    return _apply(_Land, run, number, token, parameter)  # type: ignore[no-any-return]


def leave(run: Any, token: Tensor) -> tuple[Tensor, ...]:
    """What the run's forward made, with the chain behind `token` for its history."""
    return _apply(_Leave, run, token)  # type: ignore[no-any-return]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _token(run: Any) -> Tensor:
    token: Tensor = run.token
    return token.detach()


class _Whole(torch.autograd.Function):
    """The node whose backward is the region's; what flows through it is a token."""

    @staticmethod
    def forward(ctx: Any, run: Any, *flow: Tensor) -> Tensor:
        ctx.run = run
        return _token(run)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.all_gradients(ctx)


class _End(_Whole):
    """The last node of a chain: its backward runs what is left of the region's."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.gradients_of_inputs()


class _Land(torch.autograd.Function):
    """The node whose backward has the gradient of one parameter; what flows through it is a token."""

    @staticmethod
    def forward(ctx: Any, run: Any, number: int, token: Tensor, parameter: Tensor) -> Tensor:
        ctx.run, ctx.number = run, number
        return _token(run)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, ctx.run.token, ctx.run.gradient_of(ctx.number)


class _Leave(torch.autograd.Function):
    """The node behind the region's outputs: keeps their gradients for the region, gives back a token."""

    @staticmethod
    def forward(ctx: Any, run: Any, token: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs: tuple[Tensor, ...] = run.outputs
        run.outputs = ()
        numbers = [n for n, leaf in enumerate(run.tape_outputs) if isinstance(leaf, Slot)]
        ctx.numbers = numbers
        ctx.mark_non_differentiable(*(out for n, out in zip(numbers, outputs, strict=True) if n not in run.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = ctx.run
        run.gradients = {n: g for n, g in zip(ctx.numbers, gradients, strict=True) if g is not None}
        return None, run.token
