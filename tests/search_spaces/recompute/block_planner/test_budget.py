"""Passes of later techniques run once per step, whatever program it is part of and whatever passes follow."""

from __future__ import annotations

from typing import Any

import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.program.step import Program, RankClass
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.recompute._block_planner import budget
from memtune.search_spaces.recompute._block_planner.budget import apply_later_passes
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.testing.drift_check import recording_of


def test_later_passes_share_results_of_common_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []

    def run_pass(program: Program, technique: Any, *more: Any) -> Any:
        passes.append(technique.kind)
        return real(program, technique, *more)

    real = budget.run_pass
    monkeypatch.setattr(budget, "run_pass", run_pass)
    step, h100 = recording_of(ZOO["tied"]).at(2), hardware.find("h100-80g")
    divided, on_host = Fsdp(kind="fsdp"), OptimizerCpu(kind="optimizer_cpu")

    def after(*later: Any, accumulate: int = 1) -> Program:
        return apply_later_passes(Program((RankClass(4, step),), 2, accumulate), later, h100)

    first = after(divided)
    assert passes == ["fsdp"]
    assert after(divided) is first
    both = after(divided, on_host)
    assert passes == ["fsdp", "optimizer_cpu"]
    assert after(divided, on_host) is both
    assert after(divided, accumulate=2) is not first  # another program
    assert passes == ["fsdp", "optimizer_cpu", "fsdp"]
