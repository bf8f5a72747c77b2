"""Planning seconds of `planned` for 80 and 1000 blocks, and its gap to the exact program on models of
`tests/zoo`.

    python benchmarks/planned_speed.py [--json FILE]

A GPT of 80 blocks is recorded on fake tensors. `plan_s` is a full plan by blocks of a fresh program (options
of blocks rewritten and measured, all plans ordered, the best rewritten); `schedule_s` is what the search for
a schedule of single ops adds, which may replace that plan; `frontier_s` is the planner alone, which orders
the plans. For 1000 blocks it receives the recorded blocks, repeated. Seconds are CPU time of this
process; it grows somewhat if many processes share the machine's caches (`load`). The exact program decides
every tensor of every block separately (HiGHS); where it finishes, `gap` is the share by which the plan's step
is longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
from candidates_speed import MODEL
from predict import machine, sources
from reference.block_milp import least_seconds

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.hardware.roofline import op_costs
from memtune.program.step import Program, RankClass
from memtune.search_spaces.recompute._block_planner import frontier as _frontier
from memtune.search_spaces.recompute._block_planner.call_selection import block_graphs
from memtune.search_spaces.recompute._block_planner.frontier import Problem, solve
from memtune.search_spaces.recompute._block_planner.measured_options import LIMIT, block_ops, levels
from memtune.search_spaces.recompute._block_planner.tensor_options import BlockOp, combinations
from memtune.search_spaces.recompute.planned import Planned
from memtune.technique import Target
from memtune.workload.workload import Workload

ROOT = Path(__file__).parents[1]
RECORDED = 80
BLOCKS = {RECORDED: 0.1, 1000: 2.0}
"""Blocks, and the seconds that a plan of so many by blocks may take."""
EXACT = (("gpt", 4), ("gpt", 12), ("hf_llama", 6), ("cnn_bn", 4))
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
LIMIT_S = 60.0
REPEATS = 3


def timed() -> list[dict[str, Any]]:
    """Return the seconds of a plan for a GPT of 80 blocks, and of the planner alone for each number of
    blocks.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.py"
        path.write_text(MODEL.replace("{layers}", str(RECORDED)))
        step = record(Workload.load(path), sizes={8}).at(8)
    program, target = Program((RankClass(1, step),), 8), Target(hardware.find("h100-80g"), 1, None)
    by_blocks, free = Planned(share=0.5, offload=False, by_schedule=False), Planned(share=0.5, offload=False)
    plan_s = _cpu_s(lambda: by_blocks.plan(program, target), 1)
    schedule_s = _cpu_s(lambda: free.plan(program, target), 1)
    found = levels(step, target.hardware, 1, False).problem()
    rows = []
    for blocks, limit_s in BLOCKS.items():
        problem = _repeated(found, blocks)
        row = {"blocks": blocks, "options": found.seconds.shape[1], "limit_s": limit_s}
        row |= (
            {"plan_s": round(plan_s, 4), "schedule_s": round(schedule_s, 4), "ops": step.ops.n}
            if blocks == RECORDED
            else {}
        )
        rows.append(row | {"frontier_s": round(_cpu_s(partial(_solve_uncached, problem), REPEATS), 4)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _repeated(problem: Problem, blocks: int) -> Problem:
    """Return `problem` with that many blocks, by repeating its own."""
    which = np.arange(blocks) % len(problem.class_of)
    return replace(
        problem,
        held_bytes=problem.held_bytes[which],
        own_bytes=problem.own_bytes[which],
        seconds=problem.seconds[which],
        class_of=problem.class_of[which],
    )


def _solve_uncached(problem: Problem) -> None:
    """Call `solve` without its cache of layers from earlier problems."""
    for function in (_frontier._after_the_last, _frontier._step_back, _frontier._undominated_options):
        function.cache_clear()
    solve(problem)


def _cpu_s(work: Callable[[], object], repeats: int) -> float:
    """Return the smallest CPU seconds of `work` over `repeats` runs."""
    least = math.inf
    for _ in range(repeats):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def exact(model: str, blocks: int) -> Iterator[dict[str, Any]]:
    """Compare the plan with the exact program over `blocks` copies of the last block of `model`, at several
    budgets.
    """
    step, hw = record(Workload.load(ROOT / "tests" / "zoo" / f"{model}.py")).at(8), hardware.detect("cpu")
    ops = _alone(block_ops(step, block_graphs(step)[-1], op_costs(step, hw).op_s, None)[1:])
    saved = sum(op.bytes for op in ops if op.saved)
    own = [saved + saved // 8 * (blocks - i) // 4 for i in range(blocks)]  # gradients appear on the way back
    found = combinations(ops, LIMIT)
    held, seconds = (
        np.asarray([[getattr(each, name) for each in found]] * blocks) for name in ("held_bytes", "seconds")
    )
    own_bytes = np.repeat(np.asarray(own)[:, None], len(found), axis=1)
    frontier = solve(Problem(held, own_bytes, seconds, np.zeros(blocks, np.int32), saved // 2, 0))
    step_s, (low, high) = 3 * blocks * sum(op.seconds for op in ops), frontier.peak_bytes[[0, -1]]
    for share in SHARES:
        budget = int(low + share * (high - low))
        least = least_seconds([ops] * blocks, own, saved // 2, budget, limit_s=LIMIT_S)
        mine = float(frontier.seconds[frontier.row_within(budget)])
        gap = None if least is None else round((mine - least) / step_s, 6)
        yield {
            "model": model,
            "blocks": blocks,
            "share": share,
            "planned_s": mine,
            "exact_s": least,
            "gap": gap,
        }


def _alone(ops: tuple[BlockOp, ...]) -> tuple[BlockOp, ...]:
    """Return the ops numbered from 0; the block's inputs stay in any case."""
    return tuple(
        BlockOp(op.name, op.seconds, tuple(i - 1 for i in op.reads if i), op.bytes, op.saved, op.keepable)
        for op in ops
    )


def main() -> int:
    """Time, compare, print and write; return exit code 1 if a gap exceeds half a percent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    asked = parser.parse_args()
    times = timed()
    gaps = [row for model, blocks in EXACT for row in exact(model, blocks)]
    worst = max((row["gap"] for row in gaps if row["gap"] is not None), default=0.0)
    found = {
        "schema": 1,
        "command": "python benchmarks/planned_speed.py",
        "sources": sources(),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "times": times,
        "finished": sum(row["gap"] is not None for row in gaps),
        "largest_gap": worst,
        "gaps": gaps,
    }
    print(json.dumps(found, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(worst > 0.005)


if __name__ == "__main__":
    sys.exit(main())
