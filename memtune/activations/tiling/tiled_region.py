"""Modules over parts of their tokens or samples: inner tensors exist one part at a time.

Either every part runs again in backward (`_Parts`), or it keeps a graph of its own (`_KeptParts`).

Parameters are arguments and their gradients are returned summed, so hooks on gradients (FSDP2, DDP) see one
full gradient of each, as with the plain module. Only the forward changes; without gradients, or with other
arguments than one tensor, the module runs plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memtune.activations.tiling.tiled_region_pass import Tiling
from memtune.errors import ApplyError
from memtune.runtime import Context, unhooked


@dataclass
class _TilingSettings:
    """Settings of one module. Legend: N = tokens, D = width of the input, E = width of the output."""

    name: str
    forward: Callable[[Tensor], Tensor]
    tiling: Tiling
    call: Callable[[Tensor], Any] = lambda rows: rows
    """Its forward with the other arguments of the last call."""
    formed: tuple[list[Any], Any, int] | None = None
    """The output's other leaves, its structure, and the place of the tensor; None for a tensor."""
    runs: int = 0
    looked: bool = False
    anchor: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    """Any tensor that requires a gradient, which it never gets."""

    def rows(self, x: Tensor) -> Tensor:
        """Return `x` as (N, D), or by sample as it is."""
        return x if self.tiling.by_sample else x.reshape(-1, x.shape[-1])

    def part(self, rows: Tensor, dims: int) -> Tensor:
        """Return the module's output (n, E) for rows (n, D), called with its number of dims; by sample, that
        for (n, …).
        """
        if self.tiling.by_sample:
            return self._one_tensor(self.call(rows))
        out = self._one_tensor(self.call(rows[(None,) * (dims - 2)]))
        return out.reshape(-1, out.shape[-1])

    def _one_tensor(self, out: Any) -> Tensor:
        """Return the tensor of an output such as (tensor, None), whose form `formed` gives back."""
        if isinstance(out, Tensor):
            self.formed = None
            return out
        leaves, form = pytree.tree_flatten(out)
        found = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(found) != 1:
            raise ApplyError(
                f"{self.name} returns {len(found)} tensors, so it cannot run over parts of its input.",
                fix="split: {kind: none}, or offload.activations: {kind: copy_out}",
                code="MT335",
            )
        tensor, leaves[found[0]] = leaves[found[0]], None
        self.formed = leaves, form, found[0]
        return cast("Tensor", tensor)

    def form(self, out: Tensor) -> Any:
        """Return the output in the form of the module's own."""
        if self.formed is None:
            return out
        leaves, form, at = self.formed
        return pytree.tree_unflatten([*leaves[:at], out, *leaves[at + 1 :]], form)

    def whole(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of all rows of `x` in the module's form."""
        return out if self.tiling.by_sample else out.view(*x.shape[:-1], out.shape[-1])

    def check_position_wise(self, x: Tensor) -> None:
        """Check that the module does not mix the rows of `x`: call it with two together and separately.

        Fake tensors have no values to check.
        """
        self.looked = True
        if isinstance(x, FakeTensor):
            return
        # Outside all modes: these ops are not the model's, and must not be counted or replaced.
        with torch.no_grad(), _disable_current_modes():
            # Two suffice: a module that mixes tokens or samples differs for two of them already.
            two = self.rows(x.detach())[:2]
            together = self.part(two, x.dim())
            apart = torch.cat([self.part(each[None], x.dim()) for each in two])
        what = "samples" if self.tiling.by_sample else "tokens"
        if together.shape != apart.shape or not torch.allclose(
            together.float(), apart.float(), rtol=0.05, atol=0.01 * float(apart.abs().max()), equal_nan=True
        ):
            raise ApplyError(
                f"{self.name} does not treat {what} independently, so it cannot run over parts of them.",
                evidence=f"Its output for two {what} together differs from that for each alone.",
                fix="split: {kind: none}, or mlp: 1 and norm: 1",
                code="MT335",
            )


def install_tiled_modules(context: Context, tilings: Mapping[str, Tiling], *, check: str) -> None:
    """Make modules of the model in `context` run over parts; the audit checks that they did.

    Args:
        context: Context with the model.
        tilings: By name of modules that treat tokens (or samples) independently and are called with one
            tensor (…, D).
        check: Name of the check in the audit.

    Raises:
        ApplyError: The model has no such module.
    """
    installed: list[tuple[str, nn.Module, _TilingSettings]] = []
    for name, tiling in tilings.items():
        try:
            module = context.model.get_submodule(name)
        except AttributeError as error:
            raise ApplyError(
                f"the plan splits {name}, which the model does not have.",
                fix="memtune search  makes a plan for this model; or split: {kind: none}",
                code="MT335",
            ) from error
        settings = _TilingSettings(name, module.forward, tiling)
        module.forward = partial(_forward, module, settings)
        installed.append((name, module, settings))
    context.checks[check] = lambda: _check(installed)


def _check(installed: list[tuple[str, nn.Module, _TilingSettings]]) -> dict[str, Any]:
    for name, module, _ in installed:
        if "forward" not in vars(module):
            raise ApplyError(
                f"{name} should run over parts of its input, but its forward was replaced.", code="MT335"
            )
    return {"modules": len(installed), "runs_in_parts": sum(settings.runs for _, _, settings in installed)}


def _forward(module: nn.Module, settings: _TilingSettings, *args: Any, **kwargs: Any) -> Any:
    x, settings.call = _of_one_tensor(settings.forward, args, kwargs)
    # Inputs of the node: else it would require no gradient where only the weights do.
    parameters = [each for each in module.parameters() if each.requires_grad]
    # One row cannot be cut, and of several tensors it is unknown which have its dim.
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or len(settings.rows(x)) < 2:
        return settings.forward(*args, **kwargs)
    # Without a graph the inner tensors are freed at once anyway.
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return settings.forward(*args, **kwargs)
    if not settings.looked:
        settings.check_position_wise(x)
    settings.runs += 1
    in_parts = _Parts if settings.tiling.again else _KeptParts
    return settings.form(in_parts.apply(x, settings, *parameters))  # type: ignore[no-untyped-call]


def _of_one_tensor(
    forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Tensor | None, Callable[[Tensor], Any]]:
    """Return the one tensor among the arguments, given once or several times, and `forward` as a function of
    it, which does not hold it; None for several tensors.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    x = leaves[places[0]] if places else None
    if any(leaves[at] is not x for at in places):
        return None, forward

    def call(rows: Tensor) -> Any:
        given, named = pytree.tree_unflatten([rows if at in places else leaves[at] for at in count], form)
        return forward(*given, **named)

    count = range(len(leaves))
    for at in places:
        leaves[at] = None
    return x, call


class _Parts(torch.autograd.Function):
    """Runs a module over parts, and again in backward.

    Forward runs part after part without a graph and saves only the input. Backward runs each part's forward
    again with a graph, and its backward at once, so only the inner tensors of one part exist.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: _TilingSettings, *parameters: Tensor) -> Tensor:
        rows, out = settings.rows(x), None
        size = -(-len(rows) // settings.tiling.parts)
        for start in range(0, len(rows), size):
            part = settings.part(rows[start : start + size], x.dim())
            if out is None:
                # After the first part: only then the output's width and type are known.
                out = part.new_empty(len(rows), *part.shape[1:])
            out[start : start + size].copy_(part)
            del part
        assert out is not None
        ctx.save_for_backward(x)
        ctx.settings, ctx.parameters, ctx.autocast = settings, parameters, _autocast(x.device.type)
        return settings.whole(out, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), settings = ctx.saved_tensors, ctx.settings
        rows, given = settings.rows(x), settings.rows(gradient)
        dx = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        size = -(-len(rows) // settings.tiling.parts)
        for start in range(0, len(rows), size):
            mine = slice(start, start + size)
            # Backward runs outside of autocast; the second forward needs the first one's setting.
            with torch.enable_grad(), ctx.autocast():
                part = rows[mine].detach().requires_grad_(dx is not None)
                out = settings.part(part, x.dim())
            wanted = [part, *ctx.parameters] if dx is not None else list(ctx.parameters)
            # Not `backward`, nor with hooks: both must see one full gradient, not one per part.
            with unhooked(ctx.parameters):
                got = list(torch.autograd.grad(out, wanted, given[mine], allow_unused=True))
            del out
            if dx is not None:
                dx[mine].copy_(got.pop(0))
            _add_to(sums, got)
            del got, part
        return (None if dx is None else dx.view_as(x), None, *sums)


def _add_to(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add one part's gradients of the parameters to `sums`, in place; a part may use only some of them."""
    for i, each in enumerate(found):
        so_far = sums[i]
        if each is not None:
            sums[i] = each if so_far is None else so_far.add_(each)


class _KeptParts(torch.autograd.Function):
    """Runs a module over parts that each keep a graph: micro-tensors (Nie et al. 2022, TSPLIT, ICDE).

    Instead of one storage per saved tensor there is one per tensor and part, which is offloaded, reloaded and
    freed separately: while part i computes, part i - 1 is being copied to the host. Backward runs the graphs
    in reverse, so that no op runs twice and the tensors offloaded last are reloaded first. Saved tensors pass
    through the hooks of the surrounding block, where the activation table keeps or offloads them
    (`activations.recompute.activation_table`). The graphs hold neither the rows nor the outputs. Backward
    frees the parts' graphs, so a second one (`retain_graph`) fails as torch's does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: _TilingSettings, *parameters: Tensor) -> Tensor:
        rows, out = settings.rows(x.detach()), None
        size = -(-len(rows) // settings.tiling.parts)
        edges: list[tuple[GradientEdge | None, GradientEdge]] = []
        for start in range(0, len(rows), size):
            with torch.enable_grad():
                part, entered = rows[start : start + size], None
                if x.requires_grad:
                    # The rows are detached, so only the anchor makes this node require a gradient.
                    part = _Entered.apply(part, settings.anchor)  # type: ignore[no-untyped-call]
                    entered = get_gradient_edge(part)
                made = settings.part(part, x.dim())
                edges.append((entered, get_gradient_edge(made)))
            if out is None:
                out = made.new_empty(len(rows), *made.shape[1:])
            out[start : start + size].copy_(made.detach())
            del part, made  # the edges hold the part's graph, which holds what it has saved
        assert out is not None
        ctx.edges, ctx.parameters, ctx.size, ctx.settings = edges, parameters, size, settings
        ctx.shape, ctx.rows_shape, ctx.dtype = x.shape, rows.shape, x.dtype
        return settings.whole(out, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, size = ctx.settings.rows(gradient), ctx.size
        dx = given.new_empty(ctx.rows_shape, dtype=ctx.dtype) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        # Last part first, as its tensors were offloaded last and are reloaded first.
        for number, (entered, left) in reversed(list(enumerate(ctx.edges))):
            mine = slice(number * size, (number + 1) * size)
            wanted = [*ctx.parameters] if dx is None else [entered, *ctx.parameters]
            with unhooked(ctx.parameters):
                got = list(torch.autograd.grad(left, wanted, given[mine], allow_unused=True))
            if dx is not None:
                dx[mine].copy_(got.pop(0))
            _add_to(sums, got)
            del got  # before the next part's gradients are made
        return (None if dx is None else dx.view(ctx.shape), None, *sums)


class _Entered(torch.autograd.Function):
    """Node at which a part's graph begins: it has a gradient, and unlike a leaf holds no tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context that restores the current autocast state."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)
