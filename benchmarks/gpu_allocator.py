"""Allocators in real training: reserved bytes, cost, and whether the replay ranks them correctly.

    python benchmarks/gpu_allocator.py                # CUDA: the GPT of 350M parameters
    python benchmarks/gpu_allocator.py --device cpu   # the same code path on CPU, with the tiny GPT

Every allocator trains the same steps in its own process: with equal batches, and with batches of several
sizes in rotation, plain, with recompute and with offload. Recorded are peak reserved / peak allocated bytes,
the median step time (last half), the driver calls after ten steps, and the reserved bytes that the replay
predicts. Bars: `planned_layout` reserves at most 1.02 of the allocated bytes and `gmlake` 1.10; both take at
most 1.02 of native's time and driver calls. At the end, data is written through a stitched block and read
back. Results go to `benchmarks/results/<device name>/allocators.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import memtune  # first: where the environment names an allocator, torch takes it now or never

# isort: split
import numpy as np
import torch
from gpu import REHEARSALS, ROOT, device_name, measured_before

from memtune import _native, hardware
from memtune.autotune.predict.caching_allocator import AllocatorSettings, event_stream, replay
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.translate.translation import translate
from memtune.device import Capability, platform_of
from memtune.memory import arena
from memtune.memory.arena_settings import ArenaSettings
from memtune.memory.ledger import Ledger
from memtune.program.step import Program
from memtune.search_spaces import find
from memtune.technique import Target, Technique
from memtune.workload.workload import Workload

WORKLOAD = ROOT / "examples" / "gpt.py"
SETTLED, BATCH, MIB = 10, 6, 1 << 20
KINDS = ("native", "expandable_segments", "lifetime_pools", "gmlake", "planned_layout")
UNDER: dict[str, dict[str, Any]] = {
    "plain": {},
    "full recompute": {"recompute": {"kind": "full"}},
    "copied out": {"offload": {"activations": {"kind": "copy_out", "ratio": 0.5}}},
}
SIZES = {"equal": [BATCH], "varying": [BATCH, 2, 5, 3, 6, 4]}
BARS = {"planned_layout": 1.02, "gmlake": 1.10}
"""Of reserved / allocated; a plan is one of a step that repeats, so it is judged on equal batches."""
TIME_BAR = 1.02
Row = dict[str, Any]


def allocator(kind: str) -> Technique:
    """Return the allocator of this kind with its defaults."""
    return find("allocator", kind)(kind=kind)


def rows_of(device: str) -> list[Row]:
    """Return all cases for `device`."""
    has = platform_of(device).capabilities
    kinds = [kind for kind in KINDS if set(allocator(kind).needs) <= has]
    return [
        {
            "case": f"{under} {sizes} {kind}",
            "under": under,
            "sizes": sizes,
            "kind": kind,
            "settings": {**UNDER[under], "allocator": {"kind": kind}},
        }
        for under, sizes, kind in itertools.product(UNDER, SIZES, kinds)
    ]


def replayed(rows: list[Row], device: str) -> None:
    """Add the reserved bytes predicted by the allocator's replay for each case of equal batches."""
    machine = hardware.detect(device)
    recording = translate(record(Workload.load(WORKLOAD), sizes={BATCH}), machine)
    rewriter = Rewriter(recording, Target(machine, 1, None))
    for row in rows:
        if row["sizes"] == "equal":
            choice = Choice.from_document({"execution": {"micro_batch": BATCH}, **UNDER[row["under"]]})
            program = rewriter.program(choice)
            assert isinstance(program, Program), program
            settings = AllocatorSettings.from_env(allocator(row["kind"]).env())
            row["replayed_bytes"] = replay(event_stream(program.step, 6), settings, None).peak_reserved_bytes


def in_a_process(arguments: list[str], env: dict[str, str]) -> Row:
    """Run this file with `arguments` in a fresh process; return its JSON output."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env={**os.environ, **env}, capture_output=True, text=True
    )
    if done.returncode != 0:
        return {"status": "crash", "reason": done.stderr[-1000:]}
    return {"status": "ok", **json.loads(done.stdout.splitlines()[-1])}


def train(settings: dict[str, Any], sizes: list[int], steps: int, device: str) -> Row:
    """Train with these batch sizes in rotation; return peaks after the first ten steps and times of the last
    half.
    """
    torch.manual_seed(0)
    workload, where = Workload.load(WORKLOAD), torch.device(device)
    ledger = Ledger.open(where)
    model = workload.build_model().to(where).train()
    optimizer = workload.make_optimizer(model)
    tuned = memtune.apply(model, optimizer, {"settings": settings}, loss=workload.loss, strict=False)
    number = _native.ARENA_CPU if device == "cpu" else 0
    calls, step_s, losses = [], [], []
    for step in range(steps):
        if step == SETTLED:
            ledger.reset_peak()
        batch = workload.make_batch(sizes[step % len(sizes)])
        started = time.perf_counter()
        losses.append(float(tuned.step([batch])))
        step_s.append(time.perf_counter() - started)
        calls.append(_native.arena_statistics(number).driver_calls)
    return {
        "reserved_bytes": ledger.peak_reserved_bytes(),
        "allocated_bytes": ledger.peak_allocated_bytes(),
        "step_s": statistics.median(step_s[steps // 2 :]),
        "driver_calls": calls[-1],
        "driver_calls_once_settled": calls[-1] - calls[SETTLED],
        "losses": losses,
        "audit": tuned.audit().get("allocator"),
    }


def read_back(device: str) -> Row:
    """Free every second of 32 blocks, write a stitched block in their place, and read all back."""
    number = _native.ARENA_CPU if device == "cpu" else 0
    if device == "cpu":
        arena.install(ArenaSettings(kind="gmlake"))
    blocks = [torch.full((4 * MIB,), value, dtype=torch.uint8, device=device) for value in range(32)]
    del blocks[::2]
    before = _native.arena_statistics(number).states[2]
    stitched = torch.full((60 * MIB,), 77, dtype=torch.uint8, device=device)
    return {
        "stitched": _native.arena_statistics(number).states[2] - before,
        "right": (
            bool((stitched == 77).all())
            and all(bool((each == 2 * i + 1).all()) for i, each in enumerate(blocks))
        ),
    }


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties."""

    def ranks(values: list[float]) -> Any:
        array = np.array(values, float)
        return np.array([(array < each).sum() + ((array == each).sum() - 1) / 2 for each in array])

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def judged(rows: list[Row], stitched: Row | None) -> dict[str, Any]:
    """Return each bar with its figure and whether it holds; times and native's bytes mean something on a GPU
    only.
    """
    ran = [row for row in rows if row["status"] == "ok"]
    native_s = {(row["under"], row["sizes"]): row["step_s"] for row in ran if row["kind"] == "native"}
    found: dict[str, Any] = {"cases": len(rows), "ran": len(ran), "stitched_data_reads_back": stitched}
    told = [row for row in ran if "replayed_bytes" in row]
    if len(told) > 2:
        found["rank_correlation"] = rank_correlation(
            [row["replayed_bytes"] for row in told], [row["reserved_bytes"] for row in told]
        )
    for kind, bar in BARS.items():
        own = [row for row in ran if row["kind"] == kind]
        if not own:
            continue
        ratios = {
            sizes: max(
                (row["reserved_bytes"] / row["allocated_bytes"] for row in own if row["sizes"] == sizes),
                default=0.0,
            )
            for sizes in SIZES
        }
        worst = ratios["equal"] if kind == "planned_layout" else max(ratios.values())
        steady = [row["driver_calls_once_settled"] for row in own if row["sizes"] == "equal"]
        slower = [
            row["step_s"] / native_s[row["under"], row["sizes"]]
            for row in own
            if (row["under"], row["sizes"]) in native_s
        ]
        found[kind] = {
            "reserved_by_allocated": ratios,
            "bar": bar,
            "within": 0 < worst <= bar,
            "driver_calls_once_settled": max(steady, default=None),
            "step_by_native": statistics.median(slower) if slower else None,
            "step_bar": TIME_BAR,
        }
    return found


def written(file: Path, rows: list[Row], found: dict[str, Any]) -> None:
    """Write the rows that ran so far, and the judgement of all."""
    file.write_text(json.dumps({"judged": found, "cases": rows}, indent=1) + "\n")


def main() -> int:
    """Replay, train and write; return exit code 1 if a case failed or read back wrong data."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", *REHEARSALS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=int, help="only so many cases, spread over all")
    parser.add_argument("--resume", action="store_true", help="keep what the results already have")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--read-back", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train or asked.read_back:
        print(
            json.dumps(
                train(**json.loads(asked.train), device=asked.device)
                if asked.train
                else read_back(asked.device)
            )
        )
        return 0
    os.environ |= (
        {"MEMTUNE_GPT_SIZE": "tiny", "OMP_NUM_THREADS": "1"}
        if asked.device in REHEARSALS
        else {"MEMTUNE_GPT_SIZE": "350m"}
    )
    rows = rows_of(asked.device)
    rows = rows[:: -(-len(rows) // asked.limit)] if asked.limit else rows
    replayed(rows, asked.device)
    file = asked.results / device_name(asked.device) / "allocators.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = measured_before(file, rows, asked.resume)
    for row in rows:
        if "status" in row:
            continue
        what = json.dumps({"settings": row["settings"], "sizes": SIZES[row["sizes"]], "steps": asked.steps})
        row |= in_a_process(["--device", asked.device, "--train", what], allocator(row["kind"]).env())
        print(row["under"], row["sizes"], row["kind"], row["status"], row.get("reason", ""), flush=True)
        written(file, rows, {})
    stitched: Row | None = None
    if Capability.OWN_ALLOCATOR in platform_of(asked.device).capabilities:
        stitched = in_a_process(["--device", asked.device, "--read-back"], allocator("gmlake").env())
    found = judged(rows, stitched)
    written(file, rows, found)
    print(json.dumps(found))
    is_right = stitched is None or (stitched.get("right") and stitched.get("stitched"))
    return int(len(rows) != found["ran"] or not is_right)


if __name__ == "__main__":
    sys.exit(main())
