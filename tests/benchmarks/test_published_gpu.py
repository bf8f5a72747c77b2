"""Published measurements: each case can be expressed and follows its source; ranges from other sources."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memtune.hardware import known_name

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def own_rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((BENCHMARKS / "published/gpu_rows.json").read_text())
    return found


def test_rows_name_their_source_a_model_file_and_a_known_gpu() -> None:
    rows = own_rows()
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["where"]
        assert (BENCHMARKS / "published/gpu_models" / row["model"]).exists()
        assert known_name(row["gpu_type"]) == row["gpu_type"]
        execution = row["config"]["settings"]["execution"]
        samples = row["sizes"].get("GB", row["sizes"].get("B", execution["micro_batch"] * row["gpus"]))
        assert execution["micro_batch"] * execution["accumulate"] * row["gpus"] == samples


def test_mended_cases_change_what_their_source_says_and_nothing_else() -> None:
    import published_gpu

    settings = {"execution": {"micro_batch": 2, "accumulate": 1}, "recompute": {"kind": "full"}}
    case = published_gpu._from_folder(
        {
            "id": "tune-3b-packed-chunked-ac",
            "model": "llama.py",
            "env": {"K_D": "3072"},
            "cfg": {"memtune": 1, "settings": settings},
            "gpu_type": "a100-80g",
            "gpus": 1,
            "alloc": 24.9,
        }
    )
    assert case.sizes == {"D": "3072", "LOSS": "compiled"}
    assert case.config["settings"] == {
        **settings,
        "execution": {**settings["execution"], "compile": "blocks"},
    }


def row_of(source: str, ratio: float) -> Any:
    import published_gpu

    case = published_gpu.Case(source, source, "", {}, {}, "a100-80g", 1, {"allocated": 10.0})
    return published_gpu.Row(case, "ok", {"allocated": 10.0 * ratio}, {}, {})


def test_factors_hold_nine_of_ten_and_each_source_is_judged_by_the_others() -> None:
    import published_gpu

    rows = [row_of("exact", 1 + place / 1000) for place in range(19)] + [row_of("off", 2.0)]
    low, high = published_gpu.factors(rows, "allocated")
    assert 0.97 < low < high < 1.01
    assert published_gpu.held_by_others(rows, "allocated") == 0.0


def test_ranges_hold_nine_of_ten_of_every_source_and_are_tried_on_the_others() -> None:
    from published_ranges import derive

    many, few = [place / 1000 for place in range(1, 101)], [0.2, 0.3]
    found = derive({"many": many, "few": few})
    assert found.half_width == 0.3
    assert found.by_source == {"many": (0.3, 1.0), "few": (0.091, 0.0)}
    assert found.factors == (0.74, 1.35)
    assert found.held == 0.5


def test_ranges_without_trials_hold_those_that_the_committed_results_give() -> None:
    from published_ranges import derive_all

    from memtune.autotune.predict.calibration import (
        UNCALIBRATED_DEVICE,
        UNCALIBRATED_PEAK,
        UNCALIBRATED_RESERVED,
    )

    rows = json.loads((BENCHMARKS / "results/published-gpu.json").read_text())["rows"]
    found = derive_all(rows)
    low, high = found["torch"].factors
    assert UNCALIBRATED_PEAK == UNCALIBRATED_RESERVED
    assert UNCALIBRATED_PEAK[0] <= low
    assert high <= UNCALIBRATED_PEAK[1]
    assert found["device"].factors == UNCALIBRATED_DEVICE


def test_cases_without_a_predicted_measurement_are_named() -> None:
    import published_gpu

    row = row_of("memory", 1.0)
    timed = replace(row.case, measured={"allocated": 10.0, "step": 1.0})
    assert not published_gpu._is_missing(row.case, row)
    assert published_gpu._is_missing(row.case, None)
    assert published_gpu._is_missing(timed, row)
    assert not published_gpu._is_missing(timed, replace(row, predicted={}, reason="no setting expresses it"))


def test_results_with_rows_of_an_absent_folder_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import published_gpu

    monkeypatch.setenv(published_gpu.FOLDER, str(tmp_path / "absent"))
    results, said = tmp_path / "results.json", list[str]()
    theirs = replace(row_of("theirs", 1.0), low={"allocated": 9.0}, high={"allocated": 11.0})
    published_gpu._write(results, [theirs], "")
    before = results.read_text()
    for output in (["--json", str(results)], ["--plot", str(results.with_suffix(".svg"))]):
        assert published_gpu.main(["--only", *output], say=said.append) == 2
    assert results.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert all("1 rows" in each and published_gpu.FOLDER in each for each in said)


def test_bars_name_what_is_missed_with_its_cause() -> None:
    import published_gpu

    column = {"median_error": 0.02, "worst_error": 0.05, "half_width": 0.14, "inside_interval": 0.97}
    found = {
        "device": column,
        "step": {"within_25_percent": 0.97},
        "sources": {"titan": {"rank_correlation": 0.94}, "nano": {"rank_correlation": 1.0}},
    }
    missed = [bar for bar in published_gpu.bars(found) if not bar.is_met]
    names = [bar.name for bar in missed]
    assert names == ["device: half width at most", "step, titan: rank correlation at least"]
    assert all(bar.cause for bar in missed)


def test_pairs_in_order_leave_out_steps_that_are_nearly_equal() -> None:
    import published_gpu

    assert published_gpu.pairs_in_order([1.0, 1.04, 2.0], [1.1, 1.0, 3.0]) == 1.0
    assert published_gpu.pairs_in_order([1.0, 1.1, 2.0], [1.1, 1.0, 3.0]) == pytest.approx(2 / 3)
    assert published_gpu.pairs_in_order([1.0, 1.01], [1.1, 1.0]) is None
