"""Dropout of attention's weights, over the grid: drawn for all pairs of positions, so that the numbers are
those of one rank.

1. Each rank makes the draws of one rank's `F.scaled_dot_product_attention` without a fused kernel: one
  dropout of all samples × heads × positions × positions. Generators of all ranks stay alike.
2. A rank keeps, as booleans, the pairs of its heads and queries with all keys; and if ranks attend for others
  (`balanced_attention`) those of all queries with its own keys.
3. Blocks of attention take their part: dropout is applied to weights that are not normalized yet, which
  changes neither the log-sum-exp nor the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memtune.parallel.model.block_attention import WeightMask
from memtune.parallel.model.context_groups import Grid


@dataclass(frozen=True, eq=False)
class PairDropout:
    """The pairs of positions that this rank's heads keep."""

    grid: Grid
    probability: float
    rows: Tensor
    """(B, H, P, all positions): of the queries of its context."""
    columns: Tensor | None = None
    """(B, H, all positions, P): of the keys of its context, if it attends for other ranks."""

    def of(self, queries: int, keys: int) -> WeightMask:
        """Return the pairs of two contexts, one of which is this rank's."""
        split, scale = self.grid.split, 1 / (1 - self.probability) if self.probability < 1 else 0.0
        if queries == self.grid.context:
            return WeightMask(split.positions_of(self.rows, keys, 3), scale)
        assert self.columns is not None, "only ranks that help attend to queries of another context"
        return WeightMask(split.positions_of(self.columns, queries, 2), scale)


@torch.no_grad()
def draw_pairs(grid: Grid, query: Tensor, probability: float, *, helps: bool) -> tuple[Tensor, Tensor | None]:
    """Return `rows` and `columns` of the dropout of queries (B, all heads, positions of a rank, D)."""
    samples, heads, share, _ = query.shape
    length, each = share * grid.split.ranks, heads // grid.split.heads
    # Of a tensor like the weights: what a generator yields may depend on dtype and size (rule 1).
    drawn = F.dropout(query.new_ones((samples, heads, length, length)), probability)
    own = drawn.narrow(1, grid.head * each, each)
    rows = grid.split.positions_of(own, grid.context, 2) != 0
    return rows, grid.split.positions_of(own, grid.context, 3) != 0 if helps else None
