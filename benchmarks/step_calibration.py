"""Errors of predicted step times before and after trials have calibrated op times: ratios, in CPU time of one
thread.

    python benchmarks/step_calibration.py [--seconds 1] [--json FILE] [--markdown FILE]

Each model runs one plain step with a timer around every op, as a search's first baseline does. Each model,
plain and with every block recomputed, is then predicted from this machine's rates alone, with the op times of
the *other* models (a later run), and with those of its own plain step (the same search), and compared with
real steps. The plain step under `same` is in-sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from op_times import MODELS, measured_s, with_threads

from memtune.autotune.predict.calibration import residuals
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.hardware.op_clock import OpClock, UpdateClock
from memtune.hardware.op_time import OpTime
from memtune.hardware.op_timings import op_times
from memtune.hardware.spec import Hardware, detect
from memtune.program.step import Program
from memtune.runtime.training_step import train_step
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "full recompute": {"recompute": {"kind": "full"}}}
HOW = ("rates", "others", "same")


def clocked(workload: Workload, size: int, step_s: float) -> list[OpTime]:
    """Return the op times that one plain step at micro-batch `size` yields."""
    model = workload.build_model().train()
    optimizer = workload.make_optimizer(model)
    batch, on = workload.make_batch(size), torch.device("cpu")
    with UpdateClock() as update:
        train_step(model, optimizer, workload.loss, [batch], on)
    with OpClock(on) as clock:
        train_step(model, optimizer, workload.loss, [batch], on)
    return op_times(clock.observed, step_s, update_s=update.seconds)


def steps(path: Path, machine: Hardware, size: int, seconds: float) -> dict[str, Any]:
    """Return programs and measured steps of one model by setting, and the op times of its plain step."""
    workload = Workload.load(path)
    rewriter = Rewriter(record(workload), Target(machine, 1, None))
    found: dict[str, tuple[Program, float]] = {}
    for name, settings in SETTINGS.items():
        document = {**settings, "execution": {"micro_batch": size}}
        candidate = rewriter.candidate(Choice.from_document(document))
        if not isinstance(candidate, Reason):
            found[name] = candidate.program, measured_s(workload, size, seconds, document)
    return {"model": path.stem, "steps": found, "op_times": clocked(workload, size, found["plain"][1])}


def rows(models: list[dict[str, Any]], machine: Hardware) -> list[dict[str, Any]]:
    """Return predicted over measured seconds by model, setting and calibration."""
    found = []
    for each in models:
        others = [row for other in models if other is not each for row in other["op_times"]]
        known = dict(zip(HOW, ([], others, each["op_times"]), strict=True))
        taught = {how: replace(machine, residuals=residuals(of, machine)) for how, of in known.items()}
        for name, (program, real_s) in each["steps"].items():
            ratios = {
                how: simulate(program, on, level="events").step_s / real_s for how, on in taught.items()
            }
            found.append({"model": each["model"], "setting": name, "measured_s": real_s, **ratios})
    return found


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median and worst factor between predicted and measured, by setting and calibration."""
    lines = []
    for name in SETTINGS:
        for how in HOW:
            factors = [max(each[how], 1 / each[how]) for each in found if each["setting"] == name]
            lines.append(
                {
                    "setting": name,
                    "known": how,
                    "median_factor": statistics.median(factors),
                    "worst_factor": max(factors),
                }
            )
    return lines


def markdown(document: dict[str, Any]) -> str:
    """Return the result as text."""
    out = [
        "# Step times before and after trials taught op times",
        "",
        (
            f"`benchmarks/step_calibration.py` on {document['machine']}, rates: {document['rates']}, torch"
            f" {torch.__version__}, 1 thread, CPU time, micro-batch {document['micro_batch']}. A factor of 1"
            " is exact."
        ),
        "",
        "| setting | known | median factor | worst factor |",
        "|---|---|---|---|",
    ]
    words = {
        "rates": "rates alone",
        "others": "what other models taught",
        "same": "what this model's plain step taught",
    }
    for each in document["summary"]:
        out.append(
            f"| {each['setting']} | {words[each['known']]} | {each['median_factor']:.2f} |"
            f" {each['worst_factor']:.2f} |"
        )
    out += ["", "| model | setting | rates | others | same |", "|---|---|---|---|---|"]
    for each in document["rows"]:
        out.append(
            f"| {each['model']} | {each['setting']} | " + " | ".join(f"{each[how]:.2f}" for how in HOW) + " |"
        )
    return "\n".join([*out, "", "Ratios of the second table are predicted over measured.", ""])


def main() -> None:
    """Measure, predict and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4, help="micro-batch")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long to train each model in each setting"
    )
    parser.add_argument("--models", default="", help="names of the zoo, separated by commas; default: all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = asked.models.split(",") if asked.models else []
    wanted = [path for path in MODELS if path.parent.name == "zoo" and (not names or path.stem in names)]
    machine = with_threads(detect("cpu"), 1)
    found = rows([steps(path, machine, asked.size, asked.seconds) for path in wanted], machine)
    document = {
        "schema": 1,
        "machine": machine.title,
        "rates": machine.rates_from,
        "micro_batch": asked.size,
        "rows": found,
        "summary": summary(found),
    }
    if asked.json:
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(document))
    print(markdown(document))


if __name__ == "__main__":
    main()
