"""The executor that computes its results."""

from __future__ import annotations

from support.search.simulated_executor import SimulatedExecutor

from memtune.executors.base import Executor, Progress, Trial, TrialResult


def trial(number):
    return Trial(number=number, workload="m.py", config={})


def test_simulated_executor_answers_in_order_without_cancelled():
    executor: Executor = SimulatedExecutor(
        lambda each: TrialResult(number=each.number, status="ok", step_s=each.number / 2)
    )
    for number in (1, 2, 3):
        executor.submit(trial(number))
    executor.cancel(2)
    events = [*executor.wait(0), *executor.wait(0), *executor.wait(0)]
    assert [type(event) for event in events] == [Progress, TrialResult, Progress, TrialResult]
    assert [event.step_s for event in events if isinstance(event, TrialResult)] == [0.5, 1.5]
    executor.submit(trial(4))
    executor.close()
    assert list(executor.wait(0)) == []
