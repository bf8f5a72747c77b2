"""What tests of offload on several ranks share: bits, link bytes and peak on gloo ranks against what is predicted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gloo import run_ranks
from sharded_suite import SPARE_BYTES, peaks
from zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.candidates import Candidate, Choice, Rewriter
from memtune.program import Resource
from memtune.runtime import offload_dir, shim, transfer
from memtune.technique import Target, Technique
from memtune.testing.drift import recording_of
from memtune.testing.training import Run, differences, settings_of, train_under

RANKS, STEPS = 2, 3
LINKS = {
    "ssd_read": Resource.SSD_READ, "ssd_write": Resource.SSD_WRITE, "device_to_host": Resource.DEVICE_TO_HOST,
    "host_to_device": Resource.HOST_TO_DEVICE,
}  # fmt: skip


def on_rank(directory: str, path: str, config: dict[str, Any], reference: dict[str, Any], ledger: bool) -> dict[str, Any]:
    """Both runs, what a step of the first moved on each link, and its peaks."""
    os.environ[offload_dir.VARIABLE] = directory
    wanted = train_under(Path(path), reference, steps=STEPS)
    moved = []
    for steps in (STEPS, STEPS + 1):
        transfer.COUNTERS.take()
        run = train_under(Path(path), config, steps=steps, micro_batches=1)
        moved.append(transfer.COUNTERS.take())
    step = {link: moved[1].get(link, 0) - moved[0].get(link, 0) for link in LINKS}
    run = train_under(Path(path), config, steps=STEPS)
    measured = peaks(path, {"": config["settings"]}, plans={"": config["plan"]})[""][1] if ledger else []
    return {"run": run, "wanted": wanted, "step": step, "peaks": measured}


def check_on_ranks(
    directory: Path, technique: Technique, sharding: Technique, reference: Technique, *, model: str = "gpt", peak_rel: float = 0.0
) -> None:
    """Raise AssertionError where training on ranks differs from `reference`'s, or bytes and peak from what is predicted."""
    path = ZOO[model]
    rewriter = Rewriter(recording_of(path), Target(hardware.detect("cpu"), RANKS), validate=False)
    execution = {"micro_batch": 2, "accumulate": 1}
    found = rewriter.candidate(Choice.from_document({**settings_of(sharding, technique), "execution": execution}))
    assert isinstance(found, Candidate), found
    plan = {slot: plan.decisions for slot, plan in found.plans.items()}
    configs = ({"settings": settings_of(sharding, technique), "plan": plan}, {"settings": settings_of(sharding, reference)})
    ledger = shim.available() is None
    ranks = run_ranks(on_rank, RANKS, str(directory), str(path), *configs, ledger, deadline_s=200)
    step = found.program.step
    predicted = {link: int(step.op_traffic_bytes[step.op_resource == resource].sum()) for link, resource in LINKS.items()}
    wanted_peak = step.peak_bytes()
    for rank in ranks:
        assert not differences(without_gradients(rank["run"]), without_gradients(rank["wanted"]))
        assert rank["step"] == pytest.approx(predicted), (rank["step"], predicted)
        low, high = wanted_peak * (1 - peak_rel), wanted_peak * (1 + peak_rel) + SPARE_BYTES
        assert all(low <= peak <= high for peak in rank["peaks"]), (rank["peaks"], wanted_peak)


def without_gradients(run: Run) -> Run:
    """Those that have left are on no rank's device."""
    return replace(run, gradients=[])
