"""Linear layers with weights loaded in tiles, of which at most two are on the device.

Memory-centric tiling (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1.3); `tiled_weights_pass` predicts
it op by op.

- A tile is some rows of the weight (output features). Forward loads tile after tile, each while the previous
  one computes its columns of the output, and saves the input only.
- Backward loads them again, adds each tile's part to the input's gradient and computes the tile's rows of the
  weight's gradient, whose D2H copy starts at once, into one host gradient. The bias gets its gradient before
  the last tile's copy.
- One tile's gradient is in a D2H copy at a time. Replicas average each tile's before it is offloaded.
- The weight is saved, loaded and updated as its block's other parameters are: whole, on the host or on SSD.
- Under FSDP2 (`ShardedTiles`) the weight is taken out of its unit. A tile is a share of each rank's rows,
  loaded over every rank's own link and gathered; its gradient is reduce-scattered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.tiles.tile_ops_pass import split_rows
from memtune.runtime import Context, transfer


class TileStore(NamedTuple):
    """Holds tiled weights on the host and takes their gradients."""

    device: torch.device
    """The device that computes."""
    host_of: Callable[[nn.Parameter], Tensor]
    """Returns this rank's rows of a weight, in host memory."""
    offload_rows: Callable[[nn.Parameter, slice, Tensor], None]
    """Offloads rows of a weight's averaged gradient; those of a backward are given in order."""


class Tiles(Protocol):
    """Computes with tiles: some rows of each rank's part of a weight."""

    def height(self, weight: nn.Parameter) -> int:
        """Return the number of rows of the weight that this rank has."""

    def load(self, host: Tensor, rows: slice, device: torch.device) -> Tensor:
        """Return the tile of these rows, on the device."""

    def multiply(
        self, tokens: Tensor, take: Callable[[], Tensor], bias: Tensor | None, out: Tensor, rows: slice
    ) -> None:
        """Write the tile's columns of the output; `take` returns the tile, once."""

    def columns(self, given: Tensor, rows: slice) -> Tensor:
        """Return the tile's columns of the output's gradient."""

    def averaged(self, gradient: Tensor) -> Tensor:
        """Return the part of the tile's gradient that is offloaded by this rank."""


class WholeTiles:
    """Tiles of a weight that is whole on this rank.

    Args:
        group: Of the replicas; None: there is one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def height(self, weight: nn.Parameter) -> int:
        """As in `Tiles`."""
        return len(weight)

    def load(self, host: Tensor, rows: slice, device: torch.device) -> Tensor:
        """As in `Tiles`."""
        return load_rows(host, rows, device)

    def multiply(
        self, tokens: Tensor, take: Callable[[], Tensor], bias: Tensor | None, out: Tensor, rows: slice
    ) -> None:
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


def load_rows(host: Tensor, rows: slice, device: torch.device) -> Tensor:
    """Return these rows of `host` on `device`."""
    there = torch.empty((rows.stop - rows.start, *host.shape[1:]), dtype=host.dtype, device=device)
    torch.ops.memtune.copy_to_device_(there, host[rows])
    return there


def linear_layers(context: Context, weights: Iterable[str]) -> dict[nn.Parameter, nn.Linear]:
    """Return the layers whose weights have these names.

    Raises:
        ApplyError: One is no plain `nn.Linear`, or the model has no such weight.
    """
    found: dict[nn.Parameter, nn.Linear] = {}
    for name in weights:
        owner, _, own = name.rpartition(".")
        module = dict(context.model.named_modules()).get(owner)
        if type(module) is not nn.Linear or own != "weight" or "forward" in vars(module):
            raise ApplyError(
                f"{name} is not the weight of a plain nn.Linear, so it cannot be loaded in tiles.",
                evidence="The model has no such layer."
                if module is None
                else f"It is in a {type(module).__name__}.",
                fix="tiles: 1  for offload.states",
                code="MT364",
            )
        found[next(module.parameters())] = module
    return found


def install(
    context: Context,
    layers: Mapping[nn.Parameter, nn.Linear],
    count: int,
    store: TileStore,
    tiles: Tiles | None = None,
) -> None:
    """Replace the forward of these layers by one in `count` tiles.

    Args:
        context: `undo` gets the reverse.
        layers: The layers by weight.
        count: Number of tiles of each weight.
        store: Holds the weights on the host and takes their gradients.
        tiles: Given if ranks have sharded the weights; None: weights are whole on each rank.
    """
    if tiles is None:
        tiles = WholeTiles(dist.group.WORLD if context.placement.world_size > 1 else None)
    for weight, module in layers.items():
        # In the instance: `nn.Module.__call__` still runs the user's hooks around it.
        vars(module)["forward"] = partial(_forward, module, _Weight(weight, count, store, tiles))
        context.undo.callback(vars(module).pop, "forward", None)


class _Weight(NamedTuple):
    """A weight that is loaded in tiles."""

    parameter: nn.Parameter
    parts: int
    store: TileStore
    tiles: Tiles

    def loaded_tiles(self) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """Yield rows and a function that returns their tile once; the next tile is prefetched by then."""
        host, device, rows = self.store.host_of(self.parameter), self.store.device, self.rows()
        # The caller pops a tile from the list, so that no local variable of this generator keeps it alive.
        there = [self._load(host, rows[0])]
        for i, mine in enumerate(rows):
            # The tile that is yielded now was prefetched while the last one computed; its product waits for
            # the copy.
            transfer.wait_prefetched(device)
            if i + 1 < len(rows):
                with transfer.prefetching(device):
                    there.append(self._load(host, rows[i + 1]))
            yield mine, partial(there.pop, 0)

    def rows_without_tiles(self) -> Iterator[tuple[slice, Callable[[], Tensor]]]:
        """Yield as `loaded_tiles` does, without loads: only the weight's gradient is computed."""
        return ((rows, self.parameter.detach) for rows in self.rows())

    def rows(self) -> tuple[slice, ...]:
        """Return the rows of this rank in each tile."""
        return split_rows(self.tiles.height(self.parameter), self.parts)

    def _load(self, host: Tensor, rows: slice) -> Tensor:
        return self.tiles.load(host, rows, self.store.device)


def _forward(module: nn.Linear, weight: _Weight, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        raise ApplyError(
            "A weight that is loaded in tiles is used under autocast.",
            evidence="Autocast would cast the whole weight; the step of the plan casts none.",
            fix="tiles: 1  for offload.states, or a plan made under autocast",
            code="MT364",
        )
    # `apply` returns tensors only: in this list the context of `_SavedInput` reaches `_Tiled`.
    kept: list[Any] = []
    x = _SavedInput.apply(x, kept)  # type: ignore[no-untyped-call]
    out: Tensor = _Tiled.apply(x, weight.parameter, module.bias, weight, kept)  # type: ignore[no-untyped-call]
    return out


class _SavedInput(torch.autograd.Function):
    """Saves the input before the first tile is loaded, as a matrix product does.

    Recompute of the block for its saved tensors therefore stops there, and does not run the layer again.
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
    """The layer in tiles. Legend: M = tokens, K = input features, N = output features."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: nn.Parameter, bias: Tensor | None, weight: _Weight, kept: list[Any]
    ) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (M, K)
        out = x.new_empty(len(tokens), len(parameter))  # (M, N)
        for rows, take in weight.loaded_tiles():
            weight.tiles.multiply(tokens, take, bias, out, rows)
        # Autograd makes no node of `_SavedInput` then, and its context would be freed.
        if not x.requires_grad:
            ctx.save_for_backward(x)
        ctx.kept = kept if x.requires_grad else [ctx]
        ctx.weight, ctx.has_bias = weight, bias is not None
        return out.view(*x.shape[:-1], len(parameter))

    @staticmethod
    # The weight's gradient is copied to the host and leaves no graph behind.
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), weight = ctx.kept, ctx.weight
        (x,) = kept.saved_tensors
        # The input is saved on another node, which autograd would clear only after it has run. With
        # `retain_graph=True` this does nothing.
        kept.maybe_clear_saved_tensors()
        tokens, given = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = tokens.new_empty(tokens.shape) if ctx.needs_input_grad[0] else None
        for rows, take in weight.loaded_tiles() if of_x is not None else weight.rows_without_tiles():
            columns = weight.tiles.columns(given, rows)
            if of_x is not None and rows.start == 0:
                torch.mm(columns, take(), out=of_x)
            elif of_x is not None:
                torch.addmm(of_x, columns, take(), out=of_x)
            of_tile = columns.t() @ tokens
            del columns  # under FSDP2 a copy, which must not outlive the product
            of_tile = weight.tiles.averaged(of_tile)
            # The last tile is offloaded after the bias has its gradient, as the pass predicts.
            if rows.stop < weight.tiles.height(weight.parameter):
                weight.store.offload_rows(weight.parameter, rows, of_tile)
        of_bias = given.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        weight.store.offload_rows(weight.parameter, rows, of_tile)
        # None for the weight: `store` has its gradient, and autograd must not accumulate another.
        return None if of_x is None else of_x.view_as(x), None, of_bias, None, None


class ShardedTiles:
    """Tiles of sharded weights. Legend: R = ranks, C = rows of a rank, k = rows of a rank in a tile.

    Args:
        group: The ranks that have a part each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name, self._ranks = group.group_name, group.size()

    def height(self, weight: nn.Parameter) -> int:
        """Return C."""
        return len(weight) // self._ranks

    def load(self, host: Tensor, rows: slice, device: torch.device) -> Tensor:
        """Return a tile (R · k, K) gathered from all ranks."""
        mine = load_rows(host, rows, device)
        tile = mine.new_empty(self._ranks * len(mine), *mine.shape[1:])
        torch.ops.memtune.all_gather_into_(tile, mine, self._name, self._ranks)
        return tile

    def multiply(
        self, tokens: Tensor, take: Callable[[], Tensor], bias: Tensor | None, out: Tensor, rows: slice
    ) -> None:
        """Write the tile's columns, which are k adjacent ones for each rank's part of the output."""
        if bias is None:
            part = torch.mm(tokens, take().t())
        else:
            part = torch.addmm(bias.view(self._ranks, -1)[:, rows].reshape(-1), tokens, take().t())
        self._columns_of(out, rows).copy_(part.view(len(part), self._ranks, -1))

    def columns(self, given: Tensor, rows: slice) -> Tensor:
        """Return the tile's columns (M, R · k), in the order of its rows."""
        return self._columns_of(given, rows).reshape(len(given), -1)

    def _columns_of(self, whole: Tensor, rows: slice) -> Tensor:
        runs: Tensor = whole.unflatten(1, (self._ranks, -1))
        return runs[:, :, rows]

    def averaged(self, gradient: Tensor) -> Tensor:
        """Reduce-scatter the tile's gradient; return this rank's rows."""
        mine = gradient.new_empty(len(gradient) // self._ranks, *gradient.shape[1:])
        torch.ops.memtune.reduce_scatter_into_(mine, gradient, self._name, self._ranks, "avg")
        return mine


def sharded_tiles(context: Context, weights: Collection[nn.Parameter]) -> ShardedTiles:
    """Take these weights out of the units that FSDP2 gathers, so that no rank ever has a whole one.

    Args:
        context: Of a model that FSDP2 shards over all ranks.
        weights: Of its blocks.

    Raises:
        ApplyError: Ranks have unequal parts of one, or a block's unit would be empty.
    """
    ids, group = {id(each) for each in weights}, None
    for name in context.blocks:
        block: Any = context.model.get_submodule(name)
        unit = block._get_fsdp_state()._fsdp_param_group
        mine = [each for each in unit.fsdp_params if id(each.sharded_param) in ids]
        group = unit.mesh_info.shard_process_group
        uneven = [each._param_fqn for each in mine if each.sharded_param.shape[0] % group.size()]
        if uneven or len(mine) == len(unit.fsdp_params):
            raise ApplyError(
                f"{uneven[0] if uneven else f'All of {name}'} cannot be loaded in tiles.",
                evidence=f"Its rows do not divide evenly among {group.size()} ranks."
                if uneven
                else "Nothing is left to gather.",
                fix="tiles: 1  for offload.states, or a plan made for these ranks",
                code="MT364",
            )
        context.undo.callback(setattr, unit, "fsdp_params", unit.fsdp_params)
        # FSDP2 then neither gathers them nor waits for their gradients; their shard is this rank's rows.
        unit.fsdp_params = [each for each in unit.fsdp_params if each not in mine]
    assert group is not None
    return ShardedTiles(group)
