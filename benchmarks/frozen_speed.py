"""What a frozen schedule costs beside the plain module, op by op, and how long Checkmate solves.

    python benchmarks/frozen_speed.py [--out benchmarks/results/frozen_speed.json]

A stack of linear layers and GELUs is trained with the plain schedule (every op once), so that all that differs is who calls
the ops: autograd's engine, or the generated code. Times are the best of several rounds, plain and frozen in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from memtune import hardware
from memtune.autotune.record import record
from memtune.cores import cpu_threads
from memtune.runtime.frozen import FrozenRegion
from memtune.runtime.tape import autocast_state, capture, shapes_of
from memtune.schedule import plain_schedule
from memtune.search_spaces.recompute._checkmate import Found, schedule_for
from memtune.workload import Workload

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
SIZES = ((16, 16), (64, 64), (64, 128), (256, 256), (256, 512))
"""(rows, width): from ops of a few microseconds to a few milliseconds."""
LAYERS, ROUNDS = 24, 12


def _stack(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())))


def best_s(run: Callable[[], None], other: Callable[[], None]) -> tuple[float, float]:
    """Best time of each, taken in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for each, found in zip((run, other), times, strict=True):
            started = time.perf_counter()
            each()
            found.append(time.perf_counter() - started)
    return min(times[0]), min(times[1])


def _training(net: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        net(x).sum().backward()
        net.zero_grad(set_to_none=True)

    run()
    run()
    return run


def _overhead(rows: int, width: int) -> dict[str, float]:
    x = torch.randn(rows, width)
    plain, frozen = _stack(width), _stack(width)
    tape = capture(frozen, frozen.forward, shapes_of(((x,), {})), autocast_state(), lambda i, out: True)
    region = FrozenRegion(frozen, plain_schedule(tape.graph), CPU)
    region.install()
    plain_s, frozen_s = best_s(_training(plain, x), _training(frozen, x))
    assert region.runs.plain == 0
    n_ops = tape.graph.n_ops
    return {
        "rows": rows, "width": width, "ops": n_ops, "plain_us_per_op": 1e6 * plain_s / n_ops,
        "overhead_us_per_op": 1e6 * (frozen_s - plain_s) / n_ops, "slowdown": frozen_s / plain_s,
    }  # fmt: skip


def _solving(path: Path, nodes: int, share: float) -> dict[str, object]:
    step = record(Workload.load(path)).at(8)
    started = time.perf_counter()
    found = schedule_for(step, hardware.detect("cpu"), None, share, nodes, 0.0)
    solve_s = time.perf_counter() - started
    assert isinstance(found, Found)
    return {
        "model": path.stem, "ops": step.n_ops, "nodes": found.n_nodes, "share": share, "solve_s": solve_s,
        "plain_bytes": found.plain_bytes, "budget_bytes": found.budget_bytes, "peak_bytes": found.peak_bytes,
        "again_s": found.again_s,
    }  # fmt: skip


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/frozen_speed.json")
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 24, 40])
    options = parser.parse_args()
    with cpu_threads(1):
        overheads = [_overhead(*size) for size in SIZES]
        for row in overheads:
            print({key: round(value, 3) for key, value in row.items()})
        solves = [_solving(ROOT / f"tests/zoo/{name}.py", nodes, 0.4) for name in ("gpt", "cnn_bn") for nodes in options.nodes]
    for each in solves:
        print(each)
    options.out.write_text(json.dumps({"torch": torch.__version__, "overhead": overheads, "solve": solves}, indent=1) + "\n")


if __name__ == "__main__":
    main()
