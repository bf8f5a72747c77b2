"""Token-wise modules over parts of the tokens: inner tensors exist one part at a time.

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
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from memtune.errors import ApplyError
from memtune.runtime import Context


@dataclass
class _TilingSettings:
    """Settings of one module. Legend: N = tokens, D = width of the input, E = width of the output."""

    name: str
    forward: Callable[[Tensor], Tensor]
    chunks: int
    again: bool
    """Parts run again in backward; False: they keep their graphs."""
    runs: int = 0
    looked: bool = False
    anchor: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    """Any tensor that requires a gradient, which it never gets."""

    def part(self, rows: Tensor, dims: int) -> Tensor:
        """Return the module's output (n, E) for rows (n, D), called with its number of dims."""
        out = self.forward(rows[(None,) * (dims - 2)])
        return out.reshape(-1, out.shape[-1])

    def check_position_wise(self, x: Tensor) -> None:
        """Check that the module does not mix the tokens of `x` (…, D): call it with two tokens together and
        separately.

        Fake tensors have no values to check.
        """
        self.looked = True
        if isinstance(x, FakeTensor):
            return
        # Outside all modes: these ops are not the model's, and must not be counted or replaced.
        with torch.no_grad(), _disable_current_modes():
            # Two tokens suffice: a module that mixes tokens differs for two of them already.
            two = x.detach().reshape(-1, x.shape[-1])[:2]
            together, apart = (
                self.part(two, x.dim()),
                torch.cat([self.part(each[None], x.dim()) for each in two]),
            )
        if not torch.allclose(
            together.float(), apart.float(), rtol=0.05, atol=0.01 * float(apart.abs().max()), equal_nan=True
        ):
            raise ApplyError(
                f"{self.name} does not treat tokens independently, so it cannot run over parts of them.",
                evidence="Its output for two tokens together differs from that for each token alone.",
                fix="split: {kind: none}, or mlp: 1 and norm: 1",
                code="MT335",
            )


def install_tiled_modules(
    context: Context, chunks: Mapping[str, int], *, check: str, again: bool = True
) -> None:
    """Make modules of the model in `context` run over parts of their tokens; the audit checks that they did.

    Args:
        context: Context with the model.
        chunks: Name → number of parts of the tokens, of modules that treat tokens independently and are
            called with one tensor (…, D).
        check: Name of the check in the audit.
        again: Parts run again in backward; False: they keep their graphs, and the claims of their blocks may
            offload what these save.

    Raises:
        ApplyError: The model has no such module.
    """
    installed: list[tuple[str, nn.Module, _TilingSettings]] = []
    for name, parts in chunks.items():
        try:
            module = context.model.get_submodule(name)
        except AttributeError as error:
            raise ApplyError(
                f"the plan splits {name}, which the model does not have.",
                fix="memtune search  makes a plan for this model; or split: {kind: none}",
                code="MT335",
            ) from error
        settings = _TilingSettings(name, module.forward, parts, again)
        module.forward = partial(_forward, module, settings)
        installed.append((name, module, settings))
    context.checks[check] = lambda: _check(installed)


def _check(installed: list[tuple[str, nn.Module, _TilingSettings]]) -> dict[str, Any]:
    for name, module, _ in installed:
        if "forward" not in vars(module):
            raise ApplyError(
                f"{name} should run over parts of its tokens, but its forward was replaced.", code="MT335"
            )
    return {"modules": len(installed), "runs_in_parts": sum(settings.runs for _, _, settings in installed)}


def _forward(module: nn.Module, settings: _TilingSettings, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if len(args) == 1 and not kwargs else None
    parameters = [each for each in module.parameters() if each.requires_grad]
    # One token cannot be cut, and with further arguments it is unknown which of them have its dim.
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or x.shape[:-1].numel() < 2:
        return settings.forward(*args, **kwargs)
    # Without a graph the inner tensors are freed at once anyway.
    if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
        return settings.forward(*args, **kwargs)
    if not settings.looked:
        settings.check_position_wise(x)
    settings.runs += 1
    in_parts = _Parts if settings.again else _KeptParts
    return in_parts.apply(x, settings, *parameters)  # type: ignore[no-untyped-call]


class _Parts(torch.autograd.Function):
    """Runs a module over parts, and again in backward.

    Forward runs part after part without a graph and saves only the input. Backward runs each part's forward
    again with a graph, and its backward at once, so only the inner tensors of one part exist.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: _TilingSettings, *parameters: Tensor) -> Tensor:
        rows, out = x.reshape(-1, x.shape[-1]), None
        size = -(-len(rows) // settings.chunks)
        for start in range(0, len(rows), size):
            part = settings.part(rows[start : start + size], x.dim())
            if out is None:
                # After the first part: only then the output's width and type are known.
                out = part.new_empty(len(rows), part.shape[-1])
            out[start : start + size].copy_(part)
            del part
        assert out is not None
        ctx.save_for_backward(x)
        ctx.settings, ctx.parameters, ctx.autocast = settings, parameters, _autocast(x.device.type)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), settings = ctx.saved_tensors, ctx.settings
        rows, given = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        dx = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        size = -(-len(rows) // settings.chunks)
        for start in range(0, len(rows), size):
            mine = slice(start, start + size)
            # Backward runs outside of autocast; the second forward needs the first one's setting.
            with torch.enable_grad(), ctx.autocast():
                part = rows[mine].detach().requires_grad_(dx is not None)
                out = settings.part(part, x.dim())
            wanted = [part, *ctx.parameters] if dx is not None else list(ctx.parameters)
            # Not `backward`: parameters' hooks must see one full gradient, not one per part.
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
        rows, out = x.detach().reshape(-1, x.shape[-1]), None
        size = -(-len(rows) // settings.chunks)
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
                out = made.new_empty(len(rows), made.shape[-1])
            out[start : start + size].copy_(made.detach())
            del part, made  # the edges hold the part's graph, which holds what it has saved
        assert out is not None
        ctx.edges, ctx.parameters, ctx.size, ctx.shape, ctx.dtype = edges, parameters, size, x.shape, x.dtype
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given, size = gradient.reshape(-1, gradient.shape[-1]), ctx.size
        dx = given.new_empty(len(given), ctx.shape[-1], dtype=ctx.dtype) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        for number, (entered, left) in reversed(list(enumerate(ctx.edges))):
            mine = slice(number * size, (number + 1) * size)
            wanted = [*ctx.parameters] if dx is None else [entered, *ctx.parameters]
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
