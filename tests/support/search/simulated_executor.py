"""Trials that are computed instead of run, for tests of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memtune.executors.base import Progress, Trial, TrialResult


@dataclass
class _Running:
    trial: Trial
    result: TrialResult | None = None
    ends_s: float = 0.0


class SimulatedExecutor:
    """Answers each trial with `predict(trial)`, in the order in which trials of that `wall_s` would end.

    Args:
        predict: Computes the result of a trial; its exceptions are raised by `wait`.
        slots: Number of trials that the search may have in flight.

    Attributes:
        clock_s: Simulated seconds since the start.
        busy_s: Simulated seconds of all trials together.
    """

    name = "simulated"
    measures = False

    def __init__(self, predict: Callable[[Trial], TrialResult], *, slots: int = 1) -> None:
        self.slots = slots
        self.clock_s = self.busy_s = 0.0
        self._predict = predict
        self._todo: list[_Running] = []

    def submit(self, trial: Trial) -> None:
        """Queue `trial`; the next `wait` computes it."""
        self._todo.append(_Running(trial))

    def wait(self, timeout_s: float) -> Iterator[Progress | TrialResult]:
        """Yield start and result of the trial that ends first; nothing if the queue is empty."""
        for each in self._todo[: self.slots]:
            if each.result is None:
                yield Progress(number=each.trial.number, stage="starting")
                each.result = self._predict(each.trial)
                each.ends_s = self.clock_s + each.result.wall_s
        if self._todo:
            first = min(self._todo[: self.slots], key=lambda each: each.ends_s)
            self._todo.remove(first)
            assert first.result is not None  # computed above
            self.clock_s = first.ends_s
            self.busy_s += first.result.wall_s
            yield first.result

    def cancel(self, number: int) -> None:
        """Remove a queued trial."""
        self._todo = [each for each in self._todo if each.trial.number != number]

    def close(self) -> None:
        """Remove all queued trials."""
        self._todo.clear()
