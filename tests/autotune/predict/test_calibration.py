"""Calibration by trials: the probability of running out of memory, and op times by class and size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from support.search import prepared_search

from memtune.autotune.predict.calibration import (
    Calibration,
    SearchErrors,
    calibration_of,
    load_searches,
    oom_probability,
    residuals,
    store_search,
)
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.scoring import Scorer, predict_again
from memtune.hardware.calibration_cache import Curve
from memtune.hardware.cpu_probe import CpuRates
from memtune.hardware.op_clock import OpClock, TimedOp
from memtune.hardware.op_time import OpTime
from memtune.hardware.op_timings import op_times
from memtune.hardware.roofline import op_s
from memtune.hardware.spec import Hardware, of_cpu
from memtune.search_spaces.execution import Execution

RATIOS = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=30)


def test_oom_probability_is_none_without_trials() -> None:
    assert oom_probability(Calibration(), 100, 200) is None
    assert oom_probability(Calibration((1.0, 1.1), (1.0, 1.0)), 100, 200) is None
    assert oom_probability(Calibration(), 100, None) == 0.0


def test_oom_probability_is_share_of_trials_that_would_not_fit() -> None:
    calibration = Calibration((0.9, 1.0, 1.1, 1.3))
    assert oom_probability(calibration, 100, 120) == 1.5 / 5
    assert oom_probability(calibration, 100, 200) == 0.5 / 5
    assert oom_probability(calibration, 100, 50) == 4.5 / 5


@given(RATIOS, st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**6))
def test_oom_probability_never_rises_with_budget(
    ratios: list[float], peak: int, budget: int, more: int
) -> None:
    calibration = Calibration(tuple(ratios))
    tight, loose = (oom_probability(calibration, peak, each) for each in (budget, budget + more))
    assert tight is not None
    assert loose is not None
    assert 0 < loose <= tight < 1


ROWS = [
    OpTime(op_class="matmul", dtype="float32", flops=2e6, traffic_bytes=5e4, seconds=2e-4, count=4),
    OpTime(op_class="matmul", dtype="float32", flops=2e9, traffic_bytes=1e7, seconds=0.2, count=2, ranks=2),
    OpTime(op_class="elementwise", dtype="float32", flops=0, traffic_bytes=3e6, seconds=1.5e-3, count=10),
]


@pytest.mark.parametrize("curves", [{}, {"matmul": ((1e-6, 2e-6), (1e-2, 3e-2))}])
def test_residuals_make_predictions_equal_measurements(curves: dict[str, Curve]) -> None:
    """Over the table as over measured curves; a class that no row is of is corrected as all are together."""
    cpu = replace(_cpu(), curves=curves)
    taught = replace(cpu, residuals=residuals(ROWS, cpu))
    for row in ROWS:
        at_peak_s, seconds = op_s(
            row.op_class, row.dtype, row.flops, row.traffic_bytes, taught, ranks=row.ranks
        )
        _, before_s = op_s(row.op_class, row.dtype, row.flops, row.traffic_bytes, cpu, ranks=row.ranks)
        assert abs(before_s / row.seconds - 1) > 0.05
        assert seconds == pytest.approx(row.seconds)
        assert at_peak_s < seconds
    other = [op_s("gather", "float32", 0, 1e6, each)[1] for each in (cpu, taught)]
    assert other[1] > 1.05 * other[0]
    assert residuals(ROWS, taught) == residuals(ROWS, cpu)  # always of what is predicted without


def test_residuals_are_clipped_and_empty_without_rows() -> None:
    far = [ROWS[0].model_copy(update={"seconds": 1e6})]
    assert {point[1] for curve in residuals(far, _cpu()).values() for point in curve} == {20.0}
    assert residuals([], _cpu()) == {}


def test_op_time_rows_add_up_to_step() -> None:
    observed = [TimedOp("aten.mm.default", "float32", 10.0**k, 100 * k, 1e-4 * k) for k in range(3, 9)]
    for step_s in (1e-2, 1e-3):  # the rest is spread; a busy clock is scaled down
        rows = op_times(observed, step_s, update_s=0.0, ranks=2)
        assert sum(row.seconds * row.count for row in rows) == pytest.approx(step_s)
        assert {row.ranks for row in rows} == {2}
    assert op_times([], 1.0, update_s=0.0) == []
    waits = op_times(observed, 1e-2, update_s=0.0, ranks=2, waiting=0.75)
    assert sum(row.seconds * row.count for row in waits) == pytest.approx(2.5e-3)
    alone = op_times(observed, 1e-2, update_s=0.0, host_computes=False)
    assert sum(row.seconds * row.count for row in alone) < 5e-3


def test_op_times_spread_the_rest_of_a_step_within_the_optimizer_and_outside_of_it() -> None:
    model = [TimedOp("aten.mm.default", "float32", 1e6, 100, 1e-4) for _ in range(4)]
    update = [TimedOp("aten.add_.Tensor", "float32", 1e3, 100, 1e-4, is_update=True) for _ in range(4)]
    rows = {row.op_class: row for row in op_times([*model, *update], 1e-2, update_s=1e-3, waiting=0.5)}
    assert {kind: row.seconds * row.count for kind, row in rows.items()} == pytest.approx(
        {"matmul": 4e-3, "update": 1e-3}
    )


def test_stored_search_is_loaded_by_next_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("MEMTUNE_LEARN", "1")
    taught = SearchErrors(
        date="2026-01-01",
        workload="gpt.py",
        op_times=ROWS,
        peak_ratios=[1.0, 1.01, 0.99],
        step_ratios=[1.1, 1.2, 1.3],
    )
    assert load_searches("cpu") == []
    for _ in range(22):
        store_search("cpu", taught)
    assert load_searches("cpu") == [taught] * 20
    assert calibration_of([taught]).is_calibrated
    (file,) = tmp_path.iterdir()
    for broken in (
        "{",
        "[]",
        '{"machine": 1, "searches": []}',
        file.read_text().replace('"seconds": 0.0002', '"seconds": -1'),
    ):
        file.write_text(broken)
        assert load_searches("cpu") == []
    store_search("cpu", taught)
    monkeypatch.setenv("MEMTUNE_LEARN", "0")
    assert load_searches("cpu") == []
    monkeypatch.setenv("MEMTUNE_CACHE", str(file / "no folder"))
    monkeypatch.setenv("MEMTUNE_LEARN", "1")
    store_search("cpu", taught)  # says nothing


def _cpu() -> Hardware:
    return of_cpu(CpuRates("a CPU", 4, 2**34, 1e11, 1e11, 2e10, 1e-5, 0.1))


def test_search_corrects_its_predictions_by_op_times() -> None:
    """Twice as slow ops make twice as long steps, neighbours stay one prediction, and one can ask without
    what was learnt.
    """
    made = prepared_search.rewriter("gpt")
    scorer = Scorer(made)
    plain = scorer.refined(scorer.score(Choice(Execution(micro_batch=4), ())))  # type: ignore[arg-type]
    by_key = {"a": plain, "b": replace(plain, key="b")}
    slow = [
        OpTime(
            op_class=kind,
            dtype="float32",
            flops=0,
            traffic_bytes=1e9,
            count=1,
            seconds=2 * op_s(kind, "float32", 0, 1e9, made.target.hardware)[1],
        )
        for kind in ("elementwise", "matmul")
    ]
    scorer.learn(slow)
    predict_again(by_key, scorer)
    assert by_key["a"].prediction is by_key["b"].prediction
    busy = [each.prediction.busy_s["compute"] for each in (plain, by_key["a"])]
    assert busy[1] == pytest.approx(2 * busy[0])
    assert by_key["a"].prediction.peak_allocated_bytes == plain.prediction.peak_allocated_bytes
    assert scorer.again(plain, taught_by=()).prediction == plain.prediction
    assert Scorer(made, op_times=slow).again(plain).prediction == by_key["a"].prediction


def test_op_clock_times_every_op_of_a_step() -> None:
    with OpClock(torch.device("cpu")) as clock:
        torch.ones(4, 8).t().mm(torch.ones(4, 2)).relu_()
    assert [each.name for each in clock.observed] == ["aten.ones.default"] * 2 + [
        "aten.mm.default",
        "aten.relu_.default",
    ]
    assert clock.observed[2].flops == 2 * 8 * 4 * 2
