"""`planned` over a sweep of byte budgets, beside every other static recompute technique, on the models of `predict_models/`.

    python benchmarks/recompute_budget.py [--models gpt,vit] [--measure 3] [--json FILE] [--markdown FILE] [--plot FILE.html]

For each model the smallest peak that recomputation reaches and the plain peak are the ends of the sweep; a budget of 10 % lies a
tenth of the way between them, and what a plan keeps spare on top. Every program is simulated op by op for this machine's CPU. A
second table puts `planned`, without moves to the host, beside each other technique at exactly that technique's peak: `full` and
`every_nth` are what `torch.utils.checkpoint` around all, or one in n, of the blocks does. With `--measure`, so many plans of each
model also train for real in a fresh process, and the native ledger's peak stands beside the planned one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from predict import THREADS, machine
from predict_grid import MODELS

from memtune import hardware
from memtune.autotune.record import record
from memtune.autotune.simulate import simulate
from memtune.executors.base import Trial, TrialResult
from memtune.executors.local import LocalExecutor
from memtune.program import Phase, Program, RankClass
from memtune.runtime.workspace import WorkspaceTable
from memtune.search_spaces import find
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_bytes, format_seconds
from memtune.workload import Workload

BATCH = 8
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PEERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}), ("every_nth", {"n": 2}), ("every_nth", {"n": 3}), ("every_nth", {"n": 4}), ("selective", {}),
    ("selective", {"scope": "core_attention"}), ("balanced", {}), ("attention_output", {}),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One program: what it needs and takes beyond the plain one's."""

    model: str
    technique: str
    peak_bytes: int
    step_s: float
    extra_s: float
    """Step time on top of the plain step's."""
    again_flops: float
    """Of what runs a second time."""
    budget_share: float | None = None
    budget_bytes: int | None = None
    beside: str = ""
    """The technique whose peak is the budget."""
    measured_bytes: int | None = None


def sweep(model: Path) -> tuple[list[Row], dict[int, dict[str, Any]]]:
    """The rows of one model, and by row the config of those that a trial can run."""
    workload = Workload.load(model)
    recording = record(workload, sizes={BATCH}, workspace=WorkspaceTable.cached(threads=THREADS))
    program, target = Program((RankClass(1, recording.at(BATCH)),), BATCH), Target(hardware.detect("cpu"), 1, None)
    plain = _row(model, find("recompute", "none")(kind="none"), Plan(), program, target, 0.0)
    rows, configs = [plain], {}
    planned = find("recompute", "planned")
    if isinstance(planned(kind="planned", share=0.0).fits(program, target), Reason):
        return rows, configs
    low, high = (planned(kind="planned", share=end).plan(program, target).decisions["peak_bytes"] for end in (0.0, 1.0))
    for share in SHARES:
        budget = math.ceil((low + share * (high - low)) / (1 - planned(kind="planned").spare))
        technique = planned(kind="planned", budget_bytes=budget)
        plan = technique.plan(program, target)
        row = _row(model, technique, plan, program, target, plain.step_s)
        configs[len(rows)] = _config(technique, plan)
        rows.append(replace(row, budget_share=share, budget_bytes=budget))
    for kind, knobs in PEERS:
        peer = find("recompute", kind)(kind=kind, **knobs)
        if peer.fits(program, target) is not None:
            continue
        found = _row(model, peer, peer.plan(program, target), program, target, plain.step_s)
        technique = planned(kind="planned", budget_bytes=found.peak_bytes, spare=0.0, host=False)
        mine = _row(model, technique, technique.plan(program, target), program, target, plain.step_s)
        rows += [found, replace(mine, budget_bytes=found.peak_bytes, beside=found.technique)]
    return rows, configs


def _row(model: Path, technique: Technique, plan: Plan, program: Program, target: Target, plain_s: float) -> Row:
    after = technique.rewrite(program, plan, target)
    found = simulate(after, target.hardware, level="events")
    flops = float(after.step.op_flops[after.step.op_phase == Phase.RECOMPUTE].sum())
    knobs = ", ".join(f"{name}={value}" for name, value in technique.model_dump(exclude_defaults=True).items() if name != "kind")
    name = technique.kind + (f"({knobs})" if knobs and technique.kind != "planned" else "")
    return Row(model.stem, name, found.peak_allocated_bytes, found.step_s, found.step_s - plain_s, flops)


def _config(technique: Technique, plan: Plan) -> dict[str, Any]:
    settings = {"execution": {"micro_batch": BATCH, "accumulate": 1}, "recompute": technique.model_dump(mode="json")}
    return {"settings": settings, "plan": {"recompute": plan.decisions}}


def measured(model: Path, rows: list[Row], configs: dict[int, dict[str, Any]], count: int) -> list[Row]:
    """`rows` with the native ledger's peak of real trials, of `count` plans from the smallest to the largest."""
    numbers = sorted(configs)
    chosen = [numbers[i] for i in np.unique(np.linspace(0, len(numbers) - 1, count).astype(int))] if numbers and count else []
    rows, executor = list(rows), LocalExecutor(1)
    try:
        for number in chosen:
            trial = Trial(number=number, workload=str(model), config=configs[number], warmup_steps=1, steps=1)
            executor.submit(trial.model_copy(update={"env": {"OMP_NUM_THREADS": str(THREADS)}}))
        left = len(chosen)
        while left:
            for event in executor.wait(1.0):
                if isinstance(event, TrialResult):
                    left -= 1
                    rows[event.number] = replace(rows[event.number], measured_bytes=event.peak_allocated_bytes)
                    if event.status != "ok":
                        print(f"{model.stem}: {event.status} {event.reason}\n{event.log_tail}", file=sys.stderr)
    finally:
        executor.close()
    return rows


def pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Each other technique with the plan at its peak."""
    for row in rows:
        if row.beside:
            yield next(peer for peer in rows if peer.model == row.model and peer.technique == row.beside), row


def summary(rows: list[Row]) -> dict[str, Any]:
    """How often a plan is over its budget, slower than another technique at its peak, or runs more FLOPs again."""
    compared = list(pairs(rows))
    costly = [(peer, mine) for peer, mine in compared if peer.extra_s > 0]
    ratios = [max(mine.extra_s, 0.0) / peer.extra_s for peer, mine in costly]
    trials = [(row.measured_bytes, row.budget_bytes, row.peak_bytes) for row in rows if row.measured_bytes]
    return {
        "plans": sum(row.budget_bytes is not None for row in rows),
        "over_budget": sum(row.budget_bytes is not None and row.peak_bytes > row.budget_bytes for row in rows),
        "compared": len(compared),
        "slower": sum(mine.step_s > peer.step_s * (1 + 1e-9) for peer, mine in compared),
        "more_flops": sum(mine.again_flops > peer.again_flops for peer, mine in compared),
        "median_share_of_their_extra_time": round(float(np.median(ratios)), 4) if ratios else None,
        "largest_share_of_their_extra_time": round(max(ratios), 4) if ratios else None,
        "measured": len(trials),
        "measured_over_budget": sum(found > (budget or 0) for found, budget, _ in trials),
        "largest_measured_error": round(max((abs(found / peak - 1) for found, _, peak in trials), default=math.nan), 5),
    }


def markdown(found: dict[str, Any]) -> str:
    """The tables of the page."""
    rows = [Row(**row) for row in found["rows"]]
    lines = [
        "# `planned` over a sweep of budgets", "",
        f"`{found['command']}` on {found['machine']['cpu']}, {found['threads']} thread, batch {BATCH}; simulated op by op.",
        "A budget of 10 % lies a tenth of the way from the smallest possible peak to the plain one. Cells: extra step time.", "",
        *(f"- {name.replace('_', ' ')}: {value}" for name, value in found["summary"].items()), "",
        "| model | smallest | plain | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |",
        "|---|---|---|" + "---|" * len(SHARES),
    ]  # fmt: skip
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        cells = [f"{row.extra_s / mine[0].step_s:+.1%}" for row in mine if row.budget_share is not None]
        if cells:
            ends = format_bytes(mine[1].peak_bytes), format_bytes(mine[0].peak_bytes)
            lines.append(f"| {model} | {' | '.join([*ends, *cells])} |")
        else:
            lines.append(f"| {model} | refused: nothing in its blocks can be recomputed |")
    columns = "technique | peak | its extra time | planned's | its FLOPs again | planned's"
    lines += ["", "At the peak of each other technique:", "", f"| model | {columns} |", "|---|---|---|---|---|---|---|"]
    for peer, plan in pairs(rows):
        times = f"{format_seconds(peer.extra_s)} | {format_seconds(max(plan.extra_s, 0.0))}"
        flops = f"{peer.again_flops / 1e9:.2f} G | {plan.again_flops / 1e9:.2f} G"
        lines.append(f"| {peer.model} | {peer.technique} | {format_bytes(peer.peak_bytes)} | {times} | {flops} |")
    trials = [row for row in rows if row.measured_bytes]
    if trials:
        lines += ["", "Real trials:", "", "| model | budget | planned | measured | error |", "|---|---|---|---|---|"]
        for row in trials:
            sizes = " | ".join(format_bytes(each or 0) for each in (row.budget_bytes, row.peak_bytes, row.measured_bytes))
            lines.append(f"| {row.model} | {sizes} | {(row.measured_bytes or 0) / row.peak_bytes - 1:+.3%} |")
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], file: Path) -> None:
    """Slow-down against budget, one line per model, as a page."""
    import plotly.graph_objects as go

    rows, figure = [Row(**row) for row in found["rows"]], go.Figure()
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model and row.budget_share is not None]
        plain = next(row for row in rows if row.model == model)
        peaks, slow = [row.peak_bytes / plain.peak_bytes for row in mine], [row.step_s / plain.step_s for row in mine]
        figure.add_scatter(x=peaks, y=slow, name=model, mode="lines+markers")
    figure.update_layout(xaxis_title="peak / plain peak", yaxis_title="step / plain step", title="planned by budget, simulated")
    figure.write_html(file, include_plotlyjs="cdn")


def main() -> int:
    """Sweep, print, write after every model; exit code 1 if a plan is over its budget or slower than another technique."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="only these, by name, with commas between")
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="real trials of N plans of each model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    parser.add_argument("--plot", type=Path, help="file for the plot, a page of HTML (needs plotly)")
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else [each.stem for each in MODELS]
    rows: list[Row] = []
    for model in (each for each in MODELS if each.stem in names):
        started = time.monotonic()
        made, configs = sweep(model)
        rows += measured(model, made, configs, asked.measure)
        print(f"{model.stem:14} {len(made):3} programs, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        found = {
            "schema": 1, "command": "make bench-recompute", "machine": machine(), "threads": THREADS, "batch": BATCH,
            "summary": summary(rows), "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        if asked.json:
            head = json.dumps({**found, "rows": []}, indent=1)
            body = ",\n".join("  " + json.dumps(row) for row in found["rows"])
            asked.json.write_text(head.replace('"rows": []', f'"rows": [\n{body}\n ]') + "\n")
        if asked.markdown:
            asked.markdown.write_text(markdown(found))
        if asked.plot:
            plot(found, asked.plot)
    print(json.dumps(found["summary"], indent=1))
    return int(found["summary"]["over_budget"] + found["summary"]["slower"] + found["summary"]["measured_over_budget"] > 0)


if __name__ == "__main__":
    sys.exit(main())
