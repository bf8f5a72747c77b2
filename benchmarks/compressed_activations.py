"""Train a small GPT with saved activations in 32, 8 and 4 bits: losses, peaks against prediction, CPU time.

MEMTUNE_GPT_SIZE=tiny python benchmarks/compressed_activations.py --steps 200

The settings alternate step by step, so that all see the same load of the machine; one thread.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from memtune.api import apply
from memtune.memory import Ledger
from memtune.program import Tier
from memtune.runtime import HOST, tier
from memtune.search_spaces.offload.activations.compressed import Compressed
from memtune.testing import rewritten
from memtune.testing.training import build, config_of
from memtune.workload import Workload

MODEL = Path(__file__).parents[1] / "examples" / "gpt.py"
SIZE = 8
SETTINGS = {
    "float32": None,
    "8 bits": Compressed(),
    "8 bits, nearest": Compressed(rounding="nearest"),
    "4 bits": Compressed(bits=4),
    "4 bits, nearest": Compressed(bits=4, rounding="nearest"),
}


def main() -> None:
    """Train under every setting and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    peaks = {name: peak_bytes(setting) for name, setting in SETTINGS.items()}
    runs = {name: started(setting) for name, setting in SETTINGS.items()}
    losses, seconds = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for step in range(steps):
        for name, (workload, model, optimizer) in runs.items():
            torch.manual_seed(1000 + step)
            batch = workload.make_batch(SIZE)
            begin_s = time.process_time()
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[name].append(time.process_time() - begin_s)
            losses[name].append(loss.item())
    last = max(steps // 10, 1)
    print(f"| {MODEL.stem} | loss, mean of last {last} steps | peak, MB | predicted | CPU time of a step |")
    print("|---|---|---|---|---|")
    for name in SETTINGS:
        ratios = sorted(mine / plain for mine, plain in zip(seconds[name], seconds["float32"], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        measured, predicted = peaks[name]
        print(
            f"| {name} | {statistics.mean(losses[name][-last:]):.3f} | {measured / 1e6:.3f} |"
            f" {predicted / 1e6:.3f} | {statistics.median(ratios):.2f}x (quartiles {low:.2f} to {high:.2f}) |"
        )


def started(setting: Compressed | None) -> tuple[Workload, nn.Module, torch.optim.Optimizer]:
    """Return workload, model and optimizer under `setting`, with weights of one seed."""
    workload, model, optimizer = build(MODEL)
    if setting is not None:
        apply(model, optimizer, config_of(MODEL, setting, micro_batch=SIZE), strict=False)
    return workload, model, optimizer


def peak_bytes(setting: Compressed | None) -> tuple[int, int]:
    """Return measured and predicted peak of device bytes in a step of one micro-batch."""
    ledger = Ledger.open("cpu")
    gc.collect()  # the model before is in cycles
    empty = ledger.live_bytes()
    workload, model, optimizer = started(setting)
    for _ in range(3):
        with tier(HOST):
            batch = workload.make_batch(SIZE)
        ledger.reset_peak()
        batch = tuple(each.clone() for each in batch)
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    measured = ledger.peak_allocated_bytes() - empty
    step = rewritten(MODEL, *([] if setting is None else [setting]), micro_batch=SIZE)
    return measured, step.peak_bytes(Tier.DEVICE)


if __name__ == "__main__":
    main()
