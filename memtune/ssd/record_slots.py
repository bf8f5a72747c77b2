"""Records on SSD: a parameter's weight and moments in one contiguous piece, with two slots for
`ssd.last_step`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import EnvironmentFault
from memtune.runtime import HOST, local, tier
from memtune.ssd import offload_dir, ssd_tensors
from memtune.ssd.last_step import DeadRun, Durable, Manifest
from memtune.ssd.ssd_tensors import TENSORS, Extent


class RecordSlots:
    """Pieces in this process's own file; implements `last_step.Slots`.

    Args:
        pieces: Pieces with spare slots.
        optimizer: Owner of their state, which a loaded state dict replaces.
    """

    def __init__(self, pieces: list[Piece], optimizer: Optimizer) -> None:
        self._pieces, self._optimizer = pieces, optimizer
        self._resumed: list[Piece] = []

    def facts(self) -> list[Any]:
        """Return names, shapes, types and moments."""
        return [
            [each.name, list(each.held.shape), str(each.device.dtype), each.moments] for each in self._pieces
        ]

    def look(self, key: str, manifests: list[Manifest]) -> None:
        """Do nothing: all pieces are in the run's folder."""

    def holders(self) -> object:
        """Return both slots of all pieces."""
        return [each for piece in self._pieces for each in (piece.ssd, piece.spare)]

    def durable(self) -> Durable:
        """Return one extent and one counter for each piece."""
        place = ssd_tensors.current()
        place.flush()
        steps = [self._optimizer.state[piece.held].get("step") for piece in self._pieces]
        counters = [None if each is None else float(each) for each in steps]
        return Durable([place.extent(piece.ssd) for piece in self._pieces], counters, [], {})

    def complete(self) -> None:
        """Let the next step write the other slots."""
        for piece in self._pieces:
            piece.fresh = False

    def resume_from(self, run: DeadRun, manifest: Manifest) -> None:
        """Copy the pieces of `manifest` through the host, piece by piece.

        Raises:
            EnvironmentFault: Bytes cannot be read back as they were written; names the tensor.
        """
        with tensors_of(run, manifest.step) as file:
            for piece, extent, counter in zip(self._pieces, manifest.pieces, manifest.counters, strict=True):
                self._resume_piece(piece, extent, counter, file)

    def _resume_piece(self, piece: Piece, extent: Extent, counter: float | None, file: int) -> None:
        host = copy_to_slot(extent, piece.target, file)
        _copy_to_device(piece, host)
        state = self._optimizer.state[piece.held]
        if counter is not None:
            state["step"].fill_(counter)
        piece.switch(state)
        self._resumed.append(piece)

    def back(self) -> None:
        """Restore the weights from the other slots, which have this run's own values."""
        for piece in self._resumed:
            assert piece.spare is not None
            _copy_to_device(piece, piece.spare)

    def forget(self) -> None:
        """Do nothing: the pieces are removed with the run's folder."""

    def remove_before(self) -> None:
        """Do nothing, as `forget`."""

    def release_before(self) -> None:
        """Do nothing, as `forget`."""


@contextmanager
def tensors_of(run: DeadRun, step: int) -> Iterator[int]:
    """Open the file of the tensors that `run` kept of `step`, in this context.

    Raises:
        EnvironmentFault: It cannot be opened.
    """
    try:
        file = os.open(run.path / TENSORS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentFault(
            f"The tensors that the run kept of step {step} cannot be read: {error.strerror}.",
            evidence=f"In {offload_dir.given(run.path)}.",
            fix="memtune clean, and resume from a checkpoint",
            code="MT365",
        ) from None
    try:
        yield file
    finally:
        os.close(file)


def copy_to_slot(extent: Extent, target: Tensor, file: int) -> Tensor:
    """Read `extent` of `file` into host memory and write it to `target`, which has the same layout."""
    with tier(HOST):
        host = torch.empty_like(target)
    ssd_tensors.current().read(extent, host, file=file).result()
    torch.ops.memtune.write_ssd_(target, host)
    ssd_tensors.written(target)
    return host


def _copy_to_device(piece: Piece, host: Tensor) -> None:
    weight = local(piece.device).detach()
    torch.ops.memtune.copy_to_device_(weight, piece.parts(host)[0].detach().to(weight.dtype))


@dataclass(eq=False)
class Piece:
    """A parameter's weight and moments on SSD, one after the other."""

    name: str
    device: nn.Parameter
    held: nn.Parameter  # the optimizer's replacement of it, on SSD
    ssd: Tensor
    group: dict[str, Any]
    moments: list[str]
    spare: Tensor | None = None
    """The other slot, which has the last complete step."""
    fresh: bool = False
    """Written since the last complete step, which is in the other slot; that slot must not be written."""

    def parts(self, of: Tensor) -> list[Tensor]:
        """Return the weight and moments in `of`, which has the layout of the piece."""
        if self.held.numel() == 0:  # an empty shard
            return [of.view(self.held.shape)] * (1 + len(self.moments))
        return [part.view(self.held.shape) for part in of.split(self.held.numel())]

    @property
    def target(self) -> Tensor:
        """Slot that a step writes; never the one with the last complete step."""
        return self.ssd if self.spare is None or self.fresh else self.spare

    def switch(self, state: dict[str, Any]) -> None:
        """Make `target` the piece from now on; `state` and the optimizer's parameter follow.

        Loaded state that has not been written to the piece yet is not replaced.
        """
        if self.spare is None or self.fresh:
            return
        was = self.ssd.untyped_storage()._cdata
        self.ssd, self.spare, self.fresh = self.spare, self.ssd, True
        weight, *moments = self.parts(self.ssd)
        self.held.data = weight
        for name, moment in zip(self.moments, moments, strict=True):
            if (value := state.get(name)) is not None and value.untyped_storage()._cdata == was:
                state[name] = moment
