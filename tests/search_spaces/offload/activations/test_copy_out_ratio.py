"""Offloaded bytes are the ratio of the claimable bytes: by the formula, by the passes, and counted in
training.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.gloo import run_ranks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.activations.offload.selection_plan import ByteShare
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.memory.ledger import Ledger
from memtune.program.step import FOREVER, Resource, traffic_bytes
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.transfer import COUNTERS
from memtune.ssd import offload_dir
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build

PARTS, STEPS = 2, 2
SCRATCH = ("cnn_bn", "lstm")
"""Models whose kernels allocate workspace on CPU, which these recordings do not have."""
MOVES: dict[str, dict[str, Any]] = {
    "copy_out": {"kind": "copy_out", "min_bytes": 0, "ratio": 0.3},
    "copy_out, no prefetch": {"kind": "copy_out", "min_bytes": 0, "ratio": 0.3, "prefetch": 0},
    "copy_out, to SSD": {"kind": "copy_out", "min_bytes": 0, "ratio": 0.3, "target": "ssd"},
    "copy_out, large tensors": {"kind": "copy_out", "min_bytes": 20_000, "ratio": 0.3},
    "pipelined": {"kind": "pipelined", "min_bytes": 0, "ratio": 0.3},
    "tsplit": {"kind": "tsplit", "min_bytes": 64, "share": 0.8, "parts": 1},
}
LINKS = {
    "device_to_host": Resource.DEVICE_TO_HOST,
    "ssd_write": Resource.SSD_WRITE,
    "ssd_read": Resource.SSD_READ,
}
slow = pytest.mark.slow


@cache
def candidate(
    model: str, moves: str, recompute: str = "none", states: str = "none", ratio: float = 0.0
) -> Candidate:
    """Return a candidate with the given ratio; on two ranks with sharded or replicated states."""
    document: dict[str, Any] = {
        "execution": {"micro_batch": 2, "accumulate": PARTS},
        "recompute": {"kind": recompute},
    }
    document["sharding"] = {"states": {"kind": states}}
    document["offload"] = {"activations": {**MOVES[moves], **({"ratio": ratio} if ratio else {})}}
    here = Target(hardware.detect("cpu"), 1 if states == "none" else 2)
    found = Rewriter(recording_of(ZOO[model]), here).candidate(Choice.from_document(document))
    assert isinstance(found, Candidate), found
    return found


def predicted(found: Candidate) -> dict[str, int]:
    """Return the predicted bytes by link in a step."""
    step = found.program.step
    n_bytes = traffic_bytes(step, PARTS)
    return {link: int(n_bytes[step.ops.resource == resource].sum()) for link, resource in LINKS.items()}


def wanted_bytes(model: str, moves: str, recompute: str, states: str) -> int:
    """Return the ratio of the bytes offloaded at ratio 1: undivided tensors; without recomputation all saved
    ones of blocks.
    """
    every = predicted(candidate(model, moves, recompute, states, 1.0))["device_to_host"] // PARTS
    if recompute == "none" and not MOVES[moves]["min_bytes"]:
        step = recording_of(ZOO[model]).at(2)
        saved = set(step.saves.storage[step.saves.block >= 0].tolist()) - set(step.partly_written.tolist())
        assert every == sum(
            int(step.storages.bytes[each]) for each in saved if step.storages.held_until[each] != FOREVER
        )
    return PARTS * round(MOVES[moves]["ratio"] * every)


def on_ranks(path: str, config: dict[str, Any], directory: str = "") -> tuple[dict[str, int], int]:
    """Return the bytes by link of the last step, and its peak."""
    if directory:
        os.environ[offload_dir.VARIABLE] = directory
    torch.set_num_threads(1)
    gc.collect()
    ledger = Ledger.open("cpu")
    empty = ledger.live_bytes()
    workload, model, optimizer = build(Path(path))
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    for step in range(STEPS):
        torch.manual_seed(step)
        with tier(HOST):
            batches = [workload.make_batch(2) for _ in range(PARTS)]
        COUNTERS.take()
        ledger.reset_peak()
        tuned.step(batches)
    moved, peak = COUNTERS.take(), ledger.peak_allocated_bytes() - empty
    del tuned, model, optimizer, workload, batches
    gc.collect()
    return moved, peak


def check(model: str, moves: str, recompute: str = "none", states: str = "none", directory: str = "") -> None:
    """Check counted bytes on every rank against prediction and formula, and the peak within 2 %."""
    found = candidate(model, moves, recompute, states)
    bytes_of = predicted(found)
    if "ratio" in MOVES[moves]:
        assert bytes_of["device_to_host"] == wanted_bytes(model, moves, recompute, states)
    config = {
        "settings": found.choice.dump(),
        "plan": {slot: plan.document() for slot, plan in found.plans.items() if not plan.is_empty},
    }
    arguments = str(ZOO[model]), config, directory
    runs = [on_ranks(*arguments)] if states == "none" else run_ranks(on_ranks, 2, *arguments)
    for moved, peak in runs:
        assert {link: moved.get(link, 0) for link in LINKS} == bytes_of
        assert moved["host_to_device"] - bytes_of["device_to_host"] == uploads(model)
        if model not in SCRATCH:
            assert peak == pytest.approx(
                simulate(found.program, hardware.detect("cpu")).peak_allocated_bytes, rel=0.02
            )


def uploads(model: str) -> int:
    """Return the bytes of a step's batches."""
    step = recording_of(ZOO[model]).at(2)
    return PARTS * int(step.ops.traffic_bytes[step.ops.resource == Resource.HOST_TO_DEVICE].sum())


pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.native_ledger,
]


@pytest.mark.parametrize(
    "moves", [each if each in ("copy_out", "pipelined") else pytest.param(each, marks=slow) for each in MOVES]
)
@pytest.mark.parametrize(
    "recompute", ["none", *(pytest.param(each, marks=slow) for each in ("full", "selective"))]
)
def test_offloaded_bytes_are_predicted_and_follow_the_formula(
    moves: str, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mechanism, with accumulation; `test_formula_fails_without_cut_tensors` switches it off."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    check("gpt", moves, recompute, directory=str(tmp_path))


@slow
@pytest.mark.parametrize("moves", ["copy_out", "pipelined"])
@pytest.mark.parametrize("model", ["hf_llama", "cnn_bn", "lora", "lstm", "tied", "inplace_views"])
def test_ratio_with_blocks_of_different_sizes(model: str, moves: str) -> None:
    check(model, moves)


@slow
@pytest.mark.parametrize("states", ["ddp", "fsdp"])
@pytest.mark.parametrize("moves", ["copy_out", "copy_out, to SSD", "pipelined", "tsplit"])
def test_ratio_on_ranks(moves: str, states: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    check("gpt", moves, states=states, directory=str(tmp_path))


@pytest.mark.parametrize("moves", ["copy_out", pytest.param("pipelined", marks=slow)])
def test_formula_fails_without_cut_tensors(moves: str) -> None:
    """Undivided tensors alone do not give the ratio."""
    candidate.cache_clear()
    with patch.object(ByteShare, "partial_tensor", lambda self: None), pytest.raises(AssertionError):
        check("gpt", moves)
    candidate.cache_clear()
