"""Asynchronous updates from SSD: master weights and moments on SSD, updated while training goes on
(Angel-PTM).

The rules are those of `offload.optimizer.async_updates`. A sweep streams records as
`offload.ssd_states.ssd_optimizer` does: it reads, updates and writes each once, 24 bytes per parameter with
AdamW, whatever the number of steps whose gradients it applies. Also:

- Weights of blocks are published in the pages of a `PagedOffloader`. The other weights are on the device,
  where no sweep reads them, so the host has one copy of each: the sweep writes it, it is copied to the device
  when the version is adopted, and the next sweep waits for that copy.
- Optimizer state on SSD is not read while a sweep runs: a state dict waits for the sweep, then verifies it.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.offload.chunks import PagedOffloader
from memtune.offload.optimizer import Gradients, Sweeps, write_during_update_error
from memtune.offload.parameters import host_copy
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer
from memtune.runtime import HOST, Context, local, tier, transfer
from memtune.ssd import Piece


class LockFreeOnSsd(SsdOptimizer):
    """Moves an optimizer's weights and state to SSD, and updates them there asynchronously.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        read_ahead: Records that are read ahead.
        max_staleness: Bound of the staleness of weights, in steps.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(self, context: Context, *, read_ahead: int, max_staleness: int) -> None:
        super().__init__(context, master=False, read_ahead=read_ahead)
        self._device = context.device
        self._published: torch.Event | None = None
        self._spares: dict[nn.Parameter, Tensor] = {}  # by device parameter: where sweeps write its weight
        self._swept: Gradients = {}  # gradients of the running sweep
        self._settings: dict[int, dict[str, Any]] = {}
        is_fake = any(isinstance(piece.ssd, FakeTensor) for piece in self._pieces)
        self._sweeps = Sweeps(
            max_staleness, self._partial_step, self._prepared, self._publish, is_fake=is_fake
        )
        context.model.register_state_dict_pre_hook(lambda *_: self._settle())
        context.model.register_load_state_dict_pre_hook(lambda *_: self._settle())
        self._optimizer.register_load_state_dict_pre_hook(lambda *_: self._settle())
        context.loop.sync = self._sweeps.sync
        context.events.finished.subscribe(self._settle)

    def publish_to(self, store: PagedOffloader) -> None:
        """Publish weights of blocks to `store`, all others to the device."""
        self._store, places = store, store.double()
        for piece in self._pieces:
            self._spares[piece.device] = (
                places[piece.held] if piece.device in store.hosts else host_copy(piece.device)
            )
        self.write_weights_to(store.hosts)

    # -- the training thread ---------------------------------------------------------------------------------

    def _adopt_external_writes(self) -> None:
        written = self._writes.take_external()
        if written and self._sweeps.is_stale:
            raise write_during_update_error(len(written))
        self._stale.update(written)
        for piece in self._pieces if self._stale else ():
            if piece.device in self._stale:
                self._adopt_loaded(piece)
        self._stale.clear()

    def _adopt_loaded(self, piece: Piece) -> None:
        super()._adopt_loaded(piece)
        if piece.device not in self._offloaded_weights:
            self._spares[piece.device].copy_(self._weight(piece))

    def _update_all(self) -> None:
        self._adopt_external_writes()
        gradients: Gradients = {}
        for piece in self._pieces:
            if piece.device.grad is not None or piece.held.grad is not None:
                gradients[piece.held] = super()._gradient(piece)
        self._sweeps.deliver(gradients)

    def _publish(self) -> None:
        """Make the weights of the finished sweep current; runs on the training thread."""
        before = self._store.hosts
        self._store.swap()
        self.write_weights_to(self._store.hosts)
        for piece in self._pieces:
            if piece.device in before:
                self._spares[piece.device] = before[piece.device]
            else:
                torch.ops.memtune.copy_to_device_(local(piece.device), self._spares[piece.device])
                self._writes.note_write(piece.device)
        # The next sweep writes the same host copies, so it waits for the H2D copies issued here.
        self._published = transfer.issued(self._device)

    @torch.no_grad()
    def _settle(self) -> None:
        self._sweeps.finish_all()

    _loads_begin = _settle

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """Check state on SSD as `SsdOptimizer.verify` does, after all delivered gradients are applied."""
        self._settle()
        super().verify(only)

    @torch.no_grad()
    def _reload(self) -> None:
        self._sweeps.drop()
        super()._reload()

    # -- the sweep's thread ----------------------------------------------------------------------------------

    def _prepared(self, gradients: Gradients) -> partial[None]:
        return partial(
            self._sweep_over,
            gradients,
            {id(each.group): {**each.group, "params": ()} for each in self._pieces},
        )

    def _sweep_over(self, gradients: Gradients, settings: dict[int, dict[str, Any]]) -> None:
        self._swept, self._settings = gradients, settings
        # The copies to the device still read the weights that this sweep is about to write.
        if self._published is not None:
            self._published.synchronize()
        with tier(HOST), torch.no_grad():
            for piece in self._pieces:
                # The other copy of the weights becomes current as a whole: weights without a gradient must be
                # in it too.
                if piece.held not in gradients and piece.device in self._offloaded_weights:
                    self._spares[piece.device].copy_(self._offloaded_weights[piece.device])
            self._stream([piece for piece in self._pieces if piece.held in gradients])

    def _gradient(self, piece: Piece) -> Tensor:
        # Popped, so that each gradient is freed after its update.
        return self._swept.pop(piece.held)

    def _settings_of(self, piece: Piece) -> dict[str, Any]:
        return self._settings[id(piece.group)]

    def _store_weight(self, piece: Piece, up: Tensor) -> None:
        self._spares[piece.device].copy_(up)

    # -- proof -----------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return bytes on SSD, the current version and the largest staleness, for the audit.

        Raises:
            ApplyError: Some state is not on SSD, or a weight has no second copy.
        """
        if len(self._spares) != len(self._pieces):
            raise refusals.error_of(refusals.no_second_copy(len(self._pieces) - len(self._spares)))
        sweeps = self._sweeps
        return super().check() | {"version": sweeps.version, "largest_staleness": sweeps.largest_staleness}
