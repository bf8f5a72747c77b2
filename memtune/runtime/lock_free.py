"""The host updates when it can and training never waits for it, up to a bound: weights are some steps old.

Five rules:

Rule 1. `optimizer.step()` delivers the step's gradients, which are on the host, and returns.
Rule 2. A thread of its own takes all that has been delivered, adds it up, and updates every weight and moment once: a *sweep*.
        Several steps that were delivered meanwhile are one update, with the sum of their gradients.
Rule 3. Weights lie twice on the host. A sweep reads the copy that training reads and writes the other one, which is then
        published as the next version. Training takes a version up in `step`, all weights at once, so nobody reads what is being
        written, and no weight changes within a step. The next sweep begins when the last version has been taken up.
Rule 4. After `step` at most `max_staleness` delivered steps are missing in the weights: else it waits for sweeps.
Rule 5. A state dict waits for all sweeps, and so does loading one.

Source: the lock-free updating mechanism of Angel-PTM (Nie et al. 2023, arXiv:2303.02868); the bound is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.page_locked import page_locked
from memtune.runtime.paged_store import PagedStore
from memtune.runtime.tiers import HOST, mark, tier

_Gradients = dict[nn.Parameter, Tensor]
"""By host copy."""
_pool: ThreadPoolExecutor | None = None


def _twin(host: Tensor, locked: bool) -> Tensor:
    return torch.empty_like(host, pin_memory=locked, requires_grad=False)


def _thread() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(1, thread_name_prefix="memtune-sweep")
    return _pool


class LockFreeOptimizer(HostOptimizer):
    """A native update on the host that training does not wait for.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        max_staleness: Steps that the weights may lack.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
    """

    def __init__(self, context: Context, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._delivered: list[_Gradients] = []  # of each step
        self._sweep: Future[None] | None = None
        self._taken = 0  # steps in the sweep that is under way
        self._missing = 0  # steps that the weights lack
        self._is_new = False
        self._spare: dict[nn.Parameter, Tensor] = {}  # by host copy: where sweeps write
        self.version = self.largest_staleness = 0
        super().__init__(context, "native")
        self._is_fake = any(isinstance(host.data, FakeTensor) for _, host in self._pairs)
        self._settle_before_checkpoints(context)
        context.sync = self.sync

    def publish_to(self, store: PagedStore) -> None:
        """Weights of blocks are published to `store`, all others to the device."""
        self._store, self._spare = store, store.double()
        for _, host in self._pairs:
            if host not in self._spare:
                with tier(HOST):
                    self._spare[host] = page_locked(partial(_twin, host), wanted=host.is_pinned())
                mark(self._spare[host], HOST)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch. A recorder sees the sweep here, beside the step that it runs beside."""
        if self._is_fake:
            self._begin()
        yield

    def _update_all(self, optimizer: Optimizer) -> None:
        """Rules 1 and 4."""
        assert self._native is not None
        self._native.make_state(optimizer, self._gradients.get)
        self._delivered.append(self._gradients)
        self._gradients = {}
        self._missing += 1
        self._take_up(wait=False)
        while self._missing > self._max_staleness:
            self._begin()
            self._take_up(wait=True)
        self.largest_staleness = max(self.largest_staleness, self._missing)
        if not self._is_fake:
            self._begin()

    def _begin(self) -> None:
        """Rule 2: nothing while a sweep is under way, or its version has not been taken up."""
        if self._sweep is not None or not self._delivered:
            return
        steps, self._delivered = self._delivered, []
        self._taken = len(steps)
        groups = [({**group, "params": ()}, list(group["params"])) for group in self._optimizer.param_groups]
        if self._is_fake:
            self._sweep_over(steps, groups)
            self._sweep = Future()
            self._sweep.set_result(None)
        else:
            self._sweep = _thread().submit(self._sweep_over, steps, groups)

    def _sweep_over(
        self, steps: list[dict[nn.Parameter, Tensor]], groups: list[tuple[dict[str, Any], list[nn.Parameter]]]
    ) -> None:
        """One sweep; the gradients are let go one by one."""
        assert self._native is not None
        with tier(HOST), torch.no_grad():
            gradients = steps.pop(0)
            while steps:
                for host, gradient in steps.pop(0).items():
                    gradients[host] = gradients[host].add_(gradient) if host in gradients else gradient
            for settings, hosts in groups:
                for host in hosts:
                    weight = self._spare[host]
                    weight.copy_(host.detach())
                    if host in gradients:
                        self._native.one(settings, weight, gradients.pop(host), self._optimizer.state[host], seed=0)

    def _take_up(self, *, wait: bool) -> None:
        """Rule 3; raises what went wrong in the sweep."""
        if self._sweep is None or not (wait or self._sweep.done()):
            return
        sweep, self._sweep = self._sweep, None
        sweep.result()
        for host, published in list(self._spare.items()):
            self._spare[host] = host.data
            host.data = published
        self._store.swap()
        self._missing -= self._taken
        self.version += 1
        self._is_new = True

    def _updated_now(self) -> set[nn.Parameter]:
        is_new, self._is_new = self._is_new, False
        return {host for _, host in self._pairs if is_new}

    def _settle(self) -> None:
        """Rule 5."""
        while self._delivered or self._sweep is not None:
            self._begin()
            self._take_up(wait=True)
        self._up({}, self._updated_now())

    def _is_late(self) -> bool:
        return bool(self._delivered) or self._sweep is not None

    def check(self) -> dict[str, Any]:
        """Bytes of weights and state on the host, the version at hand, and how stale weights have been.

        Raises:
            ApplyError: Some state is on the device, or weights are not published through two copies.
        """
        if len(self._spare) != len(self._pairs):
            raise ApplyError(f"{len(self._pairs) - len(self._spare)} weights have no second copy on the host.", code="MT309")
        return super().check() | {"version": self.version, "largest_staleness": self.largest_staleness}
