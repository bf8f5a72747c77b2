"""Candidates per second of `simulate` on one core, for a step the size of a 24-block GPT's (synthetic columns).

python benchmarks/simulate_speed.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from typing import Any

import numpy as np

from memtune.autotune.simulate import Level, simulate
from memtune.hardware import find
from memtune.program import FOREVER, Kind, Phase, Program, RankClass, Resource, Step

BLOCKS, OPS_PER_BLOCK, USES_PER_OP = 24, 100, 3
NAMES = ("aten.addmm.default", "aten.mm.default", "aten.gelu.default", "aten.add.Tensor", "aten.native_layer_norm.default")
TYPES = {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "F64": np.float64}


def synthetic_step(seed: int = 0) -> Step:
    """Forward and backward over `BLOCKS` blocks and an optimizer; every forward op's output is saved for its mirror image."""
    rng = np.random.default_rng(seed)
    body = BLOCKS * OPS_PER_BLOCK
    n, half, parameters = body + body // 10, body // 2, BLOCKS * 12
    op = np.arange(n)
    m = parameters + n
    producer = np.concatenate([np.full(parameters, -1), op])
    use_op = np.repeat(op, USES_PER_OP)
    recent = parameters + np.maximum(use_op - rng.integers(1, 8, len(use_op)), 0)
    use_storage = np.where(rng.random(len(use_op)) < 0.7, recent, rng.integers(0, parameters, len(use_op)))
    columns: dict[str, Any] = {
        "op_name": rng.integers(0, len(NAMES), n),
        "op_phase": np.where(op < half, Phase.FORWARD, np.where(op < body, Phase.BACKWARD, Phase.OPTIMIZER)),
        "op_resource": np.where(rng.random(n) < 0.03, Resource.DEVICE_TO_HOST, Resource.COMPUTE),
        "op_flops": rng.uniform(1e6, 1e10, n),
        "op_traffic_bytes": rng.integers(10**5, 10**8, n),
        "bytes": rng.integers(2**10, 2**26, m),
        "kind": np.where(np.arange(m) < parameters, Kind.PARAMETER, Kind.TEMPORARY),
        "producer": producer,
        "held_until": np.where(producer < 0, FOREVER, -1),
        "use_op": use_op,
        "use_storage": use_storage,
        "save_storage": parameters + op[:half],
        "save_until": body - 1 - op[:half],
    }
    rows = {"op": n, "use": len(use_op), "save": half, "input": 0, "call": 0, "landing": 0, "returned": 0}
    for each in fields(Step):
        if str(each.type) in TYPES:
            neutral = np.full(rows.get(each.name.split("_")[0], m), -1 if each.name == "op_call" else 0)
            columns[each.name] = np.asarray(columns.get(each.name, neutral), TYPES[str(each.type)])
    return Step(names=NAMES, modules=("",), blocks=(), parameters=(), **columns)


def candidates_per_s(program: Program, level: Level, seconds: float) -> float:
    """How many calls of `simulate` a second, over about `seconds`."""
    hardware = find("h100-80g")
    simulate(program, hardware, level=level)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        simulate(program, hardware, level=level)
        count += 1
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measure both levels and print one table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to measure each row")
    asked = parser.parse_args()
    step = synthetic_step()
    step.validate()
    program = Program((RankClass(1, step),), micro_batch=4)
    levels: tuple[Level, ...] = ("coarse", "events")
    rows = [{"level": level, "candidates_per_s": round(candidates_per_s(program, level, asked.seconds))} for level in levels]
    if asked.json:
        print(json.dumps({"schema": 1, "ops": step.n_ops, "storages": step.n_storages, "uses": len(step.use_op), "rows": rows}))
        return
    print(f"{step.n_ops} ops, {step.n_storages} storages, {len(step.use_op)} uses (synthetic)")
    for row in rows:
        print(f"{row['level']:<8} {row['candidates_per_s']:>8} candidates/s")


if __name__ == "__main__":
    main()
