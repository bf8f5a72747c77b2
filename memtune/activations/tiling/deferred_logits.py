"""Logits without memory: a head returns them, and the cross-entropy computes them part by part.

`Logits` records the ops that a loss applies to them: views that keep the classes, casts, elementwise ops.
`F.cross_entropy` then computes them part by part (`activations.tiling.tiled_loss`), so they never exist in
full.

Any other function reads the *plain* logits, which are computed once by the model's own ops. From then on the
loss reads them too, because it must see in-place writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memtune.activations.tiling.tiled_loss import Step, TiledLoss
from memtune.device import TENSOR_FLAGS
from memtune.errors import ApplyError
from memtune.runtime import Context, ForwardWrapper

Hook = Callable[[Tensor], Tensor | None]


@dataclass
class Count:
    """Counters of one head's logits, for the audit."""

    tiled: int = 0
    whole: int = 0
    read_by: str = ""
    """The function that last read the plain logits."""
    unseen: int = 0
    """Number of calls of a module without a product with the head's weight."""


@dataclass(eq=False)
class _Call:
    """One call of a head."""

    x: Tensor  # (…, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    dtype: torch.dtype | None
    """Autocast's dtype, None if it is off."""
    chunks: int
    count: Count
    plain: Tensor | None = None
    hooks: list[Hook] = field(default_factory=list)

    def plain_logits(self, reader: str) -> Tensor:
        """Return the plain logits, which are computed at first use."""
        if self.plain is None:
            self.count.whole, self.count.read_by = self.count.whole + 1, reader
            with (
                torch.enable_grad(),
                torch.autocast(self.x.device.type, dtype=self.dtype, enabled=self.dtype is not None),
            ):
                self.plain = F.linear(self.x, self.weight, self.bias)
            for hook in self.hooks:
                # Hooks that were registered on the logits before anyone read them.
                self.plain.register_hook(hook)
        return self.plain


def _call_hooks(hooks: list[Hook], shape: tuple[int, ...]) -> None:
    """Call the hooks when backward reaches the gradient of the logits, of that shape."""
    # They may wait for the gradient, as FSDP2's do, but not read it: it never exists in full.
    for hook in hooks:
        # FSDP2 hooks gradients only to know when backward has reached them.
        unreadable: Tensor = Tensor._make_wrapper_subclass(_Unreadable, shape)
        found = hook(unreadable)
        if found is not None and found is not unreadable:
            raise _hooked()


def lazy_logits(x: Tensor, weight: Tensor, bias: Tensor | None, *, chunks: int, count: Count) -> Tensor:
    """Return `F.linear(x, weight, bias)` as `Logits`, computed when read; losses run in `chunks`.

    Args:
        x: Hidden states (…, D).
        weight: Weight of the head (V, D).
        bias: Bias of the head (V,).
        chunks: Number of parts of a loss over them.
        count: Counters of tiled and plain reads.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    call = _Call(x, weight, bias, dtype, chunks, count)
    return _make_logits(call, x, dtype or x.dtype)


def _make_logits(call: _Call, rows: Tensor, dtype: torch.dtype, **more: Any) -> Logits:
    made: Logits = _Unread.apply(rows, call.weight, (*rows.shape[:-1], len(call.weight)), dtype)  # type: ignore[no-untyped-call]
    made.call, made.rows = call, rows
    for name, value in more.items():
        setattr(made, name, value)
    return made


class Logits(Tensor):
    """Logits of a head without memory. Legend: D = hidden width, V = classes."""

    call: _Call
    rows: Tensor
    """Hidden states (…, D) of the rows of this view."""
    steps: tuple[Step, ...] = ()
    """Elementwise ops applied so far."""
    source: tuple[Logits, Step] | None = None
    """The logits and op that this is the result of, for plain values; None for the head's own output."""
    classes_second: bool = False
    """Rows are (B, T, D) and this has shape (B, V, T)."""
    _plain: Tensor | None = None

    def plain(self, reader: str) -> Tensor:
        """Return the values, computed by the model's own ops."""
        if self.source is None:
            return self.call.plain_logits(reader)
        if self._plain is None:
            before, step = self.source
            with torch.enable_grad():
                self._plain = step(before.plain(reader))
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer metadata, record known ops, tile the loss; all other functions read the plain logits."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # Attributes are descriptors: the property object names the attribute.
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # Once the plain logits exist, everything reads them, or in-place writes would be lost.
        unread = bool(args) and isinstance(args[0], Logits) and args[0].call.plain is None
        if unread and func is Tensor.register_hook:
            return _Handle(args[0].call.hooks, *args[1:], *kwargs.values())
        if unread and func is F.cross_entropy:
            found = _tiled(*args, **kwargs)
            if found is not None:
                return found
        if unread and torch.is_grad_enabled():
            recorded = _recorded(args[0], func, name, args[1:], kwargs)
            if recorded is not None:
                return recorded
        # Anything else computes with plain logits, as in the user's model.
        args, kwargs = tree_map(
            lambda each: each.plain(name) if isinstance(each, Logits) else each, (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse ops below torch's functions, such as those of a user's autograd function."""
        raise ApplyError(
            f"{func} reads tiled logits below torch's functions, where they have no memory.",
            evidence="A compiled loss or a user's autograd function may do that.",
            fix="split: {kind: none}, or F.cross_entropy in the loss",
            code="MT332",
        )


class _Unreadable(Tensor):
    """Gradient of logits that were never computed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _hooked()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _hooked()


def _hooked() -> ApplyError:
    return ApplyError(
        "a hook reads or changes the gradient of tiled logits, which never exists in full.",
        fix="split: {kind: none}",
        code="MT333",
    )


class _Unread(torch.autograd.Function):
    """Autograd function that makes a `Logits` that requires a gradient.

    The loss returns its gradients for the hidden states and the weight directly, so none may arrive here.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=rows.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise _hooked()


class _Handle:
    """Handle of a hook, as `register_hook` returns it."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook
        hooks.append(hook)

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


_METADATA = TENSOR_FLAGS | {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_meta",
    "is_sparse",
    "is_mkldnn",
    "is_quantized",
    "is_nested",
    "size",
    "dim",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "element_size",
    "itemsize",
    "ndimension",
    "__len__",
    "__hash__",
    "is_contiguous",
    "stride",
    "is_leaf",
    "names",
    "get_device",
    "_base",
    "_is_view",
}
_CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16, "double": torch.float64}
_BY_NUMBER = {
    "mul",
    "__mul__",
    "__rmul__",
    "div",
    "true_divide",
    "__truediv__",
    "multiply",
    "divide",
    "add",
    "__add__",
    "sub",
    "__sub__",
}
# Reading the signature costs as much as ten small ops, binding arguments to it as much as three.
_DEFAULTS: Final = {
    name: each.default for name, each in inspect.signature(F.cross_entropy).parameters.items()
}
_ALONE = {"tanh", "sigmoid", "neg", "__neg__", "contiguous"}


def _recorded(
    logits: Logits, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Logits | None:
    """Return `func(logits, *args)` as recorded; None for an unknown function."""
    # Only the loss may follow: all views below keep the classes in the last dim.
    if logits.classes_second:
        return None
    # Repeats the call on plain logits, if code reads them after all.
    again: Step = lambda each: func(each, *args, **kwargs)  # noqa: E731
    call, rows, steps = logits.call, logits.rows, logits.steps
    dtype = _CASTS.get(name) if not args else args[0] if name == "to" and len(args) == 1 else None
    if name == "contiguous" and not args and not kwargs:
        return _make_logits(call, rows.contiguous(), logits.dtype, steps=steps, source=(logits, again))
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and not kwargs:
        return _make_logits(call, rows, dtype, steps=(*steps, again), source=(logits, again))
    # Ops with a number commute with a choice of rows; another tensor would have to be cut as well.
    numbers = len(args) == 1 and isinstance(args[0], int | float)
    if not kwargs and ((name in _BY_NUMBER and numbers) or (name in _ALONE and not args)):
        return _make_logits(call, rows, logits.dtype, steps=(*steps, again), source=(logits, again))
    viewed = _viewed(logits, name, args, kwargs)
    if viewed is not None:
        return _make_logits(call, viewed, logits.dtype, steps=steps, source=(logits, again))
    if _swaps_classes(logits, name, args) and not kwargs:
        found: Logits = _Unread.apply(
            rows, call.weight, (rows.shape[0], len(call.weight), rows.shape[1]), logits.dtype
        )  # type: ignore[no-untyped-call]
        found.call = call
        found.rows = rows
        found.steps = steps
        found.source = (logits, again)
        found.classes_second = True
        return found
    return None


def _viewed(logits: Logits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the hidden states of a view of `logits` that keeps the classes, None for other views."""
    if kwargs:
        return None
    rows, classes = logits.rows, logits.shape[-1]
    if name in ("view", "reshape"):
        shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list | torch.Size) else args
        if not all(isinstance(each, int) for each in shape) or not shape or shape[-1] not in (classes, -1):
            return None
        # -1 means the classes only if the sizes before it multiply to the number of rows.
        if shape[-1] == -1 and (-1 in shape[:-1] or rows.numel() // rows.shape[-1] != _product(shape[:-1])):
            return None
        return rows.reshape(*shape[:-1], rows.shape[-1])
    if name == "flatten" and len(args) == 2 and 0 <= args[0] <= args[1] < rows.dim() - 1:
        return rows.flatten(*args)
    if name == "flatten" and len(args) == 2 and args[0] >= 0 and -rows.dim() <= args[1] <= -2:
        return rows.flatten(*args)
    # Slices and numbers choose rows as long as the classes, the last dim, stay whole.
    if name == "__getitem__":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        plain = all(isinstance(each, slice | int) or each is Ellipsis for each in index)
        reaches = Ellipsis in index or len(index) == rows.dim()
        if plain and (not reaches or index[-1] == slice(None)):
            return rows[args[0]]
    return None


def _product(sizes: tuple[int, ...]) -> int:
    found = 1
    for each in sizes:
        found *= each
    return found


def _swaps_classes(logits: Logits, name: str, args: tuple[Any, ...]) -> bool:
    if logits.dim() != 3:
        return False
    if name in ("transpose", "swapaxes"):
        return len(args) == 2 and {each % 3 for each in args if isinstance(each, int)} == {1, 2}
    return name == "permute" and args in ((0, 2, 1), ((0, 2, 1),), ([0, 2, 1],))


def _tiled(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return `F.cross_entropy(*args, **kwargs)` over parts of the rows; None if the result might differ."""
    # Callers pass arguments by position or by name.
    asked = {**_DEFAULTS, **dict(zip(_DEFAULTS, args, strict=False)), **kwargs}
    logits, target, class_weight = asked["input"], asked["target"], asked["weight"]
    others = [each for each in (target, class_weight) if each is not None]
    # A target that requires a gradient needs the whole logits' backward.
    if any(not isinstance(each, Tensor) or isinstance(each, Logits) or each.requires_grad for each in others):
        return None
    if (
        # Deprecated arguments override `reduction`; `none` has a gradient of its own for each row.
        asked["size_average"] is not None
        or asked["reduce"] is not None
        or asked["reduction"] not in ("mean", "sum")
    ):
        return None
    rows, call = logits.rows, logits.call
    ranks = {2: not logits.classes_second, 3: logits.classes_second}
    if not ranks.get(rows.dim(), False) or (target.shape != rows.shape[:-1] and target.shape != logits.shape):
        return None
    if (
        target.is_floating_point() != (target.shape == logits.shape)
        or not rows.numel()
        or not torch.is_grad_enabled()
    ):
        return None
    if logits.classes_second:
        if target.is_floating_point():
            return None
        # Rows are (B, T, D) in either layout of the logits.
        rows, target = rows.flatten(0, 1), target.flatten()
    tiled = TiledLoss(
        chunks=call.chunks,
        steps=logits.steps,
        dtype=call.dtype,
        mean=asked["reduction"] == "mean",
        class_weight=class_weight,
        ignore_index=asked["ignore_index"],
        label_smoothing=asked["label_smoothing"],
        # Not a method of `call`, which would hold x until backward.
        on_gradient=partial(_call_hooks, call.hooks, (*call.x.shape[:-1], len(call.weight))),
    )
    call.count.tiled += 1
    return tiled(rows, call.weight, call.bias, target)


def install_lazy_head(context: Context, name: str | None, *, chunks: int, weight: str | None = None) -> None:
    """Make the head `name` of the model in `context` return `Logits`; the audit reports how they were read.

    Args:
        context: Context with the model.
        name: Name of the module that computes the logits, '' for the model itself; None: the widest linear
            layer outside of the blocks.
        chunks: Number of parts of a loss over its logits.
        weight: Name of the parameter in the product; required if the module is no `nn.Linear`.

    Raises:
        ApplyError: There is no such module, or it is no linear layer and `weight` is missing or unknown.
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
    head.forward = ForwardWrapper(forward, head.forward)
    context.checks["split"] = lambda: _check(name, head, count)


def _weight(context: Context, name: str, head: nn.Module, weight: str | None) -> Callable[[], Tensor]:
    """Return a function that looks up the parameter `weight` at each call, because sharding replaces it."""
    if weight is None:
        raise _no_head(f"{name or 'the model'} is a {type(head).__name__}")
    try:
        context.model.get_parameter(weight)
    except AttributeError as error:
        raise _no_head(f"the model has no parameter {weight}") from error
    # FSDP2 registers another tensor for compute than between uses.
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
    # A vocabulary is wider than other projections.
    return str(max(heads)[1])


def _no_head(evidence: str) -> ApplyError:
    return ApplyError(
        "tiled logits need an nn.Linear as head.",
        evidence=f"{evidence[0].upper()}{evidence[1:]}.",
        fix="memtune search  writes the head into the config; or split: {kind: none}",
        code="MT334",
    )


def _check(name: str, head: nn.Module, count: Count) -> dict[str, Any]:
    """Return facts for the audit; raise if logits were not computed in parts."""
    name = name or "the model"
    if "forward" not in vars(head):
        raise ApplyError(f"the logits of {name} should be tiled, but its forward was replaced.", code="MT335")
    if count.unseen and not count.tiled and not count.whole:
        raise ApplyError(
            f"{name} should return tiled logits, but its forward has no known product with its weight.",
            evidence="F.linear(x, weight, bias) and x @ weight.t() are known.",
            fix="use one of these in its forward, or split: {kind: none}",
            code="MT335",
        )
    if count.whole and not count.tiled:
        raise ApplyError(
            f"the logits of {name} are always read in full, so tiling saves no memory.",
            evidence=f"Read by {count.read_by}.",
            fix=(
                "call F.cross_entropy on the logits, with views, casts and elementwise ops in between; or"
                " split: {kind: none}"
            ),
            code="MT335",
        )
    return {"head": name, "losses_in_parts": count.tiled, "read_whole": count.whole}


def lazy_head(head: nn.Linear, *, chunks: int, count: Count) -> Callable[[Tensor], Tensor]:
    """Return a forward for `head` that returns `Logits` while gradients are on."""
    original = head.forward

    def forward(input: Tensor) -> Tensor:
        # Without a backward nothing is saved, so plain logits are freed after the loss.
        wanted = input.requires_grad or head.weight.requires_grad
        if (
            not torch.is_grad_enabled()
            or not wanted
            or isinstance(input, Logits)
            or not input.is_floating_point()
        ):
            return original(input)
        return lazy_logits(input, head.weight, head.bias, chunks=chunks, count=count)

    return forward


def lazy_product(
    module: nn.Module, weight: Callable[[], Tensor], *, chunks: int, count: Count
) -> Callable[..., Any]:
    """Return a forward of `module` whose product with `weight` is `Logits`; plain without gradients."""
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
    """Mode that makes `F.linear(x, weight, bias)` and `x @ weight.t()` of one weight return `Logits`."""

    def __init__(self, weight: Tensor, chunks: int, count: Count) -> None:
        super().__init__()
        self._weight, self._chunks, self._count = weight, chunks, count
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run all other functions unchanged."""
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
        """Return hidden states, weight and bias of a product with the weight; None for any other."""
        plain = not isinstance(input, Logits) and input.is_floating_point()
        if func is F.linear:
            other, bias = named.pop("weight", other), named.pop("bias", bias)
            return (input, self._weight, bias) if plain and other is self._weight else None
        transposed = (
            isinstance(other, Tensor)
            # `weight.t()` and `weight.T` are views of the parameter itself.
            and other._base is self._weight
            and other.shape == self._weight.shape[::-1]
        )
        return (
            (input, self._weight, None)
            if plain and transposed and other.stride() == self._weight.t().stride()
            else None
        )


_MATMULS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
