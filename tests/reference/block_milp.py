"""Exact optimum of `planned`'s problem, as a mixed-integer program over every tensor of every block (HiGHS).

For op i of block b: x = its outputs exist in backward, r = it is recomputed, r ≤ x. A saved op has x = 1. r
requires x of all its inputs. Outputs that exist and are not recomputed (x − r) are held. Live bytes never
exceed the budget. It shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from memtune.search_spaces.recompute._block_planner.tensor_options import BlockOp


def least_seconds(
    blocks: Sequence[tuple[BlockOp, ...]],
    own_bytes: Sequence[int],
    after_bytes: int,
    budget_bytes: int,
    limit_s: float,
) -> float | None:
    """Return the least recompute time within the budget, None if infeasible or unproven in `limit_s` seconds.

    Args:
        blocks: Ops of each block, in forward order.
        own_bytes: Bytes that each block needs while it runs, in addition to those held by earlier blocks.
        after_bytes: Bytes between the last forward and the first backward, in addition to those of all
            blocks.
        budget_bytes: Most live bytes.
        limit_s: Time limit of the solver.
    """
    start = np.cumsum([0, *(len(ops) for ops in blocks)])
    n = int(start[-1])  # x of all ops, then r of all ops
    cost, low, high = np.zeros(2 * n), np.zeros(2 * n), np.ones(2 * n)
    rows: list[tuple[dict[int, float], float]] = []  # Σ coefficient · variable ≤ bound
    held: dict[int, float] = {}
    for block, ops in enumerate(blocks):
        rows.append((dict(held), float(budget_bytes - own_bytes[block])))
        for i, op in enumerate(ops):
            x = int(start[block]) + i
            r = n + x
            cost[r] = op.seconds
            low[x] = float(op.saved)
            rows.append(({r: 1.0, x: -1.0}, 0.0))
            rows += [({r: 1.0, int(start[block]) + source: -1.0}, 0.0) for source in op.reads]
            if op.keepable:
                held[x], held[r] = float(op.bytes), -float(op.bytes)
            else:
                rows.append(({x: 1.0, r: -1.0}, 0.0))
    rows.append((held, float(budget_bytes - after_bytes)))
    matrix = lil_array((len(rows), 2 * n))
    for row, (coefficients, _) in enumerate(rows):
        for column, value in coefficients.items():
            matrix[row, column] = value
    # HiGHS also stops at an absolute gap of 1e-6, so costs are scaled to 1.
    unit = float(cost.max()) or 1.0
    found = milp(
        cost / unit,
        integrality=np.ones(2 * n),
        bounds=Bounds(low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
        constraints=LinearConstraint(matrix.tocsr(), ub=np.asarray([bound for _, bound in rows])),
    )
    return float(found.fun) * unit if found.status == 0 else None
