"""Averages of offloaded blocks among two gloo ranks: all-reduces and CPU seconds of a step.

Each round trains every store in a process pair of its own; CPU seconds are those of rank 0's process, with
gloo's threads. `--of DIR` measures the package in another checkout, in rotation with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
STORES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "l2l": ({"kind": "l2l"}, {}),
    "stronghold": ({"kind": "stronghold", "window": 2}, {"slots": 2, "deferred": []}),
    "patrickstar": ({"kind": "patrickstar"}, {"chunk_bytes": 1 << 18, "slots": [2] * 48}),
}
BLOCKS, WIDTH, STEPS, WARM_UP = 24, 64, 12, 3


def step_of(store: str) -> tuple[int, float]:
    """Return the all-reduces of a step under `store`, and the median of its CPU seconds, on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from memtune.api import apply

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.attention(x)
            return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    states, plan = STORES[store]
    settings = {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": states}}
    config = {"settings": settings, "plan": {"offload.states": plan} if plan else {}}

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x).square().mean()
        return found

    tuned = apply(model, optimizer, config, loss=loss, strict=False)
    own, count, times = dist.all_reduce, [0], []

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return own(*args, **kwargs)

    dist.all_reduce = counted
    for _ in range(STEPS):
        count[0], begun_s = 0, time.process_time()
        tuned.step([torch.randn(2, 16, 8)])
        times.append(time.process_time() - begun_s)
    return count[0], median(times[WARM_UP:])


def main() -> None:
    """Print a row for each store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", choices=STORES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.store:
        sys.path.insert(0, str(ROOT / "tests"))
        from support.gloo import run_ranks

        print(json.dumps(run_ranks(step_of, 2, given.store, deadline_s=200)[0]))
        return
    trees = {"this": ROOT} | ({"other": given.of.resolve()} if given.of else {})
    for store in STORES:
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in trees}
        for _ in range(given.rounds):
            for name, tree in trees.items():
                ran = subprocess.run(
                    [sys.executable, __file__, "--store", store],
                    cwd=tree,
                    env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found[name].append(tuple(json.loads(ran.stdout.splitlines()[-1])))
        for name, rows in found.items():
            times = sorted(1e3 * seconds for _, seconds in rows)
            print(
                f"{store:12} {name:6} {rows[0][0]:4} all-reduces a step, {median(times):6.1f} ms of CPU"
                f" ({times[0]:.1f} to {times[-1]:.1f})"
            )


if __name__ == "__main__":
    main()
