"""Linear layers whose weight comes in row by row: no more than two tiles of it, and of its gradient, are on the device at once.

Memory-centric tiling (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3). Four rules, which the pass `passes.tiled_weights`
follows op by op:

Rule 1. A tile is some rows of the weight (output features). Forward brings tile after tile, the next one while the current one
        computes its columns of the output, and saves the input alone.
Rule 2. Backward brings them again, adds each tile's part to the input's gradient and makes the tile's rows of the weight's, which
        start down at once, into one gradient on the host. The bias has its gradient before the last tile's starts.
Rule 3. One tile's gradient is on its way at a time; the last one is on its way as any other gradient is (Rule 4 of
        `runtime.store`).
Rule 4. The weight is saved, loaded and updated as its block's other parameters are: whole, on the host or on SSD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.runtime import transfer
from memtune.runtime.context import Context
from memtune.tiles import split_rows


class TileStore(Protocol):
    """Where tiled weights are while they are not used, and where their gradients go."""

    def host_of(self, weight: nn.Parameter) -> Tensor:
        """The weight in host memory."""

    def tile_landed(self, weight: nn.Parameter, rows: slice, gradient: Tensor) -> None:
        """Some rows of its gradient are there; those of a backward come in order."""


def linear_layers(context: Context, weights: Iterable[str]) -> dict[nn.Parameter, nn.Linear]:
    """The layers whose weights have these names.

    Raises:
        ApplyError: One is no plain `nn.Linear`, or the model has no such weight.
    """
    found: dict[nn.Parameter, nn.Linear] = {}
    for name in weights:
        owner, _, own = name.rpartition(".")
        module = dict(context.model.named_modules()).get(owner)
        if type(module) is not nn.Linear or own != "weight" or "forward" in vars(module):
            raise ApplyError(
                f"{name} is not the weight of a plain nn.Linear, so it cannot come in tiles.",
                evidence="The model has no such layer." if module is None else f"It is in a {type(module).__name__}.",
                fix="tiles: 1  for offload.states", code="MT364",
            )  # fmt: skip
        found[next(module.parameters())] = module
    return found


def install(context: Context, layers: Mapping[nn.Parameter, nn.Linear], tiles: int, store: TileStore) -> None:
    """Let these layers run tile by tile (Rules 1 and 2)."""
    for weight, module in layers.items():
        vars(module)["forward"] = partial(_forward, module, weight, tiles, store)
        context.undo.callback(vars(module).pop, "forward", None)


def _forward(module: nn.Linear, weight: nn.Parameter, tiles: int, store: TileStore, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        raise ApplyError(
            "A weight that comes in tiles is used under autocast.",
            evidence="It would be cast whole; the step that the plan was made for casts none.",
            fix="tiles: 1  for offload.states, or a plan made under autocast", code="MT364",
        )  # fmt: skip
    kept: list[Any] = []
    x = _Kept.apply(x, kept)  # type: ignore[no-untyped-call]
    out: Tensor = _Tiled.apply(x, weight, module.bias, tiles, store, kept)  # type: ignore[no-untyped-call]
    return out


def _brought(weight: nn.Parameter, host: Tensor, tiles: int) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
    """Rows and what hands them over, which is asked once; the next ones are on their way by then."""
    rows = split_rows(len(weight), tiles)
    there = [_bring(weight, host, rows[0])]  # what is handed over is in no variable here, so that it is let go when it was used
    for i, mine in enumerate(rows):
        transfer.caught_up(weight.device)
        if i + 1 < len(rows):
            with transfer.ahead(weight.device):
                there.append(_bring(weight, host, rows[i + 1]))
        yield mine, partial(there.pop, 0)


def _rows(weight: nn.Parameter, tiles: int) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
    """As `_brought`, where nobody asks for them."""
    return ((rows, weight.detach) for rows in split_rows(len(weight), tiles))


def _bring(weight: nn.Parameter, host: Tensor, rows: slice) -> Tensor:
    there = torch.empty((rows.stop - rows.start, *weight.shape[1:]), dtype=weight.dtype, device=weight.device)
    torch.ops.memtune.copy_to_device_(there, host[rows])
    return there


class _Kept(torch.autograd.Function):
    """Saves the input before the first tile comes, as a product of matrices does.

    So a block that runs again for what it saved stops there, and does not run the layer once more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Tiled(torch.autograd.Function):
    """Legend: M = tokens, K = input features, N = output features."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, tiles: int, store: TileStore, kept: list[Any]
    ) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (M, K)
        out = x.new_empty(len(tokens), len(weight))  # (M, N)
        for rows, take in _brought(weight, store.host_of(weight), tiles):
            if bias is None:
                torch.mm(tokens, take().t(), out=out[:, rows])
            else:
                torch.addmm(bias[rows], tokens, take().t(), out=out[:, rows])
        if not x.requires_grad:
            ctx.save_for_backward(x)
        ctx.kept = kept if x.requires_grad else [ctx]
        ctx.weight, ctx.has_bias, ctx.tiles, ctx.store = weight, bias is not None, tiles, store
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), weight = ctx.kept, ctx.weight
        (x,) = kept.saved_tensors
        kept.maybe_clear_saved_tensors()  # not if the graph is kept; else its node would have them until its turn
        tokens, given = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = tokens.new_empty(tokens.shape) if ctx.needs_input_grad[0] else None
        for rows, take in (
            _brought(weight, ctx.store.host_of(weight), ctx.tiles) if of_x is not None else _rows(weight, ctx.tiles)
        ):
            if of_x is not None and rows.start == 0:
                torch.mm(given[:, rows], take(), out=of_x)
            elif of_x is not None:
                torch.addmm(of_x, given[:, rows], take(), out=of_x)
            of_tile = given[:, rows].t() @ tokens
            if rows.stop < len(weight):
                ctx.store.tile_landed(weight, rows, of_tile)
        of_bias = given.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        ctx.store.tile_landed(weight, rows, of_tile)
        return None if of_x is None else of_x.view_as(x), None, of_bias, None, None, None
