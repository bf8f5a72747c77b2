"""How long `planned` decides, for 80 and 1000 blocks, and how far it is from the exact program, on models of
`tests/zoo`.

    python benchmarks/planned_speed.py [--json FILE]

A GPT of 80 blocks is recorded for real. `plan_s` is a whole plan of a fresh program (options of blocks
rewritten and measured, all plans put in order, the best rewritten), `frontier_s` the planner alone, which
puts the plans in order; for 1000 blocks it is given the recorded ones, one after the other as often as it
takes. Seconds are CPU time of this process; where many share the machine's caches (`load`) it is some more.
The exact program decides every tensor of every block by itself (HiGHS); where it finishes, `gap` is how much
longer the plan's step is, as part of a step.
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
from memtune.search_spaces.recompute._block_planner.measured_options import LIMIT, levels, made_in
from memtune.search_spaces.recompute._block_planner.tensor_options import Made, combinations
from memtune.search_spaces.recompute.planned import Planned
from memtune.technique import Target
from memtune.workload.workload import Workload

ROOT = Path(__file__).parents[1]
RECORDED = 80
BLOCKS = {RECORDED: 0.1, 1000: 2.0}
"""Blocks, and the seconds that a plan of so many may take."""
EXACT = (("gpt", 4), ("gpt", 12), ("hf_llama", 6), ("cnn_bn", 4))
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
LIMIT_S = 60.0
REPEATS = 3


def timed() -> list[dict[str, Any]]:
    """Seconds of a plan for a GPT of 80 blocks, and of the planner alone for each number of blocks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.py"
        path.write_text(MODEL.replace("{layers}", str(RECORDED)))
        step = record(Workload.load(path), sizes={8}).at(8)
    program, target = Program((RankClass(1, step),), 8), Target(hardware.find("h100-80g"), 1, None)
    plan_s = _cpu_s(lambda: Planned(share=0.5, host=False).plan(program, target), 1)
    found = levels(step, target.hardware, 1, False).problem()
    rows = []
    for blocks, limit_s in BLOCKS.items():
        problem = _repeated(found, blocks)
        row = {"blocks": blocks, "options": found.seconds.shape[1], "limit_s": limit_s}
        row |= {"plan_s": round(plan_s, 4), "ops": step.ops.n} if blocks == RECORDED else {}
        rows.append(row | {"frontier_s": round(_cpu_s(partial(_solve_anew, problem), REPEATS), 4)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _repeated(problem: Problem, blocks: int) -> Problem:
    """`problem` with so many blocks: its own again and again."""
    which = np.arange(blocks) % len(problem.class_of)
    columns = (getattr(problem, name)[which] for name in ("held_bytes", "own_bytes", "seconds", "class_of"))
    return Problem(*columns, problem.after_bytes, problem.rest_bytes)


def _solve_anew(problem: Problem) -> None:
    """`solve` without the layers that it remembers of problems before."""
    for function in (_frontier._after_the_last, _frontier._step_back, _frontier._different):
        function.cache_clear()
    solve(problem)


def _cpu_s(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of `work`, the least of so many runs."""
    least = math.inf
    for _ in range(repeats):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def exact(model: str, blocks: int) -> Iterator[dict[str, Any]]:
    """The plan beside the exact program over so many blocks like the last of `model`, at several budgets."""
    step, hw = record(Workload.load(ROOT / "tests" / "zoo" / f"{model}.py")).at(8), hardware.detect("cpu")
    ops = _alone(made_in(step, block_graphs(step)[-1], op_costs(step, hw).op_s, None)[1:])
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
        mine = float(frontier.seconds[frontier.at(budget)])
        gap = None if least is None else round((mine - least) / step_s, 6)
        yield {
            "model": model,
            "blocks": blocks,
            "share": share,
            "planned_s": mine,
            "exact_s": least,
            "gap": gap,
        }


def _alone(ops: tuple[Made, ...]) -> tuple[Made, ...]:
    """Numbered from 0: what the block is called with stays in any case."""
    return tuple(
        Made(op.name, op.seconds, tuple(i - 1 for i in op.reads if i), op.bytes, op.saved, op.keepable)
        for op in ops
    )


def main() -> int:
    """Time, compare, print and write; exit code 1 if a gap is more than half a percent."""
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
