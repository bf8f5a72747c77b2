"""Boundary activations: packs' arguments, saved per micro-batch on device or host until the pack runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.offload.layer_major.packs import BoundaryTier
from memtune.runtime import HOST, mark, transfer

SavedStart = Callable[[Tensor, list[Tensor | None]], list[Any]]
"""Restores saved arguments: takes an anchor, and a list that backward fills with their gradients."""


class _Boundary(torch.autograd.Function):
    """Makes a saved argument part of a new graph; backward stores its gradient in `sink[at]` and stops.

    `anchor` is an empty tensor that requires a gradient: without it autograd would not record the function.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, sink: list[Tensor | None], at: int) -> Tensor:
        ctx.sink, ctx.at = sink, at
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        # Autograd stops here: the graph of the pack before no longer exists, it is made again when that pack
        # runs.
        ctx.sink[ctx.at] = gradient
        return None, None, None, None


class BoundaryActivations:
    """Saves the arguments of packs.

    Args:
        where: Tier of the arguments that need gradients; all others remain where they are.
    """

    def __init__(self, where: BoundaryTier) -> None:
        self._where = where
        # Source and target of the D2H copy in flight. At most one, so the device holds at most two boundary
        # activations, whatever the speed of the link; the pass predicts the same.
        self._in_flight: tuple[Tensor, Tensor] | None = None

    def save(self, tensors: Sequence[Any]) -> SavedStart:
        """Save `tensors` for one micro-batch and return the function that restores them."""
        # Tensors without gradients (masks) remain where they are: packs share them, and would copy them once
        # each.
        saved = [(self._save_one(x), isinstance(x, Tensor) and x.requires_grad) for x in tensors]

        def start(anchor: Tensor, sink: list[Tensor | None]) -> list[Any]:
            found = []
            sink += [None] * len(saved)
            for at, (x, needs_gradient) in enumerate(saved):
                value = (
                    torch.ops.memtune.to_device(x, anchor.device)
                    if needs_gradient and self._where == "host"
                    else x
                )
                found.append(_Boundary.apply(anchor, value, sink, at) if needs_gradient else value)  # type: ignore[no-untyped-call]
            return found

        return start

    def _save_one(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self._where == "device" or not x.requires_grad:
            return x.detach()  # without it the saved tensor would hold the graph that made it
        self.wait()
        host = torch.ops.memtune.to_host(x.detach())
        mark(host, HOST)
        self._in_flight = x.detach(), host  # the source must live until the copy has ended
        return host

    def wait(self) -> None:
        """Wait for the D2H copy in flight and free its source on the device."""
        if self._in_flight is not None:
            transfer.wait(self._in_flight[1])
            self._in_flight = None


def discard_saved() -> saved_tensors_hooks:
    """Return a context that drops all saved tensors; the graph of its ops cannot run backward."""
    return saved_tensors_hooks(lambda tensor: None, _refuse_backward)


def _refuse_backward(nothing: None) -> Tensor:
    raise AssertionError("a forward pack has no backward")
