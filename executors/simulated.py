"""Trials that are computed instead of run: for tests of the search, and to try a search without hardware."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from memtune.executors.base import Progress, Trial, TrialResult


class SimulatedExecutor:
    """Answers each trial with `predict(trial)`, in the order of submission.

    Args:
        predict: Computes the result of a trial; its exceptions are raised by `wait`.
        slots: Number of trials that the search may have in flight.
    """

    name = "simulated"

    def __init__(self, predict: Callable[[Trial], TrialResult], *, slots: int = 1) -> None:
        self.slots = slots
        self._predict = predict
        self._todo: deque[Trial] = deque()

    def submit(self, trial: Trial) -> None:
        """Queue `trial`; the next `wait` computes it."""
        self._todo.append(trial)

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        """Yield start and result of the oldest queued trial; nothing if the queue is empty."""
        if self._todo:
            trial = self._todo.popleft()
            yield Progress(number=trial.number, stage="starting")
            yield self._predict(trial)

    def cancel(self, number: int) -> None:
        """Remove a queued trial."""
        self._todo = deque(trial for trial in self._todo if trial.number != number)

    def close(self) -> None:
        """Remove all queued trials."""
        self._todo.clear()
