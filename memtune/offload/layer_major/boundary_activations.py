"""What packs of blocks start from, kept for each micro-batch until they do: Rule 2 of
`offload.layer_major.layer_major_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.runtime import HOST, mark, transfer

BoundaryTier = Literal["device", "host"]
Kept = Callable[[Tensor, list[Tensor | None]], list[Any]]
"""Gives back what was kept, from an anchor and a list that gets its gradients."""


class _Boundary(torch.autograd.Function):
    """What a pack starts from, with autograd looking on; its gradient goes to `sink[at]` and no further."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, sink: list[Tensor | None], at: int) -> Tensor:
        ctx.sink, ctx.at = sink, at
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.sink[ctx.at] = gradient
        return None, None, None, None


class Boundaries:
    """What packs start from.

    Args:
        where: What needs gradients is kept.
    """

    def __init__(self, where: BoundaryTier) -> None:
        self._where = where
        self._leaving: tuple[Tensor, Tensor] | None = (
            None  # on the device, and the host memory that it is on the way to
        )

    def keep(self, tensors: Sequence[Any]) -> Kept:
        """Keep `tensors`; returns what gives them back."""
        kept = [(self._leave(x), isinstance(x, Tensor) and x.requires_grad) for x in tensors]

        def start(anchor: Tensor, sink: list[Tensor | None]) -> list[Any]:
            found = []
            sink += [None] * len(kept)
            for at, (x, needs_gradient) in enumerate(kept):
                there = (
                    torch.ops.memtune.to_device(x, anchor.device)
                    if needs_gradient and self._where == "host"
                    else x
                )
                found.append(_Boundary.apply(anchor, there, sink, at) if needs_gradient else there)  # type: ignore[no-untyped-call]
            return found

        return start

    def _leave(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self._where == "device" or not x.requires_grad:
            return x.detach()
        self.arrive()
        host = torch.ops.memtune.to_host(x.detach())
        mark(host, HOST)
        self._leaving = x.detach(), host
        return host

    def arrive(self) -> None:
        """What is on its way to the host is let go on the device."""
        if self._leaving is not None:
            transfer.wait(self._leaving[1])
            self._leaving = None


def nothing_saved() -> saved_tensors_hooks:
    """Inside, what autograd saves is let go at once; nothing that runs there can run backward."""
    return saved_tensors_hooks(lambda tensor: None, _gone)


def _gone(nothing: None) -> Tensor:
    raise AssertionError("a forward pack has no backward")
