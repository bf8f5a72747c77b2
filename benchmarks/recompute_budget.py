"""`planned` over a sweep of budgets, compared with every other recompute technique and torch's own, on the
models of `predict_models/`.

    python benchmarks/recompute_budget.py [--models gpt,vit] [--measure 3] [--json FILE [--resume]]
        [--markdown FILE] [--plot SVG]

The sweep of a model ends at the smallest peak that recompute by blocks reaches and at the plain peak; a
budget of 10 % is a tenth of the way between them, plus a plan's headroom. Every program is simulated op by op
for this machine's CPU. At each budget the table has `planned`, also `by_schedule`, and the techniques that
take a budget: `checkmate`, `dtr`, `megtaichi`, `coop`. A second table compares each technique without a
budget (memtune's own, and torch's checkpointing, auto-SAC and `memory_budget` as recorded by
`recompute_peers.py`) with `planned`, without offload, at exactly that technique's peak. Compiled graphs may
recompute single ops anywhere, so they are compared with `by_schedule`, which may too, and counted apart: with
dropout their program differs from the planned one, since AOTAutograd's masks take one byte per element and
eager masks on CPU four. With `--measure`, that many plans of each model also train for real in a fresh
process, and the native ledger's peak is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from predict import THREADS, machine, sources
from predict_grid import MODELS
from recompute_budget_report import markdown, plot
from recompute_peers import compiled_steps, torch_steps

from memtune import hardware
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.executors.base import Trial, TrialResult
from memtune.executors.local import LocalExecutor
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import Phase, Program, RankClass
from memtune.search_spaces import find
from memtune.search_spaces.recompute.planned import Planned
from memtune.technique import Plan, Reason, Target, Technique
from memtune.workload.workload import Workload

BATCH = 8
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PEERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}),
    ("every_nth", {"n": 2}),
    ("every_nth", {"n": 3}),
    ("every_nth", {"n": 4}),
    ("selective", {}),
    ("selective", {"scope": "core_attention"}),
    ("balanced", {}),
    ("attention_output", {}),
    ("attention_boundary", {}),
)
SAME = 5e-4
"""Part of a step by which two step times may differ and count as equal, where plans are ordered by the sum of
their ops' times: the simulation overlaps some of them with what the host does.
"""
BY_BUDGET: dict[str, dict[str, Any]] = {"checkmate": {}, "dtr": {}, "megtaichi": {"swap": False}, "coop": {}}
COMPILED = "torch memory_budget"


@dataclass(frozen=True)
class Row:
    """One program: its peak, and its time beyond the plain step."""

    model: str
    technique: str
    peak_bytes: int
    step_s: float
    extra_s: float
    """Step time on top of the plain step's."""
    again_flops: float
    """FLOPs of recomputed ops."""
    budget_share: float | None = None
    budget_bytes: int | None = None
    peak_of: str = ""
    """The technique whose peak is the budget."""
    measured_bytes: int | None = None


def sweep(model: Path) -> tuple[list[Row], dict[int, dict[str, Any]]]:
    """Return the rows of one model, and by row the config of those that a trial can run."""
    workload = Workload.load(model)
    recording = record(workload, sizes={BATCH}, workspace=WorkspaceTable.cached(threads=THREADS))
    program, target = (
        Program((RankClass(1, recording.at(BATCH)),), BATCH),
        Target(hardware.detect("cpu"), 1, None),
    )
    plain = _simulated(model, "none", program, target, 0.0)
    rows, configs = [plain], dict[int, dict[str, Any]]()
    if isinstance(Planned(share=0.0).fits(program, target), Reason):
        return rows, configs
    low, high = (Planned(share=end).plan(program, target).peak_bytes for end in (0.0, 1.0))
    for share in SHARES:
        budget = math.ceil((low + share * (high - low)) / (1 - Planned().headroom))
        technique = Planned(budget_bytes=budget)
        plan = technique.plan(program, target)
        configs[len(rows)] = _config(technique, plan)
        rows.append(_at(_row(model, technique, plan, program, target, plain.step_s), share, budget))
        # The same for all: without moves to the host, which not all of them have, and with nothing spare.
        by_schedule = Planned(budget_bytes=budget, headroom=0.0, offload=False, by_schedule=True)
        for rival in (
            by_schedule,
            *(technique_of(kind, budget_bytes=budget, **knobs) for kind, knobs in BY_BUDGET.items()),
        ):
            # Where no schedule is faster the plan by blocks is the answer, and is refused if it is too large.
            if rival is not by_schedule and rival.fits(program, target) is not None:
                continue
            found = _row(model, rival, rival.plan(program, target), program, target, plain.step_s)
            if found.peak_bytes <= budget or rival.fits(program, target) is None:
                rows.append(_at(found, share, budget))
    peers: list[Row] = []
    for kind, knobs in PEERS:
        peer = technique_of(kind, **knobs)
        if peer.fits(program, target) is None:
            peers.append(_row(model, peer, peer.plan(program, target), program, target, plain.step_s))
    for name, step in torch_steps(workload, recording.rung, program.step, target.hardware, BATCH):
        peers.append(_simulated(model, name, program.with_step(step), target, plain.step_s))
    # Compiled graphs do not say what runs again: it is what they run beyond the plain step.
    once = float(program.step.ops.flops.sum())
    for name, step in compiled_steps(workload, BATCH):
        found = _simulated(model, name, program.with_step(step), target, plain.step_s)
        peers.append(replace(found, again_flops=max(float(step.ops.flops.sum()) - once, 0.0)))
    for found in peers:
        if found.peak_bytes < plain.peak_bytes:  # auto-SAC may save more than the plain model does
            op_by_op = found.technique.startswith(COMPILED)
            technique = Planned(
                budget_bytes=found.peak_bytes,
                headroom=0.0,
                offload=False,
                by_schedule=op_by_op,
            )
            plan = technique.plan(program, target)
            if plan.peak_bytes > found.peak_bytes:  # the partitioner of compiled graphs gets below blocks
                rows.append(found)
                continue
            mine = _row(model, technique, plan, program, target, plain.step_s)
            rows += [found, replace(mine, budget_bytes=found.peak_bytes, peak_of=found.technique)]
    return rows, configs


def technique_of(kind: str, **knobs: Any) -> Technique:
    """Return the recompute technique of this kind."""
    return find("recompute", kind)(kind=kind, **knobs)


def _at(row: Row, share: float, budget_bytes: int) -> Row:
    return replace(row, budget_share=share, budget_bytes=budget_bytes)


def _row(
    model: Path, technique: Technique, plan: Plan, program: Program, target: Target, plain_s: float
) -> Row:
    after = technique.rewrite(program, plan, target)
    hidden = ("kind", "budget_bytes", "headroom", "offload", "swap")
    knobs = [
        f"{name}={value}"
        for name, value in technique.model_dump(exclude_defaults=True).items()
        if name not in hidden
    ]
    if technique.kind == "planned":
        knobs = ["by_schedule"] if technique.model_dump()["by_schedule"] else []
    name = technique.kind + (f"({', '.join(knobs)})" if knobs else "")
    return _simulated(model, name, after, target, plain_s)


def _simulated(model: Path, name: str, program: Program, target: Target, plain_s: float) -> Row:
    found, step = simulate(program, target.hardware, level="events"), program.step
    flops = float(step.ops.flops[(step.ops.phase == Phase.RECOMPUTE) | (step.ops.copy_of >= 0)].sum())
    return Row(model.stem, name, found.peak_allocated_bytes, found.step_s, found.step_s - plain_s, flops)


def _config(technique: Technique, plan: Plan) -> dict[str, Any]:
    settings = {
        "execution": {"micro_batch": BATCH, "accumulate": 1},
        "recompute": technique.model_dump(mode="json"),
    }
    return {"settings": settings, "plan": {"recompute": plan.document()}}


def measured(model: Path, rows: list[Row], configs: dict[int, dict[str, Any]], count: int) -> list[Row]:
    """Return `rows` with the native ledger's peak of real trials, of `count` plans from the smallest to the
    largest.
    """
    numbers = sorted(configs)
    chosen = (
        [numbers[i] for i in np.unique(np.linspace(0, len(numbers) - 1, count).astype(int))]
        if numbers and count
        else []
    )
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
                    rows[event.number] = replace(
                        rows[event.number], measured_bytes=event.peak_allocated_bytes
                    )
                    if event.status != "ok":
                        print(
                            f"{model.stem}: {event.status} {event.reason}\n{event.log_tail}", file=sys.stderr
                        )
    finally:
        executor.close()
    return rows


def pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield each other technique with the plan at its peak."""
    for row in rows:
        if row.peak_of:
            yield (
                next(peer for peer in rows if peer.model == row.model and peer.technique == row.peak_of),
                row,
            )


def rivals(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield each technique that takes a budget, with `planned(by_schedule)` at the same budget."""
    for row in rows:
        if row.budget_share is not None and not row.technique.startswith("planned"):
            same = (row.model, row.budget_share, "planned(by_schedule)")
            found = [each for each in rows if (each.model, each.budget_share, each.technique) == same]
            assert found, f"{row.technique} meets a budget that planned does not: {same}"
            yield row, found[0]


def summary(rows: list[Row]) -> dict[str, Any]:
    """Count plans over their budget, slower than another technique at its peak, or with more recomputed
    FLOPs.
    """
    both, rivalling = list(pairs(rows)), list(rivals(rows))
    compiled = [pair for pair in both if pair[0].technique.startswith(COMPILED)]
    compared = [pair for pair in both if pair not in compiled]
    costly = [(peer, mine) for peer, mine in compared if peer.extra_s > 0]
    ratios = [max(mine.extra_s, 0.0) / peer.extra_s for peer, mine in costly]
    trials = [(row.measured_bytes, row.budget_bytes, row.peak_bytes) for row in rows if row.measured_bytes]
    plans = [row for row in rows if row.budget_bytes is not None and row.technique.startswith("planned")]
    swept = sorted(
        (row for row in plans if row.budget_share is not None), key=lambda row: (row.model, row.technique)
    )
    ordered = [(a, b) for a, b in pairwise(swept) if (a.model, a.technique) == (b.model, b.technique)]
    slower = [after for before, after in ordered if after.step_s > before.step_s * (1 + SAME)]
    within = {
        (each.model, each.budget_share) for each in plans if each.peak_bytes <= (each.budget_bytes or 0)
    }
    return {
        "plans": len(plans),
        "over_budget": sum(row.peak_bytes > (row.budget_bytes or 0) for row in plans),
        "larger_budget_slower": sum(row.technique == "planned" for row in slower),
        "larger_budget_slower_by_schedule": sum(row.technique != "planned" for row in slower),
        "compared": len(compared),
        "slower": sum(mine.step_s > peer.step_s * (1 + 1e-9) for peer, mine in compared),
        "more_flops": sum(mine.again_flops > peer.again_flops for peer, mine in compared),
        "median_share_of_their_extra_time": round(float(np.median(ratios)), 4) if ratios else None,
        "largest_share_of_their_extra_time": round(max(ratios), 4) if ratios else None,
        "compared_with_compiled": len(compiled),
        "slower_than_compiled": sum(mine.step_s > peer.step_s * (1 + 1e-9) for peer, mine in compiled),
        "compared_by_budget": len(rivalling),
        "slower_by_budget": sum(mine.step_s > other.step_s * (1 + 1e-9) for other, mine in rivalling),
        "others_over_budget": sum(other.peak_bytes > (other.budget_bytes or 0) for other, _ in rivalling),
        "budgets_met": len(within),
        "measured": len(trials),
        "measured_over_budget": sum(found > (budget or 0) for found, budget, _ in trials),
        "largest_measured_error": round(
            max((abs(found / peak - 1) for found, _, peak in trials), default=math.nan), 5
        ),
    }


WRONG = (
    "over_budget",
    "larger_budget_slower",
    "slower",
    "slower_than_compiled",
    "slower_by_budget",
    "measured_over_budget",
)
"""Figures of the summary that must be 0."""


def main() -> int:
    """Sweep, print and write after every model; return exit code 1 if a plan is over its budget or slower
    than another technique.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="only these, by name, with commas between")
    parser.add_argument(
        "--measure", type=int, default=0, metavar="N", help="real trials of N plans of each model"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for all figures, written after every model"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the models that FILE has of the very same sources"
    )
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    parser.add_argument("--plot", type=Path, help="file for the plot, an SVG")
    asked = parser.parse_args()
    names = asked.models.split(",") if asked.models else [each.stem for each in MODELS]
    rows = kept(asked.json) if asked.resume else []
    for model in (
        each for each in MODELS if each.stem in names and each.stem not in {row.model for row in rows}
    ):
        started = time.monotonic()
        made, configs = sweep(model)
        rows += measured(model, made, configs, asked.measure)
        print(
            f"{model.stem:14} {len(made):3} programs, {time.monotonic() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        _write(rows, asked)
    figures = summary(rows)
    print(json.dumps(figures, indent=1))
    return int(any(figures[name] for name in WRONG))


def kept(file: Path | None) -> list[Row]:
    """Return the rows in `file` if they were made from the present sources."""
    if file is None or not file.exists():
        return []
    found = json.loads(file.read_text())
    return [Row(**row) for row in found["rows"]] if found.get("sources") == sources() else []


def _write(rows: list[Row], asked: argparse.Namespace) -> None:
    """Write the requested files for the finished models."""
    found = {
        "schema": 2,
        "command": "make bench-recompute",
        "sources": sources(),
        "machine": machine(),
        "threads": THREADS,
        "batch": BATCH,
        "summary": summary(rows),
        "rows": [],
    }
    if asked.json:
        body = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
        asked.json.write_text(
            json.dumps(found, indent=1).replace('"rows": []', f'"rows": [\n{body}\n ]') + "\n"
        )
    if asked.markdown:
        asked.markdown.write_text(markdown(found, rows, list(pairs(rows)), SHARES, asked.plot))
    if asked.plot:
        asked.plot.write_text(plot(rows))


if __name__ == "__main__":
    sys.exit(main())
