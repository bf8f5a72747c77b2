"""Models whose forward updates a frozen copy of the encoder, and a queue or bank: predicted peaks are
measured ones, values are those of plain training.
"""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_cpu import CPU

from memtune.api import apply
from memtune.autotune.record import record
from memtune.autotune.space import Candidate, Choice, Rewriter
from memtune.memory import Ledger, WorkspaceTable
from memtune.runtime import HOST, tier
from memtune.technique import Reason, Target
from memtune.testing.training import build
from memtune.workload import Workload

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.native_ledger,
]
FILE = Path(__file__).parents[3] / "support" / "models" / "recompute" / "momentum_encoders.py"
SIZE = 8


@cache
def candidate(name: str, kind: str) -> Candidate | Reason:
    table = WorkspaceTable.cached(threads=1)
    recording = record(Workload.load(f"{FILE}:{name}"), workspace=table, sizes=(SIZE,))
    document = {"execution": {"micro_batch": SIZE}, "recompute": {"kind": kind}}
    target = Target(CPU, 1, int(0.85 * recording.at(SIZE).peak_bytes()))
    return Rewriter(recording, target).candidate(Choice.from_document(document))


def trained(name: str, config: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return the peak of each step in bytes, and the state after them."""
    gc.collect()
    ledger = Ledger.open("cpu")
    empty, peaks = ledger.live_bytes(), []
    workload, model, optimizer = build(f"{FILE}:{name}")  # type: ignore[arg-type]
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    for step in range(4):
        torch.manual_seed(step)
        with tier(HOST):
            batches = [workload.make_batch(SIZE)]
        ledger.reset_peak()
        tuned.step(batches)
        del batches
        peaks.append(ledger.peak_allocated_bytes() - empty)
    return peaks, tuned.state_dict()["model"]


def test_schedule_of_a_forward_that_replaces_a_buffer_is_refused() -> None:
    assert "sets a buffer" in str(candidate("queue", "checkmate"))  # generated code would not


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("queue", "planned"), ("bank", "planned"), ("bank", "checkmate"), ("two_views", "dtr")],
)
def test_predicted_peak_is_the_measured_one(name: str, kind: str) -> None:
    found = candidate(name, kind)
    assert isinstance(found, Candidate), found
    plans = {slot: plan.document() for slot, plan in found.plans.items() if not plan.is_empty}
    peaks, state = trained(name, {"settings": {"recompute": {"kind": kind}}, "plan": plans})
    assert peaks[-1] == pytest.approx(found.program.step.peak_bytes(), rel=1e-3)
    for key, value in trained(name, {"settings": {}})[1].items():
        assert torch.equal(state[key], value), key
