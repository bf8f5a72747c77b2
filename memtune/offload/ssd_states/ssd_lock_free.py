"""Master weights and moments on SSD, updated when it can be done, while training goes on (Angel-PTM).

The rules are those of `offload.optimizer.async_updates`, and for the pieces that a sweep streams Rules 1 and
2 of `offload.ssd_states.ssd_optimizer`: it reads, updates and writes each once, 24 bytes per parameter with
AdamW, whatever the number of steps whose gradients it takes. Two more:

Rule 6. Blocks' weights are published in the pages of a `PagedOffloader`. All others are on the device, from
which no sweep reads, so
        of them the host has the one that is written; they go up when the version is taken up, and the next
        sweep writes them when they have.
Rule 7. Nothing of the optimizer's state on SSD is read while a sweep is under way: a state dict waits (Rule
5), then checks it.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.chunks import PagedOffloader
from memtune.offload.optimizer import Gradients, Sweeps, written_while_updating
from memtune.offload.parameters import copy_of
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer
from memtune.runtime import HOST, Context, local, tier, transfer
from memtune.ssd import Piece


class LockFreeOnSsd(SsdOptimizer):
    """Moves an optimizer's weights and state to SSD, and updates there what training does not wait for.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        ahead: Pieces that are read ahead.
        max_staleness: Steps that the weights may lack.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(self, context: Context, *, ahead: int, max_staleness: int) -> None:
        super().__init__(context, master=False, ahead=ahead)
        self._device = context.device
        self._gone_up: torch.cuda.Event | None = None
        self._spares: dict[nn.Parameter, Tensor] = {}  # where sweeps write, by what is on the device
        self._swept: Gradients = {}  # of the sweep under way, with the settings of each group as it began
        self._settings: dict[int, dict[str, Any]] = {}
        is_fake = any(isinstance(piece.ssd, FakeTensor) for piece in self._pieces)
        self._sweeps = Sweeps(max_staleness, self._half, self._prepared, self._publish, is_fake=is_fake)
        context.model.register_state_dict_pre_hook(lambda *_: self._settle())
        context.model.register_load_state_dict_pre_hook(lambda *_: self._settle())
        self._optimizer.register_load_state_dict_pre_hook(lambda *_: self._settle())
        context.loop.sync = self._sweeps.sync
        context.events.finished.subscribe(self._settle)

    def publish_to(self, store: PagedOffloader) -> None:
        """Weights of blocks are published to `store`, all others to the device."""
        self._store, places = store, store.double()
        for piece in self._pieces:
            self._spares[piece.device] = (
                places[piece.held] if piece.device in store.hosts else copy_of(piece.device)
            )
        self.keep_in(store.hosts)

    # -- the training thread ---------------------------------------------------------------------------------

    def _take_writes(self) -> None:
        written = self._writes.by_others(self._kept)
        if written and self._sweeps.is_late:
            raise written_while_updating(len(written))
        self._stale.update(written)
        for piece in self._pieces if self._stale else ():
            if piece.device in self._stale:
                self._take_in(piece)
        self._stale.clear()

    def _take_in(self, piece: Piece) -> None:
        super()._take_in(piece)
        if piece.device not in self._kept:
            self._spares[piece.device].copy_(self._weight(piece))

    def _update_all(self) -> None:
        self._take_writes()
        gradients: Gradients = {}
        for piece in self._pieces:
            if piece.device.grad is not None or piece.held.grad is not None:
                gradients[piece.held] = super()._gradient(piece)
        self._sweeps.deliver(gradients)

    def _publish(self) -> None:
        """Rule 6."""
        before = self._store.hosts
        self._store.swap()
        self.keep_in(self._store.hosts)
        for piece in self._pieces:
            if piece.device in before:
                self._spares[piece.device] = before[piece.device]
            else:
                torch.ops.memtune.copy_to_device_(local(piece.device), self._spares[piece.device])
                self._writes.wrote(piece.device)
        self._gone_up = transfer.issued(self._device)

    @torch.no_grad()
    def _settle(self) -> None:
        self._sweeps.settle()

    _loads_begin = _settle

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """As `SsdOptimizer.verify`, of what is on SSD once all that was delivered is (Rule 7)."""
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
        if self._gone_up is not None:
            self._gone_up.synchronize()
        with tier(HOST), torch.no_grad():
            for piece in self._pieces:
                if piece.held not in gradients and piece.device in self._kept:
                    self._spares[piece.device].copy_(self._kept[piece.device])
            self._stream([piece for piece in self._pieces if piece.held in gradients])

    def _gradient(self, piece: Piece) -> Tensor:
        return self._swept.pop(piece.held)

    def _settings_of(self, piece: Piece) -> dict[str, Any]:
        return self._settings[id(piece.group)]

    def _hand_on(self, piece: Piece, up: Tensor) -> None:
        self._spares[piece.device].copy_(up)

    # -- proof -----------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Bytes on SSD, the version at hand, and how stale weights have been.

        Raises:
            ApplyError: Some state is elsewhere, or weights are not published through two copies.
        """
        if len(self._spares) != len(self._pieces):
            raise ApplyError(
                f"{len(self._pieces) - len(self._spares)} weights have no second copy on the host.",
                code="MT309",
            )
        sweeps = self._sweeps
        return super().check() | {"version": sweeps.version, "largest_staleness": sweeps.largest_staleness}
