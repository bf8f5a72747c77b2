"""Predicted against measured step time on this CPU, uncalibrated: the zoo's models and two larger ones.

    python benchmarks/op_times.py [--threads 1] [--json]

Each model is recorded on fake tensors and predicted from this machine's rates alone (`memtune doctor
--calibrate` stores them), then trained for real. A ratio below 1 means that the prediction was too fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memtune import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.hardware.roofline import op_class, op_costs
from memtune.hardware.spec import Hardware, detect
from memtune.program.step import Phase, Program, RankClass
from memtune.runtime.training_step import train_step
from memtune.workload.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
MODELS = (
    *sorted((ROOT / "tests" / "zoo").glob("*.py")),
    ROOT / "examples" / "gpt.py",
    ROOT / "examples" / "cnn.py",
)


def measured_s(
    workload: Workload, size: int, seconds: float, settings: dict[str, Any] | None = None
) -> float:
    """Return the median of as many real steps as fit in `seconds`, at least three, under `settings` if given.
    With one thread it is CPU time.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    model = workload.build_model().train()
    optimizer = workload.make_optimizer(model)
    if settings is not None:
        model, optimizer = apply(model, optimizer, {"memtune": 1, "settings": settings})
    batch = workload.make_batch(size)
    times: list[float] = []
    stop = time.perf_counter() + seconds
    while len(times) < 4 or time.perf_counter() < stop:
        start = clock()
        train_step(model, optimizer, workload.loss, [batch], torch.device("cpu"))
        times.append(clock() - start)
    return statistics.median(times[1:])


def with_threads(machine: Hardware, threads: int) -> Hardware:
    """Return `machine` limited to `threads` cores; its measured rates are unchanged, they were taken with
    torch's thread count.
    """
    part = min(1.0, threads / machine.cores)
    rates = (
        "fp32_flops_per_s",
        "bf16_flops_per_s",
        "fp16_flops_per_s",
        "tf32_flops_per_s",
        "memory_bytes_per_s",
    )
    return replace(machine, **{name: getattr(machine, name) * part for name in rates})


def row(path: Path, machine: Hardware, size: int, seconds: float) -> dict[str, Any]:
    """Return one model's predicted and measured step time, and the op classes that the prediction consists
    of.
    """
    workload = Workload.load(path)
    step = record(workload).at(size)
    program = Program((RankClass(1, step),), micro_batch=size)
    predicted = simulate(program, machine, level="events").step_s
    is_update = (step.ops.phase == Phase.OPTIMIZER).tolist()
    spent: dict[str, float] = {}
    for name, of_update, seconds_ in zip(
        step.ops.name.tolist(), is_update, op_costs(step, machine).op_s.tolist(), strict=True
    ):
        kind = op_class(step.names[name], is_update=of_update)
        spent[kind] = spent.get(kind, 0.0) + seconds_
    real = measured_s(workload, size, seconds)
    top = dict(sorted(spent.items(), key=lambda item: -item[1])[:4])
    return {
        "model": path.stem,
        "ops": step.ops.n,
        "predicted_s": predicted,
        "measured_s": real,
        "ratio": predicted / real,
        "by_class": {name: round(value / predicted, 3) for name, value in top.items()},
    }


def main() -> None:
    """Print one table, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of the real steps; more than idle cores only wait"
    )
    parser.add_argument("--size", type=int, default=4, help="micro-batch")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to train each model")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    machine = with_threads(detect("cpu"), asked.threads)
    rows = [row(path, machine, asked.size, asked.seconds) for path in MODELS]
    ratios = [each["ratio"] for each in rows]
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    document = {
        "schema": 1,
        "machine": machine.title,
        "rates": machine.rates_from,
        "threads": asked.threads,
        "micro_batch": asked.size,
        "rows": rows,
        "median_ratio": statistics.median(ratios),
        "worst_factor": worst,
    }
    if asked.json:
        print(json.dumps(document, indent=1))
        return
    for each in rows:
        times = f"{1e3 * each['predicted_s']:9.2f} ms predicted {1e3 * each['measured_s']:9.2f} ms measured"
        print(
            f"{each['model']:<14} {each['ops']:>5} ops {times}   ratio {each['ratio']:.2f}  "
            f" {each['by_class']}"
        )
    print(f"{machine.title}, rates {machine.rates_from}, {asked.threads} threads, micro-batch {asked.size}")
    print(f"median ratio {document['median_ratio']:.2f}, worst factor {worst:.2f}")


if __name__ == "__main__":
    main()
