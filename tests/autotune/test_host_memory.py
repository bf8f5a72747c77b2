"""A host with too little memory is said before the run, with the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import search_world
from zoo_paths import ZOO

from memtune.autotune import setup as setups
from memtune.autotune.candidates import Choice
from memtune.autotune.host_memory import too_little
from memtune.autotune.options import PlanOptions
from memtune.autotune.planning import plan
from memtune.autotune.scoring import Scored, Scorer
from memtune.runtime.host_memory import available_bytes
from memtune.technique import Reason
from memtune.units import format_bytes

ON_HOST = {"execution": {"micro_batch": 4}, "offload": {"states": {"kind": "zero_offload"}}}


def test_what_the_host_cannot_hold_is_refused_with_the_numbers_of_all_its_ranks() -> None:
    made = search_world.rewriter("gpt")
    choice = Choice.from_document(ON_HOST)
    fitting = Scorer(made).score(choice)
    assert isinstance(fitting, Scored)
    needed = fitting.prediction.host_peak_bytes
    assert isinstance(Scorer(made, host_bytes=needed).score(choice), Scored)
    for level in ("coarse", "events"):
        refused = Scorer(made, host_bytes=needed - 1).score(choice, level=level)  # type: ignore[arg-type]
        assert isinstance(refused, Reason)
        assert f"needs {format_bytes(needed)} of host memory, and {format_bytes(needed - 1)} are available" in str(refused)
    several = replace(made.target, ranks=2)
    shared = too_little(fitting.prediction, several, 2 * needed - 1)
    assert f"{format_bytes(2 * needed)} of host memory for 2 ranks of {format_bytes(needed)} each" in str(shared)
    assert too_little(fitting.prediction, several, 2 * needed) is None


def test_a_plan_says_it_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (available_bytes() or 0) > 0
    config = tmp_path / "config.yaml"
    config.write_text("memtune: 1\nsettings:\n  execution: {micro_batch: 4}\n  offload: {states: {kind: zero_offload}}\n")
    monkeypatch.setattr(setups, "available_bytes", lambda: 1000)
    found = plan(PlanOptions(workload=str(ZOO["gpt"]), config=config, device="cpu")).config
    assert found is not None
    assert found.status == "unfit"
    assert f"of host memory, and {format_bytes(1000)} are available" in found.reason
