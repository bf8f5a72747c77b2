"""The exact answer to what `planned` asks, as a mixed-integer program over every tensor of every block
(HiGHS).

For op i of block b: x = its outputs are there in backward, r = it runs again, r ≤ x; a saved op has x = 1; r
needs x of all it reads; what is there and not run again (x − r) is held. At every moment at most the budget.
It shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from memtune.search_spaces.recompute._block_planner.tensor_options import Made


def least_seconds(
    blocks: Sequence[tuple[Made, ...]],
    own_bytes: Sequence[int],
    after_bytes: int,
    budget_bytes: int,
    limit_s: float,
) -> float | None:
    """Fewest seconds within the budget, None if there is no way or no proof in `limit_s` seconds.

    Args:
        blocks: Ops of each block, in forward order; a block that runs needs `own_bytes` besides what those
            before it hold.
        own_bytes: By block.
        after_bytes: Between the last forward and the first backward, besides what all blocks hold.
        budget_bytes: No moment may need more.
        limit_s: For the solver.
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
    unit = (
        float(cost.max()) or 1.0
    )  # HiGHS also stops 1e-6 away from the best, whatever the cost is counted in
    found = milp(
        cost / unit,
        integrality=np.ones(2 * n),
        bounds=Bounds(low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
        constraints=LinearConstraint(matrix.tocsr(), ub=np.asarray([bound for _, bound in rows])),
    )
    return float(found.fun) * unit if found.status == 0 else None
