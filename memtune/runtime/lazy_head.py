"""A head whose logits are computed where they are read: finds it, changes its forward, and tells what became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.logits import Count, Logits, lazy_logits


def install_lazy_head(context: Context, name: str | None, *, chunks: int) -> None:
    """Make the head `name` of the model in `context` return `Logits`; the audit tells what became of them.

    Args:
        context: Whose model is changed.
        name: Of the head's module; None finds it: the widest linear layer outside of the blocks.
        chunks: Into how many parts a loss over its logits is cut.

    Raises:
        ApplyError: There is no such linear layer.
    """
    name = _widest(context) if name is None else name
    try:
        head = context.model.get_submodule(name)
    except AttributeError as error:
        raise _no_head(f"the model has no module {name}") from error
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise _no_head(f"{name} is a {type(head).__name__}")
    count = Count()
    head.forward = lazy_head(head, chunks=chunks, count=count)  # type: ignore[assignment, method-assign]
    context.checks["split"] = lambda: _check(name, head, count)


def _widest(context: Context) -> str:
    inside = tuple(f"{block}." for block in context.blocks)
    heads = [
        (module.out_features, name)
        for name, module in context.model.named_modules()
        if isinstance(module, nn.Linear) and not f"{name}.".startswith(inside)
    ]
    if not heads:
        raise _no_head("the model has no linear layer outside of its blocks")
    return str(max(heads)[1])


def _no_head(evidence: str) -> ApplyError:
    return ApplyError(
        "tiled logits need an nn.Linear as head.",
        evidence=f"{evidence[0].upper()}{evidence[1:]}.",
        fix="memtune search  writes the head into the config; or split: {kind: none}",
        code="MT334",
    )


def _check(name: str, head: nn.Linear, count: Count) -> dict[str, Any]:
    if "forward" not in vars(head):
        raise ApplyError(f"the logits of {name} should be tiled, but its forward is its own.", code="MT335")
    if count.whole and not count.tiled:
        raise ApplyError(
            f"the logits of {name} are always read whole, so nothing is saved.",
            evidence=f"Read by {count.read_by}.",
            fix="F.cross_entropy on the logits, with views, casts and element-wise ops in between; or split: {kind: none}",
            code="MT335",
        )
    return {"head": name, "losses_in_parts": count.tiled, "read_whole": count.whole}


def lazy_head(head: nn.Linear, *, chunks: int, count: Count) -> Callable[[Tensor], Tensor]:
    """A forward for `head` that returns `Logits` while gradients are on, and what it always did otherwise."""
    original = head.forward

    def forward(input: Tensor) -> Tensor:
        wanted = input.requires_grad or head.weight.requires_grad
        if not torch.is_grad_enabled() or not wanted or isinstance(input, Logits) or not input.is_floating_point():
            return original(input)
        return lazy_logits(input, head.weight, head.bias, chunks=chunks, count=count)

    return forward
