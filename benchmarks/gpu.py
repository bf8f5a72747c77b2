"""Predicted against measured on this machine: search examples/gpt.py under two budgets and write every
trial's numbers.

    python benchmarks/gpu.py                      # CUDA: 1.3B parameters, under 24 GiB and under the whole
        card
    python benchmarks/gpu.py --device cpu         # the same code path on CPU, with the tiny GPT
    python benchmarks/gpu.py --device sim         # on the simulated accelerator (make gpu-check DEVICE=sim)

Results go to `benchmarks/results/<device name>/<budget>.json`: for every trial its settings, status,
predicted and measured peak allocated, peak reserved and step time; and the medians of the relative errors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REHEARSALS = ("cpu", "sim")
"""Devices on which the code paths run with the tiny GPT; their speeds mean nothing."""


def main() -> int:
    """Run one search per budget; return the worst exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", *REHEARSALS))
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--time", default="3m", help="time limit of each search")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    name, (budgets, size) = device_name(arguments.device), _searches(arguments.device)
    folder = arguments.results / name
    folder.mkdir(parents=True, exist_ok=True)
    worst = 0
    for budget in budgets:
        report, code = _search(arguments, budget, size)
        worst = max(worst, code)
        report["errors"] = _errors(report.get("trials", []))
        (folder / f"{_slug(budget)}.json").write_text(json.dumps(report, indent=1) + "\n")
        print(
            f"{name} {budget}: {len(report.get('trials', []))} trials, errors {report['errors']}", flush=True
        )
    return worst


def measured_before(file: Path, rows: list[dict[str, Any]], resume: bool) -> list[dict[str, Any]]:
    """Return `rows`; with `resume`, those that ran when `file` was written are taken from it."""
    if not resume or not file.exists():
        return rows
    known = {row["case"]: row for row in json.loads(file.read_text())["cases"] if row.get("status") == "ok"}
    return [known.get(row["case"], row) for row in rows]


def device_name(device: str) -> str:
    """Return the name of the results folder for `device`."""
    if device in REHEARSALS:
        return device
    import torch

    return _slug(torch.cuda.get_device_name(0))


def _searches(device: str) -> tuple[list[str], str]:
    """Return budgets and model size for `device`."""
    if device in REHEARSALS:
        return ["40MiB"], "tiny"
    import torch

    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return ["24GiB", f"{total_gib - 2:.0f}GiB"], "1.3b"


def _search(arguments: argparse.Namespace, budget: str, size: str) -> tuple[dict[str, Any], int]:
    with tempfile.TemporaryDirectory() as place:
        command = [
            *(
                sys.executable,
                "-m",
                "memtune",
                "search",
                str(ROOT / "examples" / "gpt.py"),
                "--device",
                arguments.device,
            ),
            *(("--workers", "1") if arguments.device == "cpu" else ("--gpus", "1")),
            *(
                "--max-memory",
                budget,
                "--trials",
                str(arguments.trials),
                "--time",
                arguments.time,
                "--executor",
                "local",
            ),
            *("--out", f"{place}/tuned.yaml", "--json"),
        ]
        done = subprocess.run(
            command, cwd=place, env={**os.environ, "MEMTUNE_GPT_SIZE": size}, capture_output=True, text=True
        )
    sys.stderr.write(done.stderr[-2000:])
    try:
        return json.loads(done.stdout), done.returncode
    except json.JSONDecodeError:
        return {"error": done.stdout[-500:] + done.stderr[-500:]}, done.returncode or 1


def _errors(trials: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median relative error (predicted / measured - 1) of each figure over the trials that ran."""
    found: dict[str, float] = {}
    pairs = {
        "peak_allocated_bytes": "predicted_peak_bytes",
        "peak_reserved_bytes": "predicted_reserved_bytes",
        "step_s": "predicted_step_s",
    }
    for figure, predicted in pairs.items():
        ratios = [
            trial[predicted] / trial[figure] - 1
            for trial in trials
            if trial.get("status") == "ok" and trial.get(figure) and trial.get(predicted)
        ]
        if ratios:
            found[figure] = round(statistics.median(map(abs, ratios)), 4)
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
