from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("search_quality_cpu")


def pool() -> dict[str, Any]:
    row = {"status": "ok", "prediction": {"samples_per_s": 8.0, "step_s": 0.5}}
    rows = [row | {"id": i, "step_s": [], "other_load": []} for i in range(3)]
    return {"case": "vit-1r", "settings": rows, "pools": [{"ids": [0, 1, 2]}]}


def round_of(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], references: list[float]
) -> bool:
    left = iter(references)

    def run(*_: Any) -> Any:
        return SimpleNamespace(
            status="ok", step_s=0.5, peak_allocated_bytes=1, other_load=0.0, reference_s=next(left)
        )

    monkeypatch.setattr(benchmark, "_undisturbed", run)
    monkeypatch.setattr(benchmark, "make_executor", lambda *_, **__: SimpleNamespace(close=lambda: None))
    kept: bool = benchmark.measure(found, lambda: None)
    return kept


def test_round_is_dropped_if_the_machine_changed_its_speed(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    found = pool()
    assert round_of(benchmark, monkeypatch, found, [0.010, 0.0105, 0.010])
    assert not round_of(benchmark, monkeypatch, found, [0.010, 0.012, 0.010])
    assert [each["step_s"] for each in found["settings"]] == [[0.5]] * 3
    assert [each["reference_s"] for each in found["settings"]] == [[0.010], [0.0105], [0.010]]


def test_setting_runs_again_if_its_only_round_is_dropped(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    found = pool()
    assert not round_of(benchmark, monkeypatch, found, [0.010, 0.010, 0.015])
    assert all(not each["step_s"] for each in found["settings"])
    assert round_of(benchmark, monkeypatch, found, [0.015, 0.015, 0.015])
    assert all(each["step_s"] == [0.5] for each in found["settings"])
