"""The sweep of budgets: techniques with a budget are compared without moves to the host."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.zoo_paths import ZOO

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from recompute_budget import BY_BUDGET, technique_of

from memtune import hardware
from memtune.program.step import Program, RankClass, Resource
from memtune.technique import Target
from memtune.testing.drift_check import recording_of

FAST_LINK = replace(
    hardware.find("h100-80g"), host_to_device_bytes_per_s=1e15, device_to_host_bytes_per_s=1e15
)
"""A swap takes less time than any recomputation."""


@pytest.mark.parametrize("kind", BY_BUDGET)
def test_rivals_with_a_budget_move_nothing_to_the_host(kind: str) -> None:
    step = recording_of(ZOO["cnn_bn"]).at(4)
    program, target = Program((RankClass(1, step),), 4), Target(FAST_LINK)
    technique = technique_of(kind, budget_bytes=int(0.85 * step.peak_bytes()), **BY_BUDGET[kind])
    after = technique.rewrite(program, technique.plan(program, target), target).step
    assert not (after.ops.resource == Resource.DEVICE_TO_HOST).any()
