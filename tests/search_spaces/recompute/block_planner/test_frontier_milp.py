"""Options of blocks and the frontier over them, compared with the exact mixed-integer program over all
tensors.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune.hardware.roofline import op_costs
from memtune.search_spaces.recompute._block_planner.call_selection import block_graphs
from memtune.search_spaces.recompute._block_planner.frontier import Frontier, Problem, solve
from memtune.search_spaces.recompute._block_planner.measured_options import LIMIT, block_ops
from memtune.search_spaces.recompute._block_planner.tensor_options import BlockOp, combinations
from memtune.testing.drift_check import plain_program, target_of

pytest.importorskip("scipy", reason="the exact program needs scipy")


def ops_of(model: str) -> tuple[BlockOp, ...]:
    program, target = plain_program(ZOO[model]), target_of()
    seconds = op_costs(program.step, target.hardware).op_s
    return block_ops(program.step, block_graphs(program.step)[-1], seconds, None)[1:]


def without_inputs(ops: tuple[BlockOp, ...]) -> tuple[BlockOp, ...]:
    """Return the ops numbered from 0, without the block's inputs, which are always held."""
    return tuple(
        BlockOp(op.name, op.seconds, tuple(i - 1 for i in op.reads if i), op.bytes, op.saved, op.keepable)
        for op in ops
    )


def planned(ops: tuple[BlockOp, ...], blocks: int, own: list[int], after: int) -> Frontier:
    found = combinations(ops, LIMIT)
    held, seconds = (
        np.asarray([[getattr(each, name) for each in found]] * blocks) for name in ("held_bytes", "seconds")
    )
    own_bytes = np.repeat(np.asarray(own)[:, None], len(found), axis=1)
    return solve(Problem(held, own_bytes, seconds, np.zeros(blocks, np.int32), after, 0))


@pytest.mark.parametrize(("model", "blocks"), [("gpt", 4), ("gpt", 12), ("hf_llama", 6), ("cnn_bn", 4)])
def test_within_half_a_percent_of_the_exact_program(model: str, blocks: int) -> None:
    from reference.block_milp import least_seconds

    ops = without_inputs(ops_of(model))
    whole = sum(op.bytes for op in ops if op.saved)
    own = [whole + whole // 8 * (blocks - i) // 4 for i in range(blocks)]  # gradients appear on the way back
    frontier = planned(ops, blocks, own, whole // 2)
    step_s = 3 * blocks * sum(op.seconds for op in ops)  # a forward, and a backward of twice its time
    ends = frontier.peak_bytes[[0, -1]]
    for share in (0.15, 0.5, 0.85):
        budget = int(ends[0] + share * (ends[1] - ends[0]))
        exact = least_seconds([ops] * blocks, own, whole // 2, budget, limit_s=20.0)
        assert exact is not None
        mine = float(frontier.seconds[frontier.row_within(budget)])
        assert exact <= mine * (1 + 1e-6) + 1e-12
        assert mine - exact <= 0.005 * step_s
