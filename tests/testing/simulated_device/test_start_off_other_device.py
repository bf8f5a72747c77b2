"""Weights that a config keeps off the device start on the host or SSD, under a device that is not current."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.simulated_device import devices_alone, races

import memtune
from memtune.memory.ledger import Ledger
from memtune.runtime import HOST, tier
from memtune.search_spaces.offload.states import angel_ptm, l2l, patrickstar, zero_infinity
from memtune.ssd import offload_dir
from memtune.technique import Technique
from memtune.testing.training import config_of
from memtune.workload import Workload

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]
FILE = Path(__file__).parents[2] / "support" / "models" / "weights_in_blocks.py"
WEIGHTS_BYTES, BLOCK_BYTES = 24 * 2 * (256 * 256 + 256) * 4, 2 * (256 * 256 + 256) * 4
TECHNIQUES = {
    "l2l": l2l.L2L(),
    "zero_infinity, ssd": zero_infinity.ZeroInfinity(parameters="ssd"),
    "patrickstar": patrickstar.PatrickStar(),
    "angel_ptm": angel_ptm.AngelPtm(page_mib=0.125),
}
Trained = tuple[list[float], dict[str, torch.Tensor], int]


def trained(config: dict[str, Any], start: str, device: str) -> Trained:
    """Return losses, weights, and the device's peak while `apply` runs."""
    workload = Workload.load(FILE)
    gc.collect()
    with Ledger.open(device) as ledger:
        before = ledger.live_bytes()
        torch.manual_seed(7)
        with tier(HOST):
            model = memtune.deferred(workload.build_model) if start == "deferred" else workload.build_model()
        optimizer = workload.make_optimizer(model)
        tuned = memtune.apply(model, optimizer, config, loss=workload.loss, strict=False, device=device)
        peak = ledger.peak_allocated_bytes() - before
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            losses.append(float(tuned.step([workload.make_batch(2)])))
        weights = {name: value.cpu() for name, value in tuned.state_dict()["model"].items()}
    return losses, weights, peak


@pytest.mark.drawn(2)
@pytest.mark.parametrize("start", ["deferred", "host"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_device_holds_a_block_and_the_rest(
    name: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    wanted = trained({"settings": {}}, "host", "sim:1")
    assert wanted[2] > WEIGHTS_BYTES
    config = config_of(FILE, TECHNIQUES[name], device="sim")
    losses, weights, peak = trained(config, start, "sim:1")
    gc.collect()
    assert losses == wanted[0]
    assert all(torch.equal(weights[key], each) for key, each in wanted[1].items())
    assert peak < 3 * BLOCK_BYTES


def on_rank(settings: dict[str, Any]) -> Trained:
    with devices_alone():
        torch.accelerator.set_device_index(0)
        found = trained({"settings": settings}, "deferred", f"sim:{dist.get_rank()}")
    assert races() == []
    return found


def test_shards_start_on_the_host() -> None:
    sharded = {"sharding": {"states": {"kind": "fsdp"}}}
    technique: Technique = l2l.L2L()
    plain, _ = run_ranks(on_rank, 2, sharded, device="sim")
    found, _ = run_ranks(on_rank, 2, {**sharded, "offload": {"states": technique.model_dump()}}, device="sim")
    assert plain[2] > WEIGHTS_BYTES / 2
    assert found[2] < 2 * BLOCK_BYTES
    assert found[0] == plain[0]
    assert all(torch.equal(found[1][name], each) for name, each in plain[1].items())
