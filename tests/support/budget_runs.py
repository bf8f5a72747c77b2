"""Shared check of techniques that train where the plain model is out of memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, planned
from memtune.testing.training import build, config_of


def trains_where_the_plain_model_is_out_of_memory(path: Path, *techniques: Technique) -> None:
    """Train five steps under a budget between the two predicted peaks; check that the measured peak equals
    the prediction and that steps leave no bytes.
    """
    predicted, whole = (
        simulate(program, hardware.detect("cpu")).peak_allocated_bytes
        for program in (planned(path, *techniques)[0], plain_program(path))
    )
    ledger = Ledger.open("cpu")
    gc.collect()  # models before are in cycles
    empty = ledger.live_bytes()
    budget = empty + (predicted + whole) // 2
    workload, net, optimizer = build(path)
    tuned = apply(net, optimizer, config_of(path, *techniques), loss=workload.loss, strict=False)
    gc.collect()
    with tier(HOST):
        batches = [workload.make_batch(2)]
    with Ledger.open("cpu", budget_bytes=budget) as ledger:
        seen = []
        for _ in range(5):
            ledger.reset_peak()
            tuned.step(batches)
            seen.append((ledger.peak_allocated_bytes() - empty, ledger.live_bytes(), ledger.live_bytes(HOST)))
    assert seen[2][0] == pytest.approx(predicted, rel=0.02)
    assert seen[2] == seen[3] == seen[4]
    del tuned, net, optimizer
    gc.collect()
    workload, net, optimizer = build(path)
    plainly = apply(net, optimizer, {"settings": {}}, loss=workload.loss, strict=False)
    with Ledger.open("cpu", budget_bytes=budget), pytest.raises(torch.OutOfMemoryError):
        _steps(plainly, batches)


def _steps(tuned: Tuned, batches: list[Any]) -> None:
    for _ in range(3):
        tuned.step(batches)
