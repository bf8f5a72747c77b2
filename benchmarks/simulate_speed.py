"""Candidates per second of `simulate` on one core, for a step the size of a 24-block GPT's (synthetic
columns).

python benchmarks/simulate_speed.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from memtune.autotune.predict.prediction import Level
from memtune.autotune.predict.simulation import simulate
from memtune.hardware.spec import find
from memtune.program.step import (
    FOREVER,
    CallInputs,
    Calls,
    Kind,
    Ops,
    Phase,
    Program,
    RankClass,
    Resource,
    Saves,
    Step,
    Storages,
    Uses,
)

BLOCKS, OPS_PER_BLOCK, USES_PER_OP = 24, 100, 3
NAMES = (
    "aten.addmm.default",
    "aten.mm.default",
    "aten.gelu.default",
    "aten.add.Tensor",
    "aten.native_layer_norm.default",
)


def synthetic_step(seed: int = 0) -> Step:
    """Return forward and backward over `BLOCKS` blocks and an optimizer; every forward op's output is saved
    for its mirror image.
    """
    rng = np.random.default_rng(seed)
    body = BLOCKS * OPS_PER_BLOCK
    n, half, parameters = body + body // 10, body // 2, BLOCKS * 12
    op = np.arange(n)
    m = parameters + n
    producer = np.concatenate([np.full(parameters, -1), op])
    use_op = np.repeat(op, USES_PER_OP)
    recent = parameters + np.maximum(use_op - rng.integers(1, 8, len(use_op)), 0)
    use_storage = np.where(rng.random(len(use_op)) < 0.7, recent, rng.integers(0, parameters, len(use_op)))
    none, zeros = np.empty(0, np.int32), np.zeros(n, np.int32)
    return Step(
        names=NAMES,
        modules=("",),
        blocks=(),
        parameters=(),
        ops=Ops(
            name=rng.integers(0, len(NAMES), n).astype(np.int32),
            module=zeros,
            call=np.full(n, -1, np.int32),
            phase=np.where(
                op < half, Phase.FORWARD, np.where(op < body, Phase.BACKWARD, Phase.OPTIMIZER)
            ).astype(np.uint8),
            resource=np.where(rng.random(n) < 0.03, Resource.DEVICE_TO_HOST, Resource.COMPUTE).astype(
                np.uint8
            ),
            flops=rng.uniform(1e6, 1e10, n),
            traffic_bytes=rng.integers(10**5, 10**8, n),
            rng=zeros.astype(np.uint8),
            group=zeros,
            sequence_nr=zeros,
            copy_of=zeros,
            stream=zeros.astype(np.uint8),
            prefetch=zeros.astype(np.uint8),
            match=zeros,
            elementwise_bytes=zeros.astype(np.uint8),
            precision=zeros.astype(np.uint8),
        ),
        storages=Storages(
            bytes=rng.integers(2**10, 2**26, m),
            tier=np.zeros(m, np.uint8),
            kind=np.where(np.arange(m) < parameters, Kind.PARAMETER, Kind.TEMPORARY).astype(np.uint8),
            producer=producer.astype(np.int32),
            held_until=np.where(producer < 0, FOREVER, -1).astype(np.int32),
            grad_ready_after=np.zeros(m, np.int32),
            owner=np.zeros(m, np.int32),
            float_bytes=np.zeros(m, np.uint8),
        ),
        uses=Uses(
            op=use_op.astype(np.int32),
            storage=use_storage.astype(np.int32),
            mode=np.zeros(len(use_op), np.uint8),
        ),
        saves=Saves(
            storage=(parameters + op[:half]).astype(np.int32),
            packed_before=zeros[:half],
            held_until=(body - 1 - op[:half]).astype(np.int32),
            used_until=zeros[:half],
            unpacked_before=zeros[:half],
            unpack_order=zeros[:half],
            is_output=zeros[:half].astype(np.uint8),
            call=np.full(half, -1, np.int32),
        ),
        calls=Calls(none, none.astype(np.uint8), CallInputs(none, none)),
        forward_starts=none,
        forward_ends=none,
        grad_order=none,
        returned=none,
        partly_written=none,
        read_by_host=none,
    )


def candidates_per_s(program: Program, level: Level, seconds: float) -> float:
    """Return calls of `simulate` per second, measured over about `seconds`."""
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
    rows = [
        {"level": level, "candidates_per_s": round(candidates_per_s(program, level, asked.seconds))}
        for level in levels
    ]
    if asked.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "ops": step.ops.n,
                    "storages": step.storages.n,
                    "uses": step.uses.n,
                    "rows": rows,
                }
            )
        )
        return
    print(f"{step.ops.n} ops, {step.storages.n} storages, {step.uses.n} uses (synthetic)")
    for row in rows:
        print(f"{row['level']:<8} {row['candidates_per_s']:>8} candidates/s")


if __name__ == "__main__":
    main()
