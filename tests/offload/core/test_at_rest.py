"""Weights that a config keeps off the device start on the host or SSD, and the device never holds all."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import Tensor, nn

import memtune
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces.offload.states import angel_ptm, l2l, patrickstar, zero_infinity
from memtune.ssd import offload_dir
from memtune.technique import Technique
from memtune.testing.training import config_of
from memtune.workload import Workload

FILE = Path(__file__).parents[2] / "support" / "models" / "weights_in_blocks.py"
WEIGHTS_BYTES, BLOCK_BYTES = 24 * 2 * (256 * 256 + 256) * 4, 2 * (256 * 256 + 256) * 4
TECHNIQUES = {
    "l2l": l2l.L2L(),
    "zero_infinity, ssd": zero_infinity.ZeroInfinity(parameters="ssd"),
    "patrickstar": patrickstar.PatrickStar(),
    "angel_ptm": angel_ptm.AngelPtm(page_mib=0.125),
}


def trained(config: dict[str, Any], start: str) -> tuple[list[Tensor], dict[str, Tensor], int, int]:
    """Return losses, weights, and the peaks of `apply` on device and host."""
    workload, ledger = Workload.load(FILE), Ledger.open("cpu")
    gc.collect()
    before, host_before = ledger.live_bytes(), ledger.live_bytes(HOST)
    ledger.reset_peak()
    torch.manual_seed(7)
    with tier(HOST):
        model = memtune.deferred(workload.build_model) if start == "deferred" else workload.build_model()
    optimizer = workload.make_optimizer(model)
    tuned = memtune.apply(model, optimizer, config, loss=workload.loss, strict=False, device="cpu")
    peak = ledger.peak_allocated_bytes() - before
    host_peak = ledger.peak_allocated_bytes(HOST) - host_before
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        losses.append(tuned.step([workload.make_batch(2)]))
    return losses, tuned.state_dict()["model"], peak, host_peak


@pytest.mark.drawn(4)
@pytest.mark.parametrize("start", ["deferred", "host"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_device_holds_a_block_and_the_rest(
    name: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    wanted = trained({"settings": {}}, "host")
    assert wanted[2] > WEIGHTS_BYTES
    losses, weights, peak, host_peak = trained(config_of(FILE, TECHNIQUES[name]), start)
    assert losses == wanted[0]
    assert all(torch.equal(weights[key], each) for key, each in wanted[1].items())
    assert peak < 3 * BLOCK_BYTES
    if name == "l2l":
        # Once, and not a second time; moments exist from the first step on.
        assert host_peak < 1.1 * WEIGHTS_BYTES
    elif name.endswith("ssd") and start == "deferred":
        assert host_peak < 0.2 * WEIGHTS_BYTES


def peaks_of_ranks(config: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """Return losses, weights and the device's peak until the first step, of a deferred model."""
    found = trained(config, "deferred")
    losses = [loss.clone() for loss in found[0]]
    for loss in losses:
        dist.all_reduce(loss)
    return losses, found[1], found[2]


def with_fsdp(technique: Technique | None) -> dict[str, Any]:
    offload = {} if technique is None else {"offload": {"states": technique.model_dump()}}
    return {"settings": {"sharding": {"states": {"kind": "fsdp"}}, **offload}}


def test_shards_start_on_the_host() -> None:
    (wanted, plain, whole), _ = run_ranks(peaks_of_ranks, 2, with_fsdp(None))
    (losses, weights, peak), _ = run_ranks(peaks_of_ranks, 2, with_fsdp(l2l.L2L()))
    assert whole > WEIGHTS_BYTES / 2
    assert peak < 2 * BLOCK_BYTES
    assert losses == wanted
    assert all(torch.equal(weights[key], each) for key, each in plain.items())


@pytest.mark.parametrize("is_deferred", [False, True])
def test_pretrained_weights_have_one_place_on_the_host(is_deferred: bool, tmp_path: Path) -> None:
    """`from_pretrained` maps the files, from where each weight is copied to its place."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)

    def build() -> nn.Module:
        model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        return model

    wanted, ledger = build().state_dict(), Ledger.open("cpu")
    weights_bytes = sum(each.nbytes for each in build().parameters())
    gc.collect()
    before, host_before = ledger.live_bytes(), ledger.live_bytes(HOST)
    ledger.reset_peak()
    with tier(HOST):
        model = memtune.deferred(build) if is_deferred else build()
    tuned = memtune.apply(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        {"settings": {"offload": {"states": l2l.L2L().model_dump()}}},
        strict=False,
        device="cpu",
    )
    assert ledger.peak_allocated_bytes() - before < weights_bytes / 4
    assert ledger.peak_allocated_bytes(HOST) - host_before < 1.1 * weights_bytes
    found = tuned.state_dict()["model"]
    assert all(torch.equal(found[key], each) for key, each in wanted.items())
