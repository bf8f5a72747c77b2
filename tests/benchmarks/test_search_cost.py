from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

from memtune.progress import Progress

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_phases_of_a_search_are_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With the phases of a dry run: a renamed one would count as the one before it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    search_cost = importlib.import_module("search_cost")
    monkeypatch.setattr(Progress, "phase", Progress.phase)  # put back at the end
    monkeypatch.setattr(search_cost, "_mark_events", lambda mark: None)
    reading, writing = os.pipe()
    arguments = [*search_cost.CASES["mlp"].arguments, "--dry-run", "--out", str(tmp_path / "tuned.yaml")]
    search_cost.run_search([*arguments, "--study", str(tmp_path / "study")], writing)
    os.close(writing)
    with os.fdopen(reading) as lines:
        phases = [phase for _, phase in map(json.loads, lines)]
    assert phases == ["import", *search_cost._PHASES.values()]


def test_steps_shorter_than_a_tick_have_no_ratio(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    search_cost = importlib.import_module("search_cost")
    run = {
        "cpu_s": {"import": 1.0, "record": 2.0},
        "wall_s": {"import": 1.0},
        "trials": 4,
        "candidates": 9,
        "step_s": 0.001,
        "load": 0.0,
    }
    row = search_cost.row_of("mlp", [run])
    assert row["record_and_score_s"] == 2.0
    assert "| CPU outside steps / in steps | – |" in search_cost.markdown([row])
