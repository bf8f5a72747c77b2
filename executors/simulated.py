"""Trials that are not run but computed: for tests of the search, and to try a search where there is no hardware."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from memtune.executors.base import Progress, Trial, TrialResult


class SimulatedExecutor:
    """Answers each trial with `predict(trial)`, in the order of submission.

    Args:
        predict: Computes the result of a trial; whatever it raises is raised by `wait`.
        slots: How many trials the search may have in flight.
    """

    name = "simulated"

    def __init__(self, predict: Callable[[Trial], TrialResult], *, slots: int = 1) -> None:
        self.slots = slots
        self._predict = predict
        self._todo: deque[Trial] = deque()

    def submit(self, trial: Trial) -> None:
        """Queue `trial`; it is computed by the next `wait`."""
        self._todo.append(trial)

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        """The start and the result of the oldest waiting trial; nothing, at once, where none waits."""
        if self._todo:
            trial = self._todo.popleft()
            yield Progress(number=trial.number, stage="starting")
            yield self._predict(trial)

    def cancel(self, number: int) -> None:
        """Forget a waiting trial."""
        self._todo = deque(trial for trial in self._todo if trial.number != number)

    def close(self) -> None:
        """Forget all waiting trials."""
        self._todo.clear()
