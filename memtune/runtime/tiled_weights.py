"""Linear layers whose weight comes in row by row: no more than two tiles of it, and of its gradient, are on the device at once.

Memory-centric tiling (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3). Four rules, which the pass `passes.tiled_weights`
follows op by op:

Rule 1. A tile is some rows of the weight (output features). Forward brings tile after tile, the next one while the current one
        computes its columns of the output, and saves the input alone.
Rule 2. Backward brings them again, adds each tile's part to the input's gradient and makes the tile's rows of the weight's, which
        start down at once, into one gradient on the host. The bias has its gradient before the last tile's starts.
Rule 3. One tile's gradient is on its way at a time; the last one is on its way as any other gradient is (Rule 4 of
        `runtime.store`). Replicas average each tile's before it leaves.
Rule 4. The weight is saved, loaded and updated as its block's other parameters are: whole, on the host or on SSD.

What a tile is of a weight that ranks have divided is in `runtime.tiled_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.runtime import transfer
from memtune.runtime.context import Context
from memtune.tiles import split_rows


class TileStore(Protocol):
    """Where tiled weights are while they are not used, and where their gradients go."""

    def host_of(self, weight: nn.Parameter) -> Tensor:
        """What this rank has of the weight, in host memory."""

    def tile_landed(self, weight: nn.Parameter, rows: slice, gradient: Tensor) -> None:
        """Some rows of its gradient, averaged over ranks, are there; those of a backward come in order."""


class Tiles(Protocol):
    """What a tile is: some rows of what each rank has of a weight."""

    def height(self, weight: nn.Parameter) -> int:
        """Rows of the weight that this rank has."""

    def bring(self, weight: nn.Parameter, host: Tensor, rows: slice) -> Tensor:
        """The tile of these rows, on the device."""

    def multiply(self, tokens: Tensor, take: Callable[[], Tensor], bias: Tensor | None, out: Tensor, rows: slice) -> None:
        """Put the tile's columns of the output there; `take` hands over the tile, once."""

    def columns(self, given: Tensor, rows: slice) -> Tensor:
        """The tile's columns of the output's gradient."""

    def averaged(self, gradient: Tensor) -> Tensor:
        """Of the tile's gradient what leaves this rank's device."""


class WholeTiles:
    """Tiles of a weight that this rank has whole.

    Args:
        group: Of the replicas; None: this rank is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def height(self, weight: nn.Parameter) -> int:
        """As in `Tiles`."""
        return len(weight)

    def bring(self, weight: nn.Parameter, host: Tensor, rows: slice) -> Tensor:
        """As in `Tiles`."""
        return bring_rows(weight, host, rows)

    def multiply(self, tokens: Tensor, take: Callable[[], Tensor], bias: Tensor | None, out: Tensor, rows: slice) -> None:
        """As in `Tiles`."""
        if bias is None:
            torch.mm(tokens, take().t(), out=out[:, rows])
        else:
            torch.addmm(bias[rows], tokens, take().t(), out=out[:, rows])

    def columns(self, given: Tensor, rows: slice) -> Tensor:
        """As in `Tiles`."""
        return given[:, rows]

    def averaged(self, gradient: Tensor) -> Tensor:
        """As in `Tiles`."""
        if self._group is not None:
            torch.ops.memtune.all_reduce_(gradient, self._group.group_name, self._group.size(), "avg")
        return gradient


def bring_rows(weight: nn.Parameter, host: Tensor, rows: slice) -> Tensor:
    """These rows of `host` on the device of `weight`."""
    there = torch.empty((rows.stop - rows.start, *weight.shape[1:]), dtype=weight.dtype, device=weight.device)
    torch.ops.memtune.copy_to_device_(there, host[rows])
    return there


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


def install(
    context: Context, layers: Mapping[nn.Parameter, nn.Linear], count: int, store: TileStore, tiles: Tiles | None = None
) -> None:
    """Let these layers run in `count` tiles each (Rules 1 and 2); `tiles`: where ranks have divided them."""
    if tiles is None:
        tiles = WholeTiles(dist.group.WORLD if context.ranks > 1 else None)
    for weight, module in layers.items():
        vars(module)["forward"] = partial(_forward, module, _Weight(weight, count, store, tiles))
        context.undo.callback(vars(module).pop, "forward", None)


class _Weight(NamedTuple):
    parameter: nn.Parameter
    parts: int
    store: TileStore
    tiles: Tiles

    def brought(self) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """Rows and what hands over their tile, which is asked once; the next one is on its way by then."""
        host, device, rows = self.store.host_of(self.parameter), self.parameter.device, self.rows()
        there = [self._bring(host, rows[0])]  # what is handed over is in no variable here, so that it is let go when it was used
        for i, mine in enumerate(rows):
            transfer.caught_up(device)
            if i + 1 < len(rows):
                with transfer.ahead(device):
                    there.append(self._bring(host, rows[i + 1]))
            yield mine, partial(there.pop, 0)

    def not_brought(self) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """As `brought`, where nobody asks for them."""
        return ((rows, self.parameter.detach) for rows in self.rows())

    def rows(self) -> tuple[slice, ...]:
        """Of this rank, in each tile."""
        return split_rows(self.tiles.height(self.parameter), self.parts)

    def _bring(self, host: Tensor, rows: slice) -> Tensor:
        return self.tiles.bring(self.parameter, host, rows)


def _forward(module: nn.Linear, weight: _Weight, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        raise ApplyError(
            "A weight that comes in tiles is used under autocast.",
            evidence="It would be cast whole; the step that the plan was made for casts none.",
            fix="tiles: 1  for offload.states, or a plan made under autocast", code="MT364",
        )  # fmt: skip
    kept: list[Any] = []
    x = _Kept.apply(x, kept)  # type: ignore[no-untyped-call]
    out: Tensor = _Tiled.apply(x, weight.parameter, module.bias, weight, kept)  # type: ignore[no-untyped-call]
    return out


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
    def forward(ctx: Any, x: Tensor, parameter: nn.Parameter, bias: Tensor | None, weight: _Weight, kept: list[Any]) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (M, K)
        out = x.new_empty(len(tokens), len(parameter))  # (M, N)
        for rows, take in weight.brought():
            weight.tiles.multiply(tokens, take, bias, out, rows)
        if not x.requires_grad:
            ctx.save_for_backward(x)
        ctx.kept = kept if x.requires_grad else [ctx]
        ctx.weight, ctx.has_bias = weight, bias is not None
        return out.view(*x.shape[:-1], len(parameter))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), weight = ctx.kept, ctx.weight
        (x,) = kept.saved_tensors
        kept.maybe_clear_saved_tensors()  # not if the graph is kept; else its node would have them until its turn
        tokens, given = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = tokens.new_empty(tokens.shape) if ctx.needs_input_grad[0] else None
        for rows, take in weight.brought() if of_x is not None else weight.not_brought():
            columns = weight.tiles.columns(given, rows)
            if of_x is not None and rows.start == 0:
                torch.mm(columns, take(), out=of_x)
            elif of_x is not None:
                torch.addmm(of_x, columns, take(), out=of_x)
            of_tile = columns.t() @ tokens
            del columns
            of_tile = weight.tiles.averaged(of_tile)
            if rows.stop < weight.tiles.height(weight.parameter):
                weight.store.tile_landed(weight.parameter, rows, of_tile)
        of_bias = given.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        weight.store.tile_landed(weight.parameter, rows, of_tile)
        return None if of_x is None else of_x.view_as(x), None, of_bias, None, None
