"""The host updates when it can and training never waits for it, up to a bound, by the rules of `runtime.sweeps`.

Masters and moments are in host memory; on SSD they are those of `runtime.lock_free_on_ssd`.
"""

from __future__ import annotations

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
from memtune.runtime.sweeps import Gradients, Sweeps
from memtune.runtime.tiers import HOST, mark, tier


def _twin(host: Tensor, locked: bool) -> Tensor:
    return torch.empty_like(host, pin_memory=locked, requires_grad=False)


class LockFreeOptimizer(HostOptimizer):
    """A native update on the host that training does not wait for.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        max_staleness: Steps that the weights may lack.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
    """

    def __init__(self, context: Context, max_staleness: int) -> None:
        self._is_new = False
        self._spare: Gradients = {}  # where sweeps write
        super().__init__(context, "native")
        is_fake = any(isinstance(host.data, FakeTensor) for _, host in self._pairs)
        self._sweeps = Sweeps(max_staleness, self._half, self._prepared, self._publish, is_fake=is_fake)
        self._settle_before_checkpoints(context)
        context.sync, context.finish = self._sweeps.sync, self._settle

    def publish_to(self, store: PagedStore) -> None:
        """Weights of blocks are published to `store`, all others to the device."""
        self._store, self._spare = store, store.double()
        for _, host in self._pairs:
            if host not in self._spare:
                with tier(HOST):
                    self._spare[host] = page_locked(partial(_twin, host), wanted=host.is_pinned())
                mark(self._spare[host], HOST)

    def _update_all(self, optimizer: Optimizer) -> None:
        assert self._native is not None
        self._native.make_state(optimizer, self._gradients.get)
        delivered, self._gradients = self._gradients, {}
        self._sweeps.deliver(delivered)

    def _prepared(self, gradients: Gradients) -> partial[None]:
        groups = [({**group, "params": ()}, list(group["params"])) for group in self._optimizer.param_groups]
        return partial(self._sweep_over, gradients, groups)

    def _sweep_over(self, gradients: Gradients, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]) -> None:
        """One sweep; the gradients are let go one by one."""
        assert self._native is not None
        with tier(HOST), torch.no_grad():
            for settings, hosts in groups:
                for host in hosts:
                    weight = self._spare[host]
                    weight.copy_(host.detach())
                    if host in gradients:
                        self._native.one(settings, weight, gradients.pop(host), self._optimizer.state[host], seed=0)

    def _publish(self) -> None:
        for host, published in list(self._spare.items()):
            self._spare[host] = host.data
            host.data = published
        self._store.swap()
        self._is_new = True

    def _updated_now(self) -> set[nn.Parameter]:
        is_new, self._is_new = self._is_new, False
        return {host for _, host in self._pairs if is_new}

    def _settle(self) -> None:
        self._sweeps.settle()
        self._up({}, self._updated_now())

    def _is_late(self) -> bool:
        return self._sweeps.is_late

    def check(self) -> dict[str, Any]:
        """Bytes of weights and state on the host, the version at hand, and how stale weights have been.

        Raises:
            ApplyError: Some state is on the device, or weights are not published through two copies.
        """
        if len(self._spare) != len(self._pairs):
            raise ApplyError(f"{len(self._pairs) - len(self._spare)} weights have no second copy on the host.", code="MT309")
        sweeps = self._sweeps
        return super().check() | {"version": sweeps.version, "largest_staleness": sweeps.largest_staleness}
