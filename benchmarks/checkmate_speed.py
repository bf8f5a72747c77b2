"""Seconds of Checkmate's integer program by number of nodes, and the cost it reaches.

python benchmarks/checkmate_speed.py [--nodes 16 24 40] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.search_spaces.recompute._schedule_planner.checkmate_schedule import (
    CheckmateSchedule,
    schedule_for,
)
from memtune.search_spaces.recompute._schedule_planner.region_placement import Placement
from memtune.workload.workload import Workload

ROOT = Path(__file__).parents[1]


def _solving(path: Path, nodes: int, share: float) -> dict[str, object]:
    step = record(Workload.load(path)).at(8)
    started = time.perf_counter()
    found = schedule_for(Placement(step, hardware.detect("cpu")), None, share, nodes, 0.0)
    solve_s = time.perf_counter() - started
    assert isinstance(found, CheckmateSchedule)
    return {
        "model": path.stem,
        "ops": step.ops.n,
        "nodes": found.n_nodes,
        "share": share,
        "solve_s": solve_s,
        "plain_bytes": found.plain_bytes,
        "budget_bytes": found.budget_bytes,
        "peak_bytes": found.peak_bytes,
        "recompute_s": found.recompute_s,
    }


def main() -> None:
    """Solve, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for all figures")
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 24, 40])
    options = parser.parse_args()
    solves = [
        _solving(ROOT / f"tests/zoo/{name}.py", nodes, 0.4)
        for name in ("gpt", "cnn_bn")
        for nodes in options.nodes
    ]
    for each in solves:
        print(each)
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "solve": solves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
