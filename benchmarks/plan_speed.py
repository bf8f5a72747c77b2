"""Seconds of `memtune plan` in a fresh process: a 7B GPT on 64 GPUs and on one, a 405B-shaped one on 16,384.

    python benchmarks/plan_speed.py [7b 7b-one-gpu 405b zoo] [--repeats 3] [--json FILE]

Each plan is the command as a user types it, its output discarded. `wall_s` is wall time, which other work on
the machine lengthens (`load`: runnable processes at the start); `cpu_s` is CPU time including the child
process, by which two versions of memtune are compared. The best of the repeats counts. Earlier measurements
are not used: the cache directory is empty except for the native ledger, which is compiled once per machine.
Modules are compiled before, as an installation compiles them.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from memtune.memory import cpu_allocator

ROOT = Path(__file__).parents[1]


class Case(NamedTuple):
    """One plan: the model's environment, the arguments of `memtune plan`, and its time limit on 2 cores."""

    environment: dict[str, str]
    arguments: list[str]
    limit_s: float | None = None


_LLAMA_405B = {
    "LAYERS": 126,
    "DIM": 16384,
    "HEADS": 128,
    "SEQ": 8192,
    "VOCAB": 128256,
    "BATCH": 16384,
    "TIED": 0,
}
CASES = {
    "7b": Case(
        {"MEMTUNE_GPT_SIZE": "7b"},
        ["examples/gpt.py", "--gpus", "64", "--gpu-type", "h100-80g", "--nodes", "8"],
        limit_s=15,
    ),
    "7b-one-gpu": Case(
        {"MEMTUNE_GPT_SIZE": "7b"}, ["examples/gpt.py", "--gpus", "1", "--gpu-type", "a100-40g"], limit_s=15
    ),
    "405b": Case(
        {f"MEMTUNE_GPT_{name}": str(value) for name, value in _LLAMA_405B.items()},
        ["examples/gpt.py", "--gpus", "16384", "--gpu-type", "h200", "--nodes", "2048"],
        limit_s=60,
    ),
    "zoo": Case({}, ["tests/zoo/gpt.py", "--device", "cpu", "--max-memory", "6MiB"]),
}


def timed(case: Case) -> dict[str, float]:
    """Run a plan once in its own process, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        if cpu_allocator.available() is None:
            (Path(cache) / "native").symlink_to(cpu_allocator.cache_dir() / "native")
        environment = {**os.environ, **case.environment, "MEMTUNE_CACHE": cache}
        load = os.getloadavg()[0]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-m", "memtune", "plan", *case.arguments]
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "load": round(load, 1)}


def main() -> None:
    """Time the requested cases; print one table, or write one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all where none is given"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers to this file as well")
    asked = parser.parse_args()
    # Else each process of a plan compiles all modules again where PYTHONDONTWRITEBYTECODE is set.
    for package in ("memtune", "autotune", "executors", "search_spaces"):
        compileall.compile_dir(ROOT / package, quiet=1)
    rows = []
    for name in asked.cases or CASES:
        runs = [timed(CASES[name]) for _ in range(asked.repeats)]
        best = min(runs, key=lambda run: run["wall_s"])
        rows.append(
            {
                "case": name,
                "plan": CASES[name].arguments,
                "limit_s": CASES[name].limit_s,
                **best,
                "runs": runs,
            }
        )
        limit = f"   limit {CASES[name].limit_s:g} s" if CASES[name].limit_s else ""
        print(
            f"{name:10} {best['wall_s']:6.1f} s on the clock, {best['cpu_s']:6.1f} s computed, load"
            f" {best['load']:.1f}{limit}"
        )
    if asked.json:
        about = {"schema": 1, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        asked.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
