"""Steps on this CPU while the C library returns freed memory to the system, and while it keeps it.

    python benchmarks/host_heap.py [--rounds 4] [--json FILE]

Each round trains each model once either way, in processes of their own and in alternating order, in plain
form and with torch's checkpoint around each block. Printed are medians over the rounds of the step, of the
system's part of it and of its page faults; the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtune.device import keep_freed_pages
from memtune.workload import Workload

MODELS = Path(__file__).parent / "predict_models"
STEPS, WARM_UP = 14, 4


def train(model: str, form: str, heap: str) -> dict[str, float]:
    """Return medians over the steps of one training in this process."""
    torch.manual_seed(0)
    workload = Workload.load(MODELS / f"{model}.py")
    net = workload.build_model()
    if form == "checkpoint":
        for block in next(each for each in net.modules() if isinstance(each, nn.ModuleList)):
            block.forward = _checkpointed(block.forward)
    if heap == "kept":
        keep_freed_pages()
    optimizer, batch = torch.optim.AdamW(net.parameters(), fused=True), workload.make_batch(8)
    rows = []
    for _ in range(STEPS):
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        workload.loss(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = resource.getrusage(resource.RUSAGE_SELF)
        rows.append(
            (
                time.perf_counter() - began,
                after.ru_stime - before.ru_stime,
                after.ru_minflt - before.ru_minflt,
            )
        )
    step_s, system_s, faults = (statistics.median(each) for each in zip(*rows[WARM_UP:], strict=True))
    return {"step_s": step_s, "system_s": system_s, "faults": faults}


def _checkpointed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def main() -> None:
    """Run all, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "FORM", "HEAP"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train(*args.one)))
        return
    runs: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for turn in range(args.rounds):
        for model in ("moe", "bert", "gpt"):
            for form in ("plain", "checkpoint"):
                for heap in ("returned", "kept")[:: 1 if turn % 2 else -1]:
                    command = [sys.executable, __file__, "--one", model, form, heap]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    runs.setdefault((model, form, heap), []).append(json.loads(done.stdout))
    found = []
    for (model, form, heap), rounds in runs.items():
        steps = [each["step_s"] for each in rounds]
        row: dict[str, Any] = {
            "model": model,
            "form": form,
            "heap": heap,
            **{name: statistics.median(each[name] for each in rounds) for name in rounds[0]},
            "least_step_s": min(steps),
            "most_step_s": max(steps),
        }
        found.append(row)
        print(
            f"{model:5} {form:10} {heap:8} {row['step_s'] * 1e3:7.1f} ms"
            f" ({min(steps) * 1e3:.1f} to {max(steps) * 1e3:.1f}), system {row['system_s'] * 1e3:.1f} ms,"
            f" {row['faults']:.0f} page faults"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
