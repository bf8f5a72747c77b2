"""`memtune search --device sim:2`: trials on two simulated devices, a config, training with it, resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.simulated_device import devices_alone, races
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.testing.training import build

pytestmark = [pytest.mark.device, pytest.mark.slow, pytest.mark.timeout(900)]
SITE = Path(__file__).parents[2] / "support" / "simulated_site"


def test_search_on_two_devices_ships_a_config_that_trains_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "tuned.yaml"
    command = [sys.executable, "-m", "memtune", "search", str(ZOO["gpt"]), "--device", "sim:2", "--json"]
    limits = ["--max-memory", "40MiB", "--trials", "1", "--axes", "recompute,sharding"]
    done = subprocess.run(
        [*command, *limits, "--executor", "local", "--out", str(out)],
        env=os.environ | {"PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    trials = [trial for trial in json.loads(done.stdout)["trials"] if trial["status"] == "ok"]
    # The limit is that of the training: memtune's own measurements use more.
    assert trials
    assert all(trial["peak_allocated_bytes"] <= trial["peak_reserved_bytes"] <= 40 << 20 for trial in trials)
    first, second = run_ranks(resumed, 2, str(out), str(tmp_path / "saved"), device="sim")
    assert first == second
    assert first["resumed"] == first["went on"]


def resumed(config: str, folder: str) -> dict[str, list[float]]:
    """Return the losses after a checkpoint, of the run that wrote it and of one that loaded it."""
    with devices_alone():
        return _resumed(config, folder)


def _resumed(config: str, folder: str) -> dict[str, list[float]]:
    device = torch.device("sim", dist.get_rank())

    def started() -> tuple[Any, Any]:
        workload, model, optimizer = build(ZOO["gpt"], device)
        return workload, apply(model, optimizer, config, loss=workload.loss, strict=False)

    def losses(workload: Any, tuned: Any, steps: range) -> list[float]:
        found = []
        for step in steps:
            torch.manual_seed(step)
            found.append(float(tuned.step([workload.make_batch(2)])))
        return found

    workload, tuned = started()
    losses(workload, tuned, range(2))
    tuned.save(folder)
    went_on = losses(workload, tuned, range(2, 4))
    workload, tuned = started()
    tuned.load(folder)
    again = losses(workload, tuned, range(2, 4))
    torch.accelerator.synchronize()
    assert races() == []
    return {"went on": went_on, "resumed": again}
