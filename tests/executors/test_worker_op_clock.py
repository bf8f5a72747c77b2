"""Trials of several ranks tell how long their ops took."""

from __future__ import annotations

import pytest
from support.zoo_paths import ZOO

from memtune.executors.base import Trial, TrialResult
from memtune.executors.local import LocalExecutor


@pytest.mark.slow
def test_worker_reports_op_times_of_rank_0() -> None:
    settings = {"execution": {"micro_batch": 2}, "sharding": {"states": {"kind": "fsdp", "degree": 2}}}
    executor = LocalExecutor(1)
    try:
        trial = Trial(
            number=1,
            workload=str(ZOO["gpt"]),
            config={"settings": settings},
            steps=2,
            ranks=2,
            clock_ops=True,
        )
        executor.submit(trial)
        results: list[TrialResult] = []
        while not results:
            results = [event for event in executor.wait(1.0) if isinstance(event, TrialResult)]
    finally:
        executor.close()
    (result,) = results
    assert result.status == "ok", result.reason
    assert {row.ranks for row in result.op_times} == {2}
    assert {"matmul", "optimizer"} & {row.op_class for row in result.op_times}
    assert result.step_s is not None
    assert 0 < sum(row.seconds * row.count for row in result.op_times) < result.step_s
    assert result.host_peak_bytes < 32 << 20  # of training, not of the buffers with which rates are measured
