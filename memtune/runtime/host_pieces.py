"""The user's optimizer with master weights and moments in host memory, updated piece by piece as those on SSD are.

Beside parameters that come and go (`runtime.ssd_parameters`), whose weights and gradients may be on the host or on SSD each.
Where all weights are on the device `runtime.host_optimizer` does it, which brings all gradients down before the first update.
Three rules in place of Rules 1 to 3 of `runtime.ssd_optimizer`:

Rule 1. Nothing is read of a piece, and nothing written: its update is in place. Gradients that are on SSD are read, those of the
        next `ahead` parameters while one is updated.
Rule 2. A new weight that goes to SSD is written from where the update left it. `WRITES` of them are being written at most: when
        the next one has begun, the oldest is finished.
Rule 3. When `step` returns, everything is written.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.read_ahead import WRITES
from memtune.runtime.held_parameter import held_for
from memtune.runtime.host_update import zeros_in_order_of
from memtune.runtime.ssd_optimizer import SsdOptimizer
from memtune.runtime.ssd_piece import Piece
from memtune.runtime.tiers import HOST, mark, tier, tier_of


@dataclass(eq=False)
class HostPiece(Piece):
    """Weight and moments in tensors of their own: the weight's memory goes to a device, the moments' never does."""

    values: list[Tensor] = field(default_factory=list)

    def parts(self, of: Tensor) -> list[Tensor]:
        """Weight and moments; `of` is the weight, as nothing else is brought."""
        return self.values


class HostPieces(SsdOptimizer):
    """Moves an optimizer's weights and state to host memory.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        master: bfloat16 parameters have float32 masters.
        ahead: Gradients that are read ahead, of those that are on SSD.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
    """

    def _piece(self, name: str, parameter: nn.Parameter, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> Piece:
        names, weight = self._native.moment_names(group), weight.detach()
        with tier(HOST):
            moments = [state[each].float() if each in state else zeros_in_order_of(weight, torch.float32) for each in names]
        for each in (weight, *moments):
            mark(each, HOST)
        return HostPiece(name, parameter, held_for(parameter, weight), weight, group, names, values=[weight, *moments])

    def _brought(self, piece: Piece) -> Tensor:
        return piece.ssd

    def _put_back(self, piece: Piece, host: Tensor) -> None:
        """It is there."""

    def _write(self, piece: Piece, host: Tensor, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Rule 2."""
        if new is None:
            return
        if len(self._writing) == WRITES:
            self._finish_oldest()
        self._writing.append(([new[0]], [new[1]]))

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """There is no file of it."""

    def check(self) -> dict[str, Any]:
        """Bytes in host memory.

        Raises:
            ApplyError: Some state is elsewhere.
        """
        kept = [each for piece in self._pieces for each in (piece.held, *self._moments_of(piece))]
        if any(tier_of(each) != HOST for each in kept):
            raise ApplyError("Some of the optimizer's state is not on the host.", code="MT309")
        return {"parameters": len(self._pieces), "host_bytes": sum(each.nbytes for each in kept)}

    def _moments_of(self, piece: Piece) -> list[Tensor]:
        state = self._optimizer.state[piece.held]
        return [state[name] for name in piece.moments if name in state]
