"""The benchmark of predicted peaks: a case of its grid for real, and what its models have shown to be hard to
predict.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memtune.search_spaces.recompute.every_nth import EveryNth
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Technique
from memtune.testing.drift_check import drift

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = BENCHMARKS / "predict_models"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.native_ledger
@pytest.mark.slow
def test_predict_one_case_from_recording_to_page() -> None:
    import predict
    from predict_grid import Case
    from predict_report import markdown

    # Kept convolutions with scratch, under autocast.
    rows, about = predict.compare(
        MODELS / "convnext.py", [Case(MODELS / "convnext.py", "selective", "none", 3)], slots=1
    )
    (row,) = rows
    assert (row.status, about["rung"]) == ("ok", "fake")
    assert row.error is not None
    assert abs(row.error) < 0.005
    assert row.affine_bytes == pytest.approx(row.measured_bytes, rel=0.03)

    wrong = replace(row, model="wrong", predicted_bytes=2 * (row.measured_bytes or 0))
    found = predict.document([row, wrong], {"convnext": about}, None)
    assert found["summary"]["predicted"]["worst"] == 1.0
    assert json.loads(predict.dumped(found))["rows"][1]["error"] == 1.0
    page = markdown(found)
    assert "- wrong, selective, none, batch 3: +100.00%" in page
    assert "- convnext" not in page


@pytest.mark.parametrize("technique", [Selective(), EveryNth()], ids=lambda each: each.kind)
def test_predict_checkpoint_inside_recomputed_block(technique: Technique) -> None:
    assert drift(MODELS / "checkpointed.py", technique) == ""


@pytest.mark.parametrize("technique", [Selective(), Full()], ids=lambda each: each.kind)
def test_predict_recomputes_each_call_of_shared_block(technique: Technique) -> None:
    assert drift(MODELS / "tied.py", technique) == ""
