"""Tiles of weights that FSDP2 has divided: of each rank's rows a share, gathered when the tile is used (`runtime.tiled_weights`).

Legend: R ranks, C rows of each, k of them in a tile. Four rules, which the pass `passes.tiled_rows` follows:

Rule 1. FSDP2 gathers and reduces what is left of a block; a weight that comes in tiles is in no unit of its, while its rows are
        held, updated and saved as any. So no rank ever has a whole one, nor its whole gradient.
Rule 2. All ranks gather the same tile at once: k rows of each, which came up from its host, so every rank's link brings as much.
        The next tile comes up, and is gathered, while the current one computes.
Rule 3. A tile's columns of the output are R runs of k. They are multiplied as one matrix and copied to their places.
Rule 4. A tile's gradient is averaged, and divided, at once: what leaves a rank's device are its own k rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.tiled_weights import bring_rows


class DividedTiles:
    """Tiles of divided weights.

    Args:
        group: The ranks that have a part each.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._name, self._ranks = group.group_name, group.size()

    def height(self, weight: nn.Parameter) -> int:
        """C."""
        return len(weight) // self._ranks

    def bring(self, weight: nn.Parameter, host: Tensor, rows: slice) -> Tensor:
        """(R · k, K) a tile, from all ranks (Rule 2)."""
        mine = bring_rows(weight, host, rows)
        tile = mine.new_empty(self._ranks * len(mine), *mine.shape[1:])
        torch.ops.memtune.all_gather_into_(tile, mine, self._name, self._ranks)
        return tile

    def multiply(self, tokens: Tensor, take: Callable[[], Tensor], bias: Tensor | None, out: Tensor, rows: slice) -> None:
        """Rule 3."""
        if bias is None:
            part = torch.mm(tokens, take().t())
        else:
            part = torch.addmm(bias.view(self._ranks, -1)[:, rows].reshape(-1), tokens, take().t())
        self._columns_of(out, rows).copy_(part.view(len(part), self._ranks, -1))

    def columns(self, given: Tensor, rows: slice) -> Tensor:
        """(M, R · k) the tile's columns, in the order of its rows."""
        return self._columns_of(given, rows).reshape(len(given), -1)

    def _columns_of(self, whole: Tensor, rows: slice) -> Tensor:
        runs: Tensor = whole.unflatten(1, (self._ranks, -1))
        return runs[:, :, rows]

    def averaged(self, gradient: Tensor) -> Tensor:
        """Rule 4."""
        mine = gradient.new_empty(len(gradient) // self._ranks, *gradient.shape[1:])
        torch.ops.memtune.reduce_scatter_into_(mine, gradient, self._name, self._ranks, "avg")
        return mine


def divided_tiles(context: Context, weights: Collection[nn.Parameter]) -> DividedTiles:
    """Take these weights out of the units in which FSDP2 gathers (Rule 1).

    Args:
        context: Of a model that FSDP2 divides over all ranks.
        weights: Of its blocks.

    Raises:
        ApplyError: Ranks have unequal parts of one, or nothing would be left of a block's unit.
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
                f"{uneven[0] if uneven else f'All of {name}'} cannot come in tiles.",
                evidence=f"Its rows do not divide evenly among {group.size()} ranks." if uneven else "Nothing is left to gather.",
                fix="tiles: 1  for offload.states, or a plan made for these ranks", code="MT364",
            )  # fmt: skip
        context.undo.callback(setattr, unit, "fsdp_params", unit.fsdp_params)
        unit.fsdp_params = [each for each in unit.fsdp_params if each not in mine]
    assert group is not None
    return DividedTiles(group)
