"""Predicted against measured peak memory on this machine's CPU, for every case of the grid in
`predict_grid.py`.

    python benchmarks/predict.py [--models gpt,vit] [--json FILE] [--markdown FILE]

Predicted: the workload is recorded on fake tensors, rewritten and simulated, with this machine's table of
kernel workspaces, as in `memtune plan --device cpu --config`; `affine` is the same from micro-batches 2 and 4
alone. Measured: the native ledger's peak in a real trial in a fresh process, as `memtune trial` reports it.
Nothing is fitted to measurements, so removing a model changes no other row. The page also has the figures of
other tools (`predict_peers.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from predict_grid import MODELS, Case, cases
from predict_peers import accelerate_bytes, mem_tracker
from predict_report import markdown

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scorer
from memtune.executors.base import Trial, TrialResult
from memtune.executors.local import LocalExecutor
from memtune.hardware import cpu_probe
from memtune.hardware.cpu_cores import usable_cores
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import Recording
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

ROOT = Path(__file__).parents[1]
THREADS = 1
"""CPU threads of a trial, and of the kernel workspaces in the table."""


@dataclass(frozen=True)
class Row:
    """One case: every figure in bytes, None where there is none; `error` is predicted / measured − 1."""

    model: str
    recompute: str
    offload: str
    batch: int
    status: str
    """`ok`; `unfit` if a technique refuses; otherwise the trial's status."""
    reason: str = ""
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    affine_bytes: int | None = None
    mem_tracker_bytes: int | None = None
    mem_tracker_error: str = ""
    accelerate_bytes: int | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return relative(self.predicted_bytes, self.measured_bytes)


def relative(predicted: int | None, measured: int | None) -> float | None:
    """Return `predicted` / `measured` − 1, None if either is missing."""
    return predicted / measured - 1 if predicted and measured else None


def predict(model: Path, wanted: Iterable[Case]) -> tuple[list[Row], Recording]:
    """Return rows without measurement, one for each of `wanted`, all from one recording of `model`."""
    wanted, workload = list(wanted), Workload.load(model)
    table = WorkspaceTable.cached(threads=THREADS)
    recording = record(workload, sizes={each.batch for each in wanted}, workspace=table)
    target = Target(hardware.detect("cpu"), 1, None)
    exact = Scorer(Rewriter(recording, target))
    affine = Scorer(Rewriter(replace(recording, exact={}), target))
    formula = accelerate_bytes(workload)
    rows = []
    for case in wanted:
        settings = case.config()["settings"]
        scored = exact.score(Choice.from_document(settings), level="events")
        row = Row(model.stem, case.recompute, case.offload, case.batch, "unfit")
        if isinstance(scored, Reason):
            rows.append(replace(row, reason=str(scored)))
            continue
        extrapolated = affine.score(Choice.from_document(settings), level="events")
        assert not isinstance(extrapolated, Reason)
        seen, why = mem_tracker(workload, case)
        row = replace(
            row,
            status="ok",
            predicted_bytes=scored.prediction.peak_allocated_bytes,
            affine_bytes=extrapolated.prediction.peak_allocated_bytes,
            mem_tracker_bytes=seen,
            mem_tracker_error=why,
            accelerate_bytes=formula,
        )
        rows.append(row)
    return rows, recording


def run(wanted: Iterable[tuple[int, Case]], slots: int) -> Iterator[TrialResult]:
    """Run a real trial of each case, by number, in a fresh process with `THREADS` threads; `slots` at a time,
    in any order.
    """
    executor, running = LocalExecutor(slots), 0
    try:
        for number, case in wanted:
            trial = Trial(
                number=number, workload=str(case.model), config=case.config(), warmup_steps=1, steps=1
            )
            executor.submit(trial.model_copy(update={"env": {"OMP_NUM_THREADS": str(THREADS)}}))
            running += 1
        while running:
            for event in executor.wait(1.0):
                if isinstance(event, TrialResult):
                    running -= 1
                    yield event
    finally:
        executor.close()


def compare(model: Path, wanted: Iterable[Case], slots: int) -> tuple[list[Row], dict[str, Any]]:
    """Return predicted and measured rows of one model, and its recording rung."""
    started, wanted = time.monotonic(), list(wanted)
    rows, recording = predict(model, wanted)
    fitting = [(number, case) for number, case in enumerate(wanted) if rows[number].status == "ok"]
    for result in run(fitting, slots):
        row = rows[result.number]
        rows[result.number] = replace(
            row, status=result.status, reason=result.reason, measured_bytes=result.peak_allocated_bytes
        )
    elapsed_s = round(time.monotonic() - started)
    about = {"rung": recording.rung, "record_s": round(recording.record_s, 2), "elapsed_s": elapsed_s}
    return rows, about | {"notes": list(recording.notes)}


def machine() -> dict[str, Any]:
    """Describe the machine of the measurements."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "cpu": cpu_probe.cpu().title,
        "capability": capability,
        "cores": usable_cores(),
        "torch": str(torch.__version__),
    }


def sources() -> str:
    """Return the version of memtune and its benchmarks: a hash of all sources, independent of their
    location.
    """
    folders, found = (
        ("autotune", "benchmarks", "csrc", "executors", "memtune", "search_spaces"),
        hashlib.sha256(),
    )
    for folder in folders:
        for file in sorted(
            each for each in (ROOT / folder).rglob("*") if each.suffix in (".py", ".cpp", ".h")
        ):
            found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return errors of each tool: over all its cases, and over the plain cases, which every tool supports."""
    found: dict[str, Any] = {
        "cases": len(rows),
        "measured": sum(row.measured_bytes is not None for row in rows),
        "unfit": sum(row.status == "unfit" for row in rows),
        "failed": sum(row.status not in ("ok", "unfit") for row in rows),
    }
    for tool in ("predicted", "affine", "mem_tracker", "accelerate"):
        for which, those in (
            ("", rows),
            ("_plain", [row for row in rows if row.recompute == row.offload == "none"]),
        ):
            errors = [relative(getattr(row, f"{tool}_bytes"), row.measured_bytes) for row in those]
            sizes = sorted(abs(each) for each in errors if each is not None)
            if sizes:
                figures = {
                    "n": len(sizes),
                    "median": round(statistics.median(sizes), 5),
                    "worst": round(sizes[-1], 5),
                }
                found[tool + which] = figures | {
                    "under": sum(each < 0 for each in errors if each is not None)
                }
    return found


def speed() -> dict[str, Any]:
    """Run the benchmarks of search and allocator speed, each in its own process."""
    found = {}
    for name, options in (("candidates_speed", []), ("allocator_speed", ["--seconds", "1"])):
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--json", *options]
        found[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def document(rows: list[Row], models: dict[str, Any], speeds: dict[str, Any] | None) -> dict[str, Any]:
    """Return the complete result document."""
    return {
        "schema": 1,
        "command": "make bench-predict",
        "sources": sources(),
        "machine": machine(),
        "threads": THREADS,
        "elapsed_s": sum(about["elapsed_s"] for about in models.values()),
        "summary": summary(rows),
        "speed": speeds,
        "models": models,
        "rows": [asdict(row) | {"error": row.error} for row in rows],
    }


def dumped(found: dict[str, Any]) -> str:
    """Return JSON with one line per row."""
    rows = ",\n".join("  " + json.dumps(row) for row in found["rows"])
    head = json.dumps({**found, "rows": []}, indent=1)
    return head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n"


def main() -> int:
    """Compare, print, and write after every model, so that an interrupted run keeps its rows; return exit
    code 1 if a trial failed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", help="only these, by name, with commas between; the others stay in FILE as they are"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--speed", action="store_true", help="also run the two benchmarks of speed")
    asked = parser.parse_args()
    names = set(asked.models.split(",")) if asked.models else {each.stem for each in MODELS}
    before = json.loads(asked.json.read_text()) if asked.models and asked.json and asked.json.exists() else {}
    figures = [
        {name: value for name, value in row.items() if name != "error"} for row in before.get("rows", ())
    ]
    rows = [row for row in (Row(**each) for each in figures) if row.model not in names]
    models = {name: about for name, about in before.get("models", {}).items() if name not in names}
    found = document(rows, models, speed() if asked.speed else before.get("speed"))
    for model in MODELS:
        if model.stem not in names:
            continue
        made, models[model.stem] = compare(model, cases(model), max(1, usable_cores() // THREADS))
        rows = sorted([*rows, *made], key=lambda row: row.model)
        errors = [abs(row.error) for row in made if row.error is not None]
        print(
            f"{model.stem:14} {len(errors):3} cases, worst {max(errors, default=0):.2%}",
            file=sys.stderr,
            flush=True,
        )
        found = document(rows, models, found["speed"])
        if asked.json:
            asked.json.write_text(dumped(found))
        if asked.markdown:
            asked.markdown.write_text(markdown(found))
    print(markdown(found))
    return int(found["summary"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
