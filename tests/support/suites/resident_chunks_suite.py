"""Shared checks of chunks that are resident on the device with their optimizer state and are updated
there.
"""

from __future__ import annotations

from pathlib import Path

import torch
from support.suites.block_offload_suite import OWN

from memtune.autotune.record.recording_session import Trace, start_session
from memtune.autotune.search.dry_runs import traced_under
from memtune.config.tuned_config import load_config
from memtune.program.step import Step
from memtune.technique import Plan, Technique
from memtune.testing.drift_check import compare, recording_of
from memtune.testing.training import settings_of, train, train_under
from memtune.workload.workload import Workload


def split_block_bytes(step: Step, n_resident: int) -> tuple[list[int], list[int], int]:
    """Return bytes of each resident weight of a block and of each other weight in a plain step; and of all
    weights in no block.
    """
    inside = [int(step.storages.bytes[p.storage]) for p in step.parameters if p.block >= 0]
    outside = sum(int(step.storages.bytes[p.storage]) for p in step.parameters if p.block < 0)
    return inside[:n_resident], inside[n_resident:], outside


def check_resident(model: Path, technique: Technique, plan: Plan, step: Step) -> None:
    """Check that training under `plan` equals `step`, op by op, and is bitwise equal to the same update in
    place.
    """
    document = {"settings": settings_of(technique), "plan": {"offload.states": plan.document()}}
    session = start_session(Workload.load(model), recording_of(model).rung)
    trace = traced_under(session, load_config(document), 2)
    assert isinstance(trace, Trace)
    assert not compare(step, trace.step)
    got, wanted = train_under(model, document), train(model, OWN)
    assert all(torch.equal(one, other) for one, other in zip(got.losses, wanted.losses, strict=True))
    assert all(torch.equal(got.weights[name], value) for name, value in wanted.weights.items())
