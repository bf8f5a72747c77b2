"""Forty settings of examples/gpt.py, each predicted and then run: peak allocated, peak reserved and step
time.

    python benchmarks/gpu_cases.py                # CUDA: the GPT of 350M parameters
    python benchmarks/gpu_cases.py --device cpu   # the same code path on CPU, with the tiny GPT and no
        allocator settings

The cases were committed before the first measurement. All predictions are made before any trial, from the
tables and the rates stored by `memtune doctor --calibrate`, so nothing is fitted to the measurements. Results
go to `benchmarks/results/<device name>/cases.json`: a line per case, with median and worst relative errors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu import REHEARSALS, ROOT, device_name, measured_before

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.autotune.search.trials import run_trial
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scorer
from memtune.autotune.translate.translation import translate
from memtune.memory.workspace import WorkspaceTable
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

BATCHES = (2, 6, 12)
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "balanced": {"recompute": {"kind": "balanced"}},
}
COPY_OUT = {"offload": {"activations": {"kind": "copy_out", "ratio": 0.5}}}
EXPANDABLE = {"allocator": {"kind": "expandable_segments"}}
FIGURES = ("peak_allocated_bytes", "peak_reserved_bytes", "step_s")
WORKLOAD = ROOT / "examples" / "gpt.py"
Case = dict[str, Any]


def cases() -> Iterator[Case]:
    """Return the cases: two dtypes, three batches and four kinds of recompute; at the middle batch also with
    offload and another allocator.
    """
    for bf16, batch, recompute in itertools.product((0, 1), BATCHES, RECOMPUTE):
        extras: list[dict[str, Any]] = [{}, COPY_OUT, EXPANDABLE] if batch == BATCHES[1] else [{}]
        for extra in extras:
            name = f"{'bf16' if bf16 else 'fp32'} mb {batch} {' '.join([recompute, *extra])}"
            settings = {"execution": {"micro_batch": batch}, **RECOMPUTE[recompute], **extra}
            yield {"case": name, "bf16": bf16, "settings": settings}


def predicted(wanted: list[Case], device: str) -> list[Case]:
    """Return `wanted` with the simulator's figures, or why a case does not fit; one recording per dtype."""
    machine, rows = hardware.detect(device), []
    for bf16, group in itertools.groupby(wanted, key=lambda case: case["bf16"]):
        os.environ["MEMTUNE_GPT_BF16"] = str(bf16)
        table = WorkspaceTable.cached(threads=1) if device == "cpu" else None
        recorded = record(Workload.load(WORKLOAD), sizes=set(BATCHES), workspace=table, target=machine.device)
        recording = translate(recorded, machine)
        scorer = Scorer(Rewriter(recording, Target(machine, 1, None)))
        for case in group:
            scored = scorer.score(Choice.from_document(case["settings"]), level="events")
            if isinstance(scored, Reason):
                rows.append({**case, "status": "unfit", "reason": str(scored)})
                continue
            said = scored.prediction
            figures = {
                "peak_allocated_bytes": said.peak_allocated_bytes,
                "peak_reserved_bytes": said.peak_reserved_bytes,
                "step_s": said.step_s,
                "interval": said.interval._asdict(),
            }
            rows.append({**case, "status": "predicted", "predicted": figures})
    return rows


def measured(row: Case, device: str) -> Case:
    """Return `row` with the figures of a trial in a fresh process, which inherits the environment."""
    if row["status"] != "predicted":
        return row
    os.environ["MEMTUNE_GPT_BF16"] = str(row["bf16"])
    result = run_trial(str(WORKLOAD), {"settings": row["settings"]}, device=device, executor="local")
    figures = {name: getattr(result, name) for name in FIGURES}
    return {**row, "status": result.status, "reason": result.reason, "measured": figures}


def errors(rows: list[Case]) -> dict[str, Any]:
    """Return median and worst relative error of each figure, and how many peaks exceed the predicted
    interval.
    """
    ran = [row for row in rows if row["status"] == "ok"]
    found: dict[str, Any] = {"cases": len(rows), "ran": len(ran)}
    for name in FIGURES:
        off = [row["predicted"][name] / row["measured"][name] - 1 for row in ran if row["measured"][name]]
        if off:
            sizes = sorted(map(abs, off))
            found[name] = {"median": round(statistics.median(sizes), 4), "worst": round(sizes[-1], 4)}
            found[name]["under"] = sum(each < 0 for each in off)
    highest = {row["case"]: row["predicted"]["interval"]["peak_high_bytes"] for row in ran}
    found["above_interval"] = sum(
        row["measured"]["peak_allocated_bytes"] > highest[row["case"]] for row in ran
    )
    return found


def main() -> int:
    """Predict all, run all, write after every trial; return exit code 1 if a trial failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", *REHEARSALS))
    parser.add_argument("--limit", type=int, help="only so many cases, spread over all")
    parser.add_argument("--resume", action="store_true", help="keep what the results already have")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    os.environ |= (
        {"MEMTUNE_GPT_SIZE": "tiny", "OMP_NUM_THREADS": "1"}
        if asked.device in REHEARSALS
        else {"MEMTUNE_GPT_SIZE": "350m"}
    )
    wanted = list(cases())
    rows = predicted(wanted[:: -(-len(wanted) // asked.limit)] if asked.limit else wanted, asked.device)
    file = asked.results / device_name(asked.device) / "cases.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = measured_before(file, rows, asked.resume)
    for i, row in enumerate(rows):
        rows[i] = measured(row, asked.device)
        print(rows[i]["case"], rows[i]["status"], rows[i].get("reason", ""), flush=True)
        file.write_text(json.dumps({"errors": errors(rows), "cases": rows}, indent=1) + "\n")
    print(json.dumps(errors(rows)))
    return int(any(row["status"] not in ("ok", "unfit") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
