"""A head whose logits are computed where they are read: finds it, changes its forward, and tells what became of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.logits import Count, Logits, lazy_logits
from memtune.runtime.replaced_forward import StandsAround


def install_lazy_head(context: Context, name: str | None, *, chunks: int, weight: str | None = None) -> None:
    """Make the head `name` of the model in `context` return `Logits`; the audit tells what became of them.

    Args:
        context: Whose model is changed.
        name: Of the module that makes the logits, '' the model itself; None finds the widest linear layer outside of the blocks.
        chunks: Into how many parts a loss over its logits is cut.
        weight: Name of the parameter that the logits are a product with; needed where the module is no `nn.Linear`.

    Raises:
        ApplyError: There is no such module, or it is no linear layer and `weight` is not given or not there.
    """
    name = _widest(context) if name is None else name
    try:
        head = context.model.get_submodule(name)
    except AttributeError as error:
        raise _no_head(f"the model has no module {name}") from error
    count = Count()
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        forward = lazy_head(head, chunks=chunks, count=count)
    else:
        forward = lazy_product(head, _weight(context, name, head, weight), chunks=chunks, count=count)
    head.forward = StandsAround(forward, head.forward)
    context.checks["split"] = lambda: _check(name, head, count)


def _weight(context: Context, name: str, head: nn.Module, weight: str | None) -> Callable[[], Tensor]:
    """What finds the parameter `weight`; sharding puts others in its place, so it is looked up at each call."""
    if weight is None:
        raise _no_head(f"{name or 'the model'} is a {type(head).__name__}")
    try:
        context.model.get_parameter(weight)
    except AttributeError as error:
        raise _no_head(f"the model has no parameter {weight}") from error
    return partial(context.model.get_parameter, weight)


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


def _check(name: str, head: nn.Module, count: Count) -> dict[str, Any]:
    name = name or "the model"
    if "forward" not in vars(head):
        raise ApplyError(f"the logits of {name} should be tiled, but its forward is its own.", code="MT335")
    if count.unseen and not count.tiled and not count.whole:
        raise ApplyError(
            f"{name} should make tiled logits, but no product with its weight was seen.",
            evidence="F.linear(x, weight, bias) and x @ weight.t() are known.",
            fix="one of these in its forward, or split: {kind: none}",
            code="MT335",
        )
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


def lazy_product(module: nn.Module, weight: Callable[[], Tensor], *, chunks: int, count: Count) -> Callable[..., Any]:
    """A forward for `module` in which a product with `weight` makes `Logits` while gradients are on."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        products = _Products(weight(), chunks, count)
        with products:
            out = original(*args, **kwargs)
        count.unseen += not products.seen
        return out

    return forward


class _Products(TorchFunctionMode):
    """Inside, `F.linear(x, weight, bias)` and `x @ weight.t()` of one weight make `Logits`."""

    def __init__(self, weight: Tensor, chunks: int, count: Count) -> None:
        super().__init__()
        self._weight, self._chunks, self._count = weight, chunks, count
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """All other functions run as they are."""
        kwargs = kwargs or {}
        if func is F.linear or func in _MATMULS:
            found = self._operands(func, *args, **kwargs)
            if found is not None and torch.is_grad_enabled():
                self.seen = True
                return lazy_logits(*found, chunks=self._chunks, count=self._count)
        return func(*args, **kwargs)

    def _operands(
        self, func: Any, input: Tensor, other: Any = None, bias: Tensor | None = None, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Hidden states, weight and bias of a product with the weight; None for any other."""
        plain = not isinstance(input, Logits) and input.is_floating_point()
        if func is F.linear:
            other, bias = named.pop("weight", other), named.pop("bias", bias)
            return (input, self._weight, bias) if plain and other is self._weight else None
        turned = isinstance(other, Tensor) and other._base is self._weight and other.shape == self._weight.shape[::-1]
        return (input, self._weight, None) if plain and turned and other.stride() == self._weight.t().stride() else None


_MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
