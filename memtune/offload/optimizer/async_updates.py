"""Asynchronous host updates with bounded staleness: training continues on weights that are some steps old.

`optimizer.step()` adds the step's host gradients to those that wait and returns. A thread takes all that wait
and updates every weight and moment once: a *sweep*. Several steps that waited together are one update, with
the sum of their gradients and the settings at its start.

States of a step's gradients:

    waiting --(a sweep begins)--> in the sweep --(training adopts the version)--> in the weights

- Weights exist twice on the host. A sweep reads the copy that training reads and writes the other one, so
  that no weight changes within a step; training adopts the new version as a whole in `step`. The next sweep
  begins after that.
- After `step` the weights lack at most `max_staleness` steps; otherwise `step` waits for sweeps.
- State dicts, their loading and `Tuned.finish` wait for all sweeps. An error in a sweep is raised by the next
  of these or the next step; no step continues from the partial update.

Source: the lock-free updating mechanism of Angel-PTM (Nie et al. 2023, arXiv:2303.02868); the bound on
staleness is memtune's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from memtune.runtime import HOST, PartialStep, tier

Gradients = dict[nn.Parameter, Tensor]
"""Host gradients by the optimizer's parameter."""


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="memtune-sweep")


class AsyncUpdates:
    """Gradients that wait for an update, and the sweep that is running.

    Args:
        max_staleness: Number of steps that the weights may lack.
        partial_step: Marks a partial update of the same optimizer.
        prepare: Called by training with the waiting gradients; returns the sweep, which frees each gradient
            after use.
        publish: Called by training when a sweep is over.
        is_fake: A recorder runs it: each sweep runs at the start of the step that follows its gradients.

    Attributes:
        version: Number of sweeps that training has adopted.
        largest_staleness: Largest number of steps that the weights have lacked.
    """

    def __init__(
        self,
        max_staleness: int,
        partial_step: PartialStep,
        prepare: Callable[[Gradients], Callable[[], None]],
        publish: Callable[[], None],
        *,
        is_fake: bool,
    ) -> None:
        self._max_staleness, self._partial_step, self._is_fake = max_staleness, partial_step, is_fake
        self._prepare, self._publish = prepare, publish
        self._gradients: Gradients = {}  # sums over all steps that wait
        self._sweep: Future[None] | None = None
        self._n_waiting = self._n_in_sweep = 0  # steps that wait, and steps in the running sweep
        self.version = self.largest_staleness = 0

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; a recorder sees the sweep here, overlapped with this step."""
        if self._is_fake:
            self._begin()
        yield

    def add_gradients(self, gradients: Gradients) -> None:
        """Add a step's gradients to those that wait; wait while the weights would be too stale."""
        # `gradients` is emptied, so that each one is freed once it is in the sum.
        with tier(HOST), torch.no_grad():
            while gradients:
                # One at a time, so that a gradient is freed as soon as it is in the sum.
                held = next(iter(gradients))
                gradient = gradients.pop(held)
                self._gradients[held] = (
                    self._gradients[held].add_(gradient) if held in self._gradients else gradient
                )
        self._n_waiting += 1
        # Between two steps: training must not see two versions of the weights within one.
        self._adopt(wait=False)
        while self._missing > self._max_staleness:
            self._begin()
            self._adopt(wait=True)
        self.largest_staleness = max(self.largest_staleness, self._missing)
        if not self._is_fake:
            # A recorder's sweep runs inside the next micro-batch, where the real one overlaps.
            self._begin()

    def facts(self) -> dict[str, int]:
        """Return the current version and the largest staleness, for the audit."""
        return {"version": self.version, "largest_staleness": self.largest_staleness}

    @property
    def _missing(self) -> int:
        return self._n_waiting + self._n_in_sweep

    @property
    def is_stale(self) -> bool:
        """True if the weights lack a step."""
        return self._missing > 0

    def _begin(self) -> None:
        """Start a sweep over all waiting gradients, unless one runs or its version is not adopted yet."""
        # One sweep at a time: two would write the same spare weights.
        if self._sweep is not None or not self._n_waiting:
            return
        delivered, self._gradients = self._gradients, {}
        self._n_in_sweep, self._n_waiting = self._n_waiting, 0
        run = self._prepare(delivered)
        if self._is_fake:
            run()
            self._sweep = Future()
            self._sweep.set_result(None)
        else:
            self._sweep = _thread().submit(run)

    def _adopt(self, *, wait: bool) -> None:
        """Publish the weights of a finished sweep, or of a running one with `wait`; raise its error."""
        if self._sweep is None or not (wait or self._sweep.done()):
            return
        # Cleared first: after an error no later call raises it again, and `drop` need not wait.
        sweep, self._sweep = self._sweep, None
        sweep.result()
        self._n_in_sweep = 0
        self._publish()
        self.version += 1

    def finish_all(self) -> None:
        """Wait until no step is missing in the weights."""
        # Some weights of the sweep are updated and others are not; only a load can mend that.
        if self._partial_step.is_it:
            self.drop()
            return
        with self._partial_step.step_updates():
            while self.is_stale:
                self._begin()
                self._adopt(wait=True)

    def drop(self) -> None:
        """Drop running and waiting updates, because their results are replaced or lost."""
        sweep, self._sweep = self._sweep, None
        if sweep is not None:
            # It writes the spare weights and the state, which a load replaces next.
            with suppress(BaseException):
                sweep.result()
        self._gradients = {}
        self._n_waiting = self._n_in_sweep = 0
