"""Reserved over allocated bytes of memtune's own allocators in real training steps on this CPU.

    python benchmarks/arena_training.py [--models gpt llama ...] [--json FILE] [--markdown FILE]

The allocator serves all that training allocates: gradients, optimizer state, activations. Each row is a
process of its own: six steps in which it learns, then two whose peaks count. Schedules of `coop` and
`megtaichi`, which evict by addresses of a simulated arena, are replayed at planned offsets. No figure is a
time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.memory import arena
from memtune.runtime import HOST, tier
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

HERE = Path(__file__).parent
MODELS, KINDS = (
    ("gpt", "llama", "resnet", "vit"),
    ("planned_layout", "gmlake", "lifetime_pools", "coop", "megtaichi"),
)
EVICTING = ("coop", "megtaichi")
RATIO = 0.5
"""Their budget: 0 is the smallest peak that a schedule reaches, 1 the plain one."""
LEARN, COUNT, MICRO_BATCH = 6, 2, 8


def config(workload: Workload, kind: str) -> dict[str, Any]:
    """Return the allocator `kind`, or planned offsets with the schedule of the recompute technique `kind`.

    Raises:
        ValueError: No schedule fits.
    """
    if kind not in EVICTING:
        knobs = {"arena_below_mb": 20} if kind == "gmlake" else {}
        return {"settings": {"allocator": {"kind": kind, **knobs}}}
    recompute = {"kind": kind, "ratio": RATIO}
    rewriter = Rewriter(record(workload, sizes={MICRO_BATCH}), Target(hardware.detect("cpu")))
    execution = {"micro_batch": MICRO_BATCH, "accumulate": 1}
    found = rewriter.candidate(Choice.from_document({"execution": execution, "recompute": recompute}))
    if isinstance(found, Reason):
        raise ValueError(f"{recompute}: {found}")
    return {
        "settings": {"recompute": recompute, "allocator": {"kind": "planned_layout"}},
        "plan": {slot: plan.document() for slot, plan in found.plans.items()},
    }


def one(model: str, kind: str) -> dict[str, Any]:
    """Train in this process and return the allocator's counters."""
    workload = Workload.load(HERE / "predict_models" / f"{model}.py")
    torch.manual_seed(0)
    net = workload.build_model()
    optimizer = workload.make_optimizer(net)
    tuned = apply(net, optimizer, config(workload, kind), loss=workload.loss, strict=False)
    calls = 0
    for step in range(LEARN + COUNT):
        if step == LEARN:
            arena.restart_peaks()
            calls = arena.statistics().driver_calls
        with tier(HOST):
            batch = workload.make_batch(MICRO_BATCH)
        tuned.step([batch])
    found = arena.statistics()
    return {
        "model": model,
        "kind": kind,
        "allocated_bytes": found.peak_allocated_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "ratio": found.peak_reserved_bytes / found.peak_allocated_bytes,
        "driver_calls_in_steady_state": found.driver_calls - calls,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    lines = [
        "# Allocators in training steps on a CPU",
        "",
        f"`python benchmarks/arena_training.py`: peak of reserved over allocated bytes in steps {LEARN + 1}",
        f"and {LEARN + COUNT}, micro-batch {MICRO_BATCH}; in brackets calls of the driver in these steps.",
        "gmlake: requests below 20 MiB share pages. coop, megtaichi: their schedules at planned offsets.",
        "",
        f"| model | allocated MiB | {' | '.join(KINDS)} |",
        f"|---|---|{'---|' * len(KINDS)}",
    ]
    for model in dict.fromkeys(each["model"] for each in rows):
        mine = {each["kind"]: each for each in rows if each["model"] == model}
        cells = [
            f"{mine[kind]['ratio']:.3f} ({mine[kind]['driver_calls_in_steady_state']})" for kind in KINDS
        ]
        lines.append(f"| {model} | {mine[KINDS[0]]['allocated_bytes'] / 2**20:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train each model with each allocator, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "KIND"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(*asked.one)))
        return
    rows = []
    for model in asked.models:
        for kind in KINDS:
            child = [sys.executable, __file__, "--one", model, kind]
            done = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], file=sys.stderr)
    if asked.json:
        asked.json.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
