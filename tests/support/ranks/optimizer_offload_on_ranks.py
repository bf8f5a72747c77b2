"""Shared checks of optimizer offload on several ranks: bits, link bytes and peak on gloo ranks against
predictions.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gloo import run_ranks
from support.ranks.gloo_memory import are_within
from support.suites.sharded_suite import SPARE_BYTES, peaks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record import CompiledRecordings, PrecisionRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.program.step import Phase, Resource, Tier
from memtune.runtime import transfer
from memtune.runtime.memory_tiers import HOST, tier
from memtune.ssd import offload_dir
from memtune.technique import Target, Technique
from memtune.testing.drift_check import recording_of
from memtune.testing.training import Run, build, differences, settings_of, train_under
from memtune.workload import Workload

RANKS, STEPS = 2, 3
LINKS = {
    "ssd_read": Resource.SSD_READ,
    "ssd_write": Resource.SSD_WRITE,
    "device_to_host": Resource.DEVICE_TO_HOST,
    "host_to_device": Resource.HOST_TO_DEVICE,
}


def on_rank(
    directory: str, path: str, config: dict[str, Any], reference: dict[str, Any], ledger: bool, parts: int
) -> dict[str, Any]:
    """Return both runs, the link traffic of a step of the first, and its peaks; a step has `parts`
    micro-batches.
    """
    os.environ[offload_dir.VARIABLE] = directory
    wanted = train_under(Path(path), reference, steps=STEPS)
    moved = []
    for steps in (STEPS + 1, STEPS):
        transfer.COUNTERS.take()
        run = train_under(Path(path), config, steps=steps, micro_batches=parts)
        moved.append(transfer.COUNTERS.take())
    step = {link: moved[0].get(link, 0) - moved[1].get(link, 0) for link in LINKS}
    if parts != 2:  # bits are compared with accumulation
        run = train_under(Path(path), config, steps=STEPS)
    measured = peaks(path, {"": config["settings"]}, parts, {"": config["plan"]})[""][1] if ledger else []
    on_host = host_peak(Path(path), config, parts) if ledger else 0
    return {"run": run, "wanted": wanted, "step": step, "peaks": measured, "host_peak": on_host}


def host_peak(path: Path, config: dict[str, Any], parts: int) -> int:
    """Return the peak of the host tier in a fifth step."""
    ledger = Ledger.open("cpu")
    gc.collect()
    empty = ledger.live_bytes(HOST)
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    for _ in range(5):
        with tier(HOST):
            batches = [workload.make_batch(2) for _ in range(parts)]
        ledger.reset_peak()
        tuned.step(batches)
    return ledger.peak_allocated_bytes(HOST) - empty


def check_on_ranks(
    directory: Path,
    technique: Technique,
    sharding: Technique,
    reference: Technique,
    *,
    model: str = "gpt",
    peak_rel: float = 0.0,
    host_rel: float | None = None,
    parts: int = 1,
    tolerance: float = 0.0,
    budget_bytes: int | None = None,
) -> None:
    """Raise AssertionError if training on ranks differs from the reference's, or bytes and peaks from the
    prediction.

    Args:
        directory: For tensors on SSD.
        technique: Technique under test.
        sharding: State sharding or replication.
        reference: Techniques of the reference run under the same sharding.
        model: Model of the zoo.
        peak_rel: Relative tolerance of the device peak above the prediction.
        host_rel: Relative tolerance of the host peak in both directions; None skips it.
        parts: Micro-batches of the steps whose bytes and peaks are compared.
        tolerance: Tolerance of weights and losses.
        budget_bytes: Budget of the plans.
    """
    path = ZOO[model]
    rewriter = Rewriter(
        recording_of(path),
        Target(hardware.detect("cpu"), RANKS, budget_bytes),
        in_precision=PrecisionRecordings(CompiledRecordings(Workload.load(path))),
    )
    execution = {"micro_batch": 2, "accumulate": parts}
    found = rewriter.candidate(
        Choice.from_document({**settings_of(sharding, technique), "execution": execution})
    )
    assert isinstance(found, Candidate), found
    plan = {slot: plan.document() for slot, plan in found.plans.items()}
    configs = (
        {"settings": settings_of(sharding, technique), "plan": plan},
        {"settings": settings_of(sharding, reference)},
    )
    ledger = cpu_allocator.available() is None
    ranks = run_ranks(on_rank, RANKS, str(directory), str(path), *configs, ledger, parts, deadline_s=200)
    step = found.program.step
    times = np.where(step.ops.phase < Phase.BOUNDARY, parts, 1)
    predicted = {
        link: int((times * step.ops.traffic_bytes)[step.ops.resource == each].sum())
        for link, each in LINKS.items()
    }
    wanted_peak, wanted_host = step.peak_bytes(), step.peak_bytes(Tier.HOST)
    for rank in ranks:
        assert not differences(without_gradients(rank["run"]), without_gradients(rank["wanted"]), tolerance)
        assert rank["step"] == pytest.approx(predicted), (rank["step"], predicted)
        low, high = wanted_peak * (1 - peak_rel), wanted_peak * (1 + peak_rel) + SPARE_BYTES
        assert not ledger or are_within(rank["peaks"], low, high), (rank["peaks"], wanted_peak)
        if ledger and host_rel is not None:
            assert rank["host_peak"] == pytest.approx(wanted_host, rel=host_rel)


def without_gradients(run: Run) -> Run:
    """Return the run without offloaded gradients, which are on no rank's device."""
    return replace(run, gradients=[])
