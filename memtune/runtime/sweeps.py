"""Updates that training does not wait for, up to a bound: weights are some steps old.

Five rules:

Rule 1. `optimizer.step()` delivers the step's gradients, which are on the host, and returns. What is delivered while others
        wait is added to them, in the order of delivery: host memory holds those of the sweep, their sum, and what lands.
Rule 2. A thread of its own takes all that has been delivered and updates every weight and moment once: a *sweep*. Several steps
        that were delivered meanwhile are one update, with the sum of their gradients and the settings as it begins.
Rule 3. Weights lie twice on the host. A sweep reads the copy that training reads and writes the other one, which is then
        published as the next version. Training takes a version up in `step`, all weights at once, so nobody reads what is being
        written, and no weight changes within a step. The next sweep begins when the last version has been taken up.
Rule 4. After `step` at most `max_staleness` delivered steps are missing in the weights: else it waits for sweeps.
Rule 5. A state dict waits for all sweeps, and so do loading one and `Tuned.finish`. What went wrong in a sweep is raised by who
        hears of it first, a step or one of these; no step goes on from the mixture that it left.

Source: the lock-free updating mechanism of Angel-PTM (Nie et al. 2023, arXiv:2303.02868); the bound is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from memtune.runtime.backward_end import HalfDone
from memtune.runtime.tiers import HOST, tier

Gradients = dict[nn.Parameter, Tensor]
"""On the host, by what the optimizer holds."""
_pool: ThreadPoolExecutor | None = None


def _thread() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(1, thread_name_prefix="memtune-sweep")
    return _pool


class Sweeps:
    """What has been delivered, and the sweep that is under way.

    Args:
        max_staleness: Steps that the weights may lack.
        half: Of the same optimizer.
        prepare: Called by training with what has been delivered; returns the sweep, which lets go of each gradient it has used.
        publish: Called by training when a sweep is over.
        is_fake: A recorder runs it: each sweep beside the step that follows its gradients.

    Attributes:
        version: Sweeps that have been taken up.
        largest_staleness: Steps that weights have lacked at most.
    """

    def __init__(
        self,
        max_staleness: int,
        half: HalfDone,
        prepare: Callable[[Gradients], Callable[[], None]],
        publish: Callable[[], None],
        *,
        is_fake: bool,
    ) -> None:
        self._max_staleness, self._half, self._is_fake = max_staleness, half, is_fake
        self._prepare, self._publish = prepare, publish
        self._delivered: Gradients = {}  # of all steps that wait
        self._sweep: Future[None] | None = None
        self._waiting = self._taken = 0  # steps delivered, and in the sweep that is under way
        self.version = self.largest_staleness = 0

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch. A recorder sees the sweep here, beside the step that it runs beside."""
        if self._is_fake:
            self._begin()
        yield

    def deliver(self, gradients: Gradients) -> None:
        """Rules 1 and 4; takes `gradients` over."""
        with tier(HOST), torch.no_grad():
            while gradients:
                held = next(iter(gradients))
                gradient = gradients.pop(held)
                self._delivered[held] = self._delivered[held].add_(gradient) if held in self._delivered else gradient
        self._waiting += 1
        self._take_up(wait=False)
        while self._missing > self._max_staleness:
            self._begin()
            self._take_up(wait=True)
        self.largest_staleness = max(self.largest_staleness, self._missing)
        if not self._is_fake:
            self._begin()

    @property
    def _missing(self) -> int:
        return self._waiting + self._taken

    @property
    def is_late(self) -> bool:
        """Weights lack a step."""
        return self._missing > 0

    def _begin(self) -> None:
        """Rule 2: nothing while a sweep is under way, or its version has not been taken up."""
        if self._sweep is not None or not self._waiting:
            return
        delivered, self._delivered = self._delivered, {}
        self._taken, self._waiting = self._waiting, 0
        run = self._prepare(delivered)
        if self._is_fake:
            run()
            self._sweep = Future()
            self._sweep.set_result(None)
        else:
            self._sweep = _thread().submit(run)

    def _take_up(self, *, wait: bool) -> None:
        """Rule 3; raises what went wrong in the sweep."""
        if self._sweep is None or not (wait or self._sweep.done()):
            return
        sweep, self._sweep = self._sweep, None
        sweep.result()
        self._taken = 0
        self._publish()
        self.version += 1

    def settle(self) -> None:
        """Rule 5."""
        if self._half.is_it:
            self.drop()
            return
        with self._half.whole():
            while self.is_late:
                self._begin()
                self._take_up(wait=True)

    def drop(self) -> None:
        """Nothing is under way any more, and nothing waits: all of it is replaced, or lost."""
        sweep, self._sweep = self._sweep, None
        if sweep is not None:
            with suppress(BaseException):
                sweep.result()
        self._delivered = {}
        self._waiting = self._taken = 0
