"""`planned` on the clock: real steps of small ops over a sweep of budgets, against full and selective
checkpointing at their own peaks.

    python benchmarks/planned_clock.py [--models gpt,llama,convnet] [--rounds 30] [--json FILE]

Each model of `small_ops/` is trained in one process under the plain loop, under torch's checkpoint and
selective checkpoint by hand, under memtune's `full` and `selective`, and under `planned` for budgets spread
evenly from the smallest peak of full checkpointing to the plain one, and for exactly the peaks of the others.
All steps run in rotation, in CPU seconds of one thread. Peaks are those of the recorded programs, torch's own
included. Ratios are medians over rounds of pairs within a round, with their quartiles.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from clock_results import header, options, write
from overhead_cases import BATCH, MODELS, Case
from overhead_clock import Paired, measure, paired
from recompute_peers import torch_steps

from memtune.hardware.cpu_cores import cpu_threads
from memtune.search_spaces import find
from memtune.search_spaces.recompute.planned import Planned

BUDGETS = 10
SPREAD = 0.02
"""Part of a step that two medians may differ by and count as equal."""


@dataclass(frozen=True)
class Row:
    """One way to train one model."""

    model: str
    way: str
    peak_bytes: int
    budget_bytes: int | None
    realized_by: str
    """Kind of the plan of `planned`."""
    times: Paired
    """Relative to the plain step."""


@dataclass(frozen=True)
class Pair:
    """`planned` at the peak of another technique, and that technique."""

    model: str
    other: str
    budget_bytes: int
    peak_bytes: int
    times: Paired
    """`planned` relative to the other."""


def swept(case: Case, rounds: int) -> tuple[list[Row], list[Pair]]:
    """Time all ways of one model."""
    plain = case.program.step.peak_bytes()
    ways = {
        "plain": case.step(case.build()),
        "torch full": case.checkpointed(),
        "torch selective": case.checkpointed(selective=True),
        "full": case.tuned("recompute", "full"),
        "selective": case.tuned("recompute", "selective"),
    }
    peaks = {"plain": plain}
    for name, step in torch_steps(
        case.workload, case.recording.rung, case.program.step, case.target.hardware, BATCH
    ):
        if name in ways:
            peaks[name] = step.peak_bytes()
    for name in ("full", "selective"):
        peaks[name] = case.planned(find("recompute", name)(kind=name))[1]
    others = [name for name in ways if name != "plain"]
    low = peaks["full"]
    budgets = {f"planned {i + 1}": low + (plain - 1 - low) * i // (BUDGETS - 1) for i in range(BUDGETS)} | {
        f"planned at {name}": peaks[name] for name in others
    }
    realized = {}
    for name, budget in budgets.items():
        technique = Planned(budget_bytes=budget, headroom=0.0)
        plan, peaks[name] = case.planned(technique)
        realized[name] = type(plan).__name__
        ways[name] = case.tuned("recompute", "planned", budget_bytes=budget, headroom=0.0)
    times = measure(ways, rounds)
    rows = [
        Row(
            case.name,
            name,
            peaks[name],
            budgets.get(name),
            realized.get(name, ""),
            paired(times, name, "plain"),
        )
        for name in ways
    ]
    pairs = [
        Pair(
            case.name,
            name,
            peaks[name],
            peaks[f"planned at {name}"],
            paired(times, f"planned at {name}", name),
        )
        for name in others
    ]
    return rows, pairs


def summary(rows: list[Row], pairs: list[Pair]) -> dict[str, Any]:
    """Count the pairs that `planned` loses, and the budgets at which it is slower than at a smaller one."""
    sweeps = [row for row in rows if row.budget_bytes is not None and " at " not in row.way]
    steps = [(a, b) for a, b in pairwise(sweeps) if a.model == b.model]
    return {
        "pairs": len(pairs),
        "slower": [f"{each.model}: {each.other}" for each in pairs if each.times.ratio > 1.0],
        "surely_slower": [f"{each.model}: {each.other}" for each in pairs if each.times.ratio_low > 1.0],
        "largest_ratio": round(max(each.times.ratio for each in pairs), 3),
        "budgets": len(sweeps),
        "over_budget": [
            f"{row.model}: {row.way}" for row in sweeps if row.peak_bytes > (row.budget_bytes or 0)
        ],
        "larger_budget_slower": [
            f"{b.model}: {b.way} {b.times.ratio / a.times.ratio - 1:+.1%}"
            for a, b in steps
            if b.times.ratio > a.times.ratio * (1 + SPREAD)
        ],
    }


def markdown(found: dict[str, Any], rows: list[Row], pairs: list[Pair]) -> str:
    """Return the page of results."""
    lines = [
        "# `planned` on the clock",
        "",
        f"`{found['command']}` on {found['machine']['cpu']}, one thread, {found['rounds']} rounds, CPU time;"
        " all ways in rotation.",
        "",
        "`planned` at exactly the peak of another technique; a ratio below 1 is faster:",
        "",
        "| model | other | peak, KiB | planned's peak, KiB | planned / other | quartiles |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.model} | {each.other} | {each.budget_bytes >> 10} | {each.peak_bytes >> 10} |"
        f" {each.times.ratio:.3f} | {each.times.ratio_low:.3f} to {each.times.ratio_high:.3f} |"
        for each in pairs
    ]
    lines += [
        "",
        "All ways, relative to the plain step:",
        "",
        "| model | way | budget, KiB | peak, KiB | ms | / plain | quartiles | plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times, budget = row.times, "" if row.budget_bytes is None else row.budget_bytes >> 10
        lines.append(
            f"| {row.model} | {row.way} | {budget} | {row.peak_bytes >> 10} | {1e3 * times.step_s:.2f} |"
            f" {times.ratio:.3f} | {times.ratio_low:.3f} to {times.ratio_high:.3f} | {row.realized_by} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Sweep, print and write; return exit code 1 if `planned` surely loses a pair."""
    parser = options(__doc__, rounds=30)
    parser.add_argument("--models", default=",".join(MODELS), help="of small_ops/, with commas between")
    asked = parser.parse_args()
    rows: list[Row] = []
    pairs: list[Pair] = []
    with cpu_threads(1):
        for name in asked.models.split(","):
            mine, compared = swept(Case(name), asked.rounds)
            rows, pairs = rows + mine, pairs + compared
            print(f"{name}: {len(mine)} ways", file=sys.stderr, flush=True)
    counts = summary(rows, pairs)
    found = header("make bench-overhead", asked) | counts
    text = markdown(found, rows, pairs)
    print(text, json.dumps(counts, indent=1))
    write(asked, found, text, pairs_of=pairs, rows=rows)
    return int(bool(found["surely_slower"]))


if __name__ == "__main__":
    sys.exit(main())
