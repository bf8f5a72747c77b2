"""Asynchronous updates from SSD: master weights and moments on SSD, updated while training goes on
(Angel-PTM).

The rules are those of `offload.optimizer.async_updates`. A sweep streams records as
`offload.ssd_states.ssd_optimizer` does: it reads, updates and writes each once, 24 bytes per parameter with
AdamW, whatever the number of steps whose gradients it applies. Also:

- Weights of blocks are published in the pages of a `PagedUnits`. The other weights are on the device,
  where no sweep reads them, so the host has one copy of each: the sweep writes it, it is copied to the device
  when the version is adopted, and the next sweep waits for that copy.
- Optimizer state on SSD is not read while a sweep runs: a state dict waits for the sweep, then verifies it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.offload.chunks import PagedUnits
from memtune.offload.optimizer import AsyncUpdates, Gradients, write_during_update_error
from memtune.offload.parameters import host_copy
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer, new_weight
from memtune.runtime import HOST, Context, local, tier, transfer
from memtune.ssd import Piece


class LockFreeOnSsd:
    """Updates an optimizer's weights and state on SSD asynchronously.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        read_ahead: Records that are read ahead.
        max_staleness: Bound of the staleness of weights, in steps.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(self, context: Context, *, read_ahead: int, max_staleness: int) -> None:
        self._on_ssd = on_ssd = SsdOptimizer(context, master=False, read_ahead=read_ahead)
        self._device = context.device
        self._published: torch.Event | None = None
        self._spares: dict[nn.Parameter, Tensor] = {}  # by device parameter: where sweeps write its weight
        is_fake = any(isinstance(piece.ssd, FakeTensor) for piece in on_ssd.pieces)
        self._sweeps = sweeps = AsyncUpdates(
            max_staleness, on_ssd.partial_step, self._prepared, self._publish, is_fake=is_fake
        )
        on_ssd.update_all, on_ssd.drop = self._update_all, sweeps.drop
        on_ssd.settle = on_ssd.before_load = self._settle
        context.model.register_state_dict_pre_hook(lambda *_: self._settle())
        context.model.register_load_state_dict_pre_hook(lambda *_: self._settle())
        on_ssd.optimizer.register_load_state_dict_pre_hook(lambda *_: self._settle())
        context.loop.sync = sweeps.sync
        context.events.weights_loaded.subscribe(lambda: self._copy_to_spares(on_ssd.pieces))
        context.events.finished.subscribe(self._settle)

    def publish_to(self, store: PagedUnits) -> None:
        """Publish weights of blocks to `store`, all others to the device."""
        self._store, places = store, store.double()
        for piece in self._on_ssd.pieces:
            self._spares[piece.device] = (
                places[piece.held] if piece.device in store.hosts else host_copy(piece.device)
            )
        self._on_ssd.write_weights_to(store.hosts)

    # -- the training thread ---------------------------------------------------------------------------------

    def _adopt_external_writes(self) -> None:
        on_ssd, written = self._on_ssd, self._on_ssd.writes.take_external()
        if written and self._sweeps.is_stale:
            raise write_during_update_error(len(written))
        on_ssd.stale.update(written)
        stale = [each for each in on_ssd.pieces if each.device in on_ssd.stale] if on_ssd.stale else []
        for piece in stale:
            on_ssd.adopt_loaded(piece)
        self._copy_to_spares(stale)
        on_ssd.stale.clear()

    @torch.no_grad()
    def _copy_to_spares(self, pieces: Iterable[Piece]) -> None:
        """Copy weights that the user has written on the device to the memory that sweeps write."""
        for piece in pieces:
            if piece.device not in self._on_ssd.offloaded_weights:
                self._spares[piece.device].copy_(self._on_ssd.weight(piece))

    def _update_all(self) -> None:
        self._adopt_external_writes()
        on_ssd, gradients = self._on_ssd, Gradients()
        for piece in on_ssd.pieces:
            if piece.device.grad is not None or piece.held.grad is not None:
                gradients[piece.held] = on_ssd.take_gradient(piece)
        self._sweeps.add_gradients(gradients)

    def _publish(self) -> None:
        """Make the weights of the finished sweep current; runs on the training thread."""
        before = self._store.hosts
        self._store.swap()
        self._on_ssd.write_weights_to(self._store.hosts)
        for piece in self._on_ssd.pieces:
            if piece.device in before:
                self._spares[piece.device] = before[piece.device]
            else:
                torch.ops.memtune.copy_to_device_(local(piece.device), self._spares[piece.device])
                self._on_ssd.writes.note_write(piece.device)
        # The next sweep writes the same host copies, so it waits for the H2D copies issued here.
        self._published = transfer.issued(self._device)

    @torch.no_grad()
    def _settle(self) -> None:
        self._sweeps.finish_all()

    # -- the sweep's thread ----------------------------------------------------------------------------------

    def _prepared(self, gradients: Gradients) -> partial[None]:
        # Copies: a scheduler changes the groups' dictionaries while the sweep runs.
        groups = [each.group for each in self._on_ssd.pieces]
        return partial(self._sweep_over, gradients, {id(each): {**each, "params": ()} for each in groups})

    def _sweep_over(self, gradients: Gradients, settings: dict[int, dict[str, Any]]) -> None:
        on_ssd, spares = self._on_ssd, self._spares

        def update(piece: Piece, host: Tensor, seed: int) -> None:
            gradient = gradients.pop(piece.held)
            on_ssd.update(piece, host, gradient, seed, settings[id(piece.group)])
            new = new_weight(piece, host, gradient)
            # Freed after its update, before the weight is copied.
            del gradient
            spares[piece.device].copy_(new)

        # The copies to the device still read the weights that this sweep is about to write.
        if self._published is not None:
            self._published.synchronize()
        with tier(HOST), torch.no_grad():
            for piece in on_ssd.pieces:
                # The other copy of the weights becomes current as a whole: weights without a gradient must be
                # in it too.
                if piece.held not in gradients and piece.device in on_ssd.offloaded_weights:
                    spares[piece.device].copy_(on_ssd.offloaded_weights[piece.device])
            on_ssd.stream([piece for piece in on_ssd.pieces if piece.held in gradients], update)

    # -- proof -----------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Return bytes on SSD, the current version and the largest staleness, for the audit.

        Raises:
            ApplyError: Some state is not on SSD, or a weight has no second copy.
        """
        if missing := len(self._on_ssd.pieces) - len(self._spares):
            raise refusals.error_of(refusals.no_second_copy(missing))
        return self._on_ssd.check() | self._sweeps.facts()
