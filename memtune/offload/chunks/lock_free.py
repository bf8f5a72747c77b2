"""Lock-free host optimizer with bounded staleness (`offload.optimizer.async_updates`); Angel-PTM.

Masters and moments are in host memory; `offload.ssd_states.ssd_lock_free` has them on SSD.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune import refusals
from memtune.offload.chunks.paged_offloader import PagedUnits
from memtune.offload.optimizer import AsyncUpdates, Gradients, HostOptimizer
from memtune.runtime import HOST, Context, mark, page_locked, tier, track_data


def _twin(host: Tensor, locked: bool) -> Tensor:
    return torch.empty_like(host, pin_memory=locked, requires_grad=False)


class LockFreeOptimizer:
    """A native host update that training does not wait for.

    Args:
        context: Its model and optimizer; the optimizer is changed in place.
        max_staleness: Number of steps that the weights may lack.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
    """

    def __init__(self, context: Context, max_staleness: int) -> None:
        self._is_new = False
        self._spare: Gradients = {}  # by host copy: the second weight, which sweeps write
        self.on_host = host = HostOptimizer(context, "native")
        is_fake = any(isinstance(each.data, FakeTensor) for _, each in host.pairs)
        self._sweeps = sweeps = AsyncUpdates(
            max_staleness, host.partial_step, self._prepared, self._publish, is_fake=is_fake
        )
        host.update_all, host.sync, host.is_delayed = self._update_all, self._sync, lambda: sweeps.is_stale
        host.sync_before_checkpoints(context)
        context.loop.sync = sweeps.sync
        context.events.finished.subscribe(self._sync)

    def publish_to(self, store: PagedUnits) -> None:
        """Publish the weights of blocks to `store`, all others to the device."""
        self._store, self._spare = store, store.double()
        for device, host in self.on_host.pairs:
            track_data(device)  # a write during a sweep is refused
            if host not in self._spare:
                with tier(HOST):
                    self._spare[host] = page_locked(partial(_twin, host), wanted=host.is_pinned())
                mark(self._spare[host], HOST)

    def _update_all(self) -> None:
        host = self.on_host
        assert host.native is not None
        host.native.make_state(host.optimizer, host.gradients.get)
        # The sweep owns these now; training collects the next step's in a new dict.
        delivered, host.gradients = host.gradients, {}
        self._sweeps.add_gradients(delivered)

    def _prepared(self, gradients: Gradients) -> partial[None]:
        """Return the sweep over `gradients`, with the settings that the groups have now."""
        # Copies: a scheduler changes the groups' dictionaries while the sweep runs.
        groups = self.on_host.optimizer.param_groups
        return partial(
            self._sweep_over, gradients, [({**each, "params": ()}, list(each["params"])) for each in groups]
        )

    def _sweep_over(
        self, gradients: Gradients, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]
    ) -> None:
        """Run one sweep; free the gradients one by one."""
        native, state = self.on_host.native, self.on_host.optimizer.state
        assert native is not None
        with tier(HOST), torch.no_grad():
            for settings, hosts in groups:
                for host in hosts:
                    weight = self._spare[host]
                    # All weights are copied, also those without a gradient: the two memories are exchanged as
                    # a whole.
                    weight.copy_(host.detach())
                    if host in gradients:
                        native.one(settings, weight, gradients.pop(host), state[host], seed=0)

    def _publish(self) -> None:
        """Exchange the two host copies of every weight, so that training reads those of the last sweep."""
        for host, published in list(self._spare.items()):
            self._spare[host] = host.data
            # The same Python object, since state dicts and groups refer to it.
            host.data = published
        self._store.swap()
        self._is_new = True

    def _sync(self) -> None:
        self._sweeps.finish_all()
        is_new, self._is_new = self._is_new, False
        self.on_host.copy_weights({}, {host for _, host in self.on_host.pairs if is_new})

    def check(self) -> dict[str, Any]:
        """Return bytes on the host, the adopted version, and the largest staleness so far, for the audit.

        Raises:
            ApplyError: State is on the device, or a weight has no second host copy.
        """
        if missing := len(self.on_host.pairs) - len(self._spare):
            raise refusals.error_of(refusals.no_second_copy(missing))
        return self.on_host.check() | self._sweeps.facts()
