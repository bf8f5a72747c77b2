"""Cross-entropy over a head's logits, a few rows at a time: the logits of all tokens never exist at once.

Each part of the rows runs through the head, the user's elementwise ops and `F.cross_entropy`, and back to the
gradient of its logits at once; gradients of head and hidden states are computed part by part, in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memtune.errors import ApplyError

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TiledLoss:
    """Settings of one loss. Legend: N = rows (tokens), D = hidden width, V = classes."""

    chunks: int
    """Number of parts of the rows."""
    steps: tuple[Step, ...]
    """Elementwise ops between head and loss."""
    dtype: torch.dtype | None
    """Autocast's dtype for the head, None if it was off."""
    mean: bool
    """Divide by the number (or the class weights) of the rows that count."""
    class_weight: Tensor | None  # (V,)
    ignore_index: int
    label_smoothing: float
    on_gradient: Callable[[], None]
    """Called when backward arrives, before any gradient is returned."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """Return the loss of rows `x` (N, D) under a head (V, D), bias (V,); targets (N,) or (N, V)."""
        loss: Tensor = _Loss.apply(x, weight, bias, target, self)  # type: ignore[no-untyped-call]
        return loss

    def sum_over(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the summed loss of some rows, under the current autocast state."""
        for step in self.steps:
            logits = step(logits)
        return F.cross_entropy(
            logits,
            target,
            self.class_weight,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def with_backward(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the summed loss of some rows under autocast as now, and a function for its gradient."""
        if self.steps or self.label_smoothing or self.dtype is not None or target.dtype is not torch.long:
            # A leaf: the graph of one part reaches from its loss to its logits and is freed at once.
            logits.requires_grad_()
            with torch.enable_grad():
                loss = self.sum_over(logits, target)
            return loss.detach(), lambda: _gradient(loss, logits)
        # The ops that autograd would run, without its graph, engine and checks for each part.
        log_p = torch.log_softmax(logits, 1)
        settings = self.class_weight, _SUM, self.ignore_index
        loss, total_weight = _aten.nll_loss_forward(log_p, target, *settings)

        def backward() -> Tensor:
            gradient = _aten.nll_loss_backward(torch.ones_like(loss), log_p, target, *settings, total_weight)
            found: Tensor = _aten._log_softmax_backward_data(gradient, log_p, 1, log_p.dtype)
            return found

        return loss, backward

    def denominator(self, target: Tensor) -> Tensor | int | None:
        """Return the divisor of the sum, as `F.cross_entropy` counts it; None for a sum."""
        if not self.mean:
            return None
        if target.is_floating_point():  # probabilities of all classes
            return len(target)
        counts = target != self.ignore_index
        if self.class_weight is None:
            return counts.sum()
        return (self.class_weight[target.where(counts, 0)] * counts).sum()

    def cast(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as autocast would cast it for the head."""
        return tensor if self.dtype is None else tensor.to(self.dtype)


def _gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient of `leaf`, to which nothing else refers."""
    # On an accelerator the engine's thread holds what `autograd.grad` returns until it gets the interpreter's
    # lock again: the next part's tensors would be allocated besides.
    loss.backward(inputs=[leaf])
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    return gradient


_aten: Any = torch.ops.aten
_SUM = 2  # of `at::Reduction`


class _Loss(torch.autograd.Function):
    """Autograd function of a tiled loss."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: TiledLoss
    ) -> Tensor:
        # The original types: gradients are returned in these, whatever autocast computes in.
        gradients = _Gradients(x, weight, bias, ctx.needs_input_grad[:3])
        x = settings.cast(x)
        weight = settings.cast(weight)
        bias = None if bias is None else settings.cast(bias)
        size = -(-len(x) // settings.chunks)
        total: Tensor | None = None
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            with _no_autocast(settings, x):
                logits = F.linear(x[rows], weight, bias)
            loss, backward = settings.with_backward(logits, target[rows])
            # Sums of many parts in half precision would lose the small ones.
            part = loss.float()
            total = part if total is None else total.add_(part)
            gradient = backward()
            dtype = loss.dtype
            del loss, logits, part, backward
            with _no_autocast(settings, x):
                gradients.add(gradient, x[rows], weight, rows)
            del gradient
        assert total is not None
        ctx.gradients, ctx.settings, ctx.denominator = gradients, settings, settings.denominator(target)
        return (total if ctx.denominator is None else total / ctx.denominator).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise ApplyError(
                "backward ran twice through a loss over tiled logits, whose gradients exist only once.",
                fix="split: {kind: none}, or call the loss function again",
                code="MT331",
            )
        ctx.settings.on_gradient()
        # Forward summed the parts' losses. The mean's denominator is applied here, so that gradients in half
        # precision are of order one for any number of tokens.
        scale = gradient if ctx.denominator is None else gradient.float() / ctx.denominator
        gradients, ctx.gradients, ctx.denominator = ctx.gradients, None, None
        return (*gradients.scaled(scale), None, None)


class _Gradients:
    """Gradients of the summed loss for hidden states, weight and bias, as far as needed."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]) -> None:
        self._x = torch.empty_like(x) if wanted[0] else None  # (N, D)
        self._weight_dtype = weight.dtype if wanted[1] else None
        self._bias_dtype = bias.dtype if bias is not None and wanted[2] else None
        self._weight: Tensor | None = None  # (V, D)
        self._bias: Tensor | None = None  # (V,)

    def add(self, gradient: Tensor, x: Tensor, weight: Tensor, rows: slice) -> None:
        """Add the parts' contributions of `gradient` of the logits of `rows`."""
        if self._x is not None:
            out = self._x[rows]
            if out.dtype == gradient.dtype:
                # Straight into its rows: no second tensor of the size of the part.
                torch.mm(gradient, weight, out=out)
            else:
                out.copy_(gradient @ weight)
        if self._weight_dtype is not None:
            if self._weight is None:
                self._weight = (gradient.t() @ x).to(self._weight_dtype)
            elif self._weight.dtype == gradient.dtype:
                self._weight.addmm_(gradient.t(), x)
            else:
                self._weight.add_(gradient.t() @ x)
        if self._bias_dtype is not None:
            part = gradient.sum(0)
            self._bias = part.to(self._bias_dtype) if self._bias is None else self._bias.add_(part)

    def scaled(self, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return all of them times `scale`, in place, and drop them: autograd may adopt the tensors."""
        found = (self._x, self._weight, self._bias)
        self._x = self._weight = self._bias = None
        return tuple(None if each is None else each.mul_(scale) for each in found)


def _no_autocast(settings: TiledLoss, x: Tensor) -> Any:
    return nullcontext() if settings.dtype is None else torch.autocast(x.device.type, enabled=False)
