"""Lock-free host optimizer with bounded staleness (`offload.optimizer.async_updates`); Angel-PTM.

Masters and moments are in host memory; `offload.ssd_states.ssd_lock_free` has them on SSD.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memtune import refusals
from memtune.offload.chunks.paged_offloader import PagedOffloader
from memtune.offload.optimizer import Gradients, HostOptimizer, Sweeps
from memtune.runtime import HOST, Context, mark, page_locked, tier, track_data


def _twin(host: Tensor, locked: bool) -> Tensor:
    return torch.empty_like(host, pin_memory=locked, requires_grad=False)


class LockFreeOptimizer(HostOptimizer):
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
        super().__init__(context, "native")
        is_fake = any(isinstance(host.data, FakeTensor) for _, host in self._pairs)
        self._sweeps = Sweeps(
            max_staleness, self._partial_step, self._prepared, self._publish, is_fake=is_fake
        )
        self._sync_before_checkpoints(context)
        context.loop.sync = self._sweeps.sync
        context.events.finished.subscribe(self._sync)

    def publish_to(self, store: PagedOffloader) -> None:
        """Publish the weights of blocks to `store`, all others to the device."""
        self._store, self._spare = store, store.double()
        for device, _ in self._pairs:
            track_data(device)  # a write during a sweep is refused
        for _, host in self._pairs:
            if host not in self._spare:
                with tier(HOST):
                    self._spare[host] = page_locked(partial(_twin, host), wanted=host.is_pinned())
                mark(self._spare[host], HOST)

    def _update_all(self, optimizer: Optimizer) -> None:
        assert self._native is not None
        self._native.make_state(optimizer, self._gradients.get)
        # The sweep owns these now; training collects the next step's in a new dict.
        delivered, self._gradients = self._gradients, {}
        self._sweeps.deliver(delivered)

    def _prepared(self, gradients: Gradients) -> partial[None]:
        """Return the sweep over `gradients`, with the settings that the groups have now."""
        # Copies: a scheduler changes the groups' dictionaries while the sweep runs.
        groups = [({**group, "params": ()}, list(group["params"])) for group in self._optimizer.param_groups]
        return partial(self._sweep_over, gradients, groups)

    def _sweep_over(
        self, gradients: Gradients, groups: list[tuple[dict[str, Any], list[nn.Parameter]]]
    ) -> None:
        """Run one sweep; free the gradients one by one."""
        assert self._native is not None
        with tier(HOST), torch.no_grad():
            for settings, hosts in groups:
                for host in hosts:
                    weight = self._spare[host]
                    # All weights are copied, also those without a gradient: the two memories are exchanged as
                    # a whole.
                    weight.copy_(host.detach())
                    if host in gradients:
                        self._native.one(
                            settings, weight, gradients.pop(host), self._optimizer.state[host], seed=0
                        )

    def _publish(self) -> None:
        """Exchange the two host copies of every weight, so that training reads those of the last sweep."""
        for host, published in list(self._spare.items()):
            self._spare[host] = host.data
            # The same Python object, since state dicts and groups refer to it.
            host.data = published
        self._store.swap()
        self._is_new = True

    def _hosts_with_new_weights(self) -> set[nn.Parameter]:
        is_new, self._is_new = self._is_new, False
        return {host for _, host in self._pairs if is_new}

    def _sync(self) -> None:
        self._sweeps.finish_all()
        self._copy_weights({}, self._hosts_with_new_weights())

    def _is_delayed(self) -> bool:
        return self._sweeps.is_stale

    def check(self) -> dict[str, Any]:
        """Return the bytes on the host, the adopted version, and the largest staleness so far.

        Raises:
            ApplyError: State is on the device, or a weight has no second host copy.
        """
        if len(self._spare) != len(self._pairs):
            raise refusals.error_of(refusals.no_second_copy(len(self._pairs) - len(self._spare)))
        sweeps = self._sweeps
        return super().check() | {"version": sweeps.version, "largest_staleness": sweeps.largest_staleness}
