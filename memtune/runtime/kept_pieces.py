"""A parameter's weight and moments in one piece with two slots: how `runtime.resume` keeps them and takes them up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import EnvironmentFault
from memtune.runtime import disk, offload_dir, transfer
from memtune.runtime.manifest import DeadRun, Durable, Manifest
from memtune.runtime.ssd_file import TENSORS, Extent
from memtune.runtime.ssd_piece import Piece
from memtune.runtime.tiers import HOST, tier
from memtune.runtime.tree import local


class KeptPieces:
    """Pieces in this process's own file, as `resume.Kept` has it.

    Args:
        pieces: Each has its spare slot.
        optimizer: Whose state they are; loading gives it another one.
    """

    def __init__(self, pieces: list[Piece], optimizer: Optimizer) -> None:
        self._pieces, self._optimizer = pieces, optimizer
        self._taken: list[Piece] = []

    def facts(self) -> list[Any]:
        """Names, shapes, types and moments."""
        return [[each.name, list(each.held.shape), str(each.device.dtype), each.moments] for each in self._pieces]

    def look(self, key: str, manifests: list[Manifest]) -> None:
        """All is in the run's folder."""

    def holders(self) -> object:
        """Both slots of all."""
        return [each for piece in self._pieces for each in (piece.ssd, piece.spare)]

    def durable(self) -> Durable:
        """One extent and one counter for each piece."""
        place = disk.current()
        place.flush()
        steps = [self._optimizer.state[piece.held].get("step") for piece in self._pieces]
        counters = [None if each is None else float(each) for each in steps]
        return Durable([place.extent(piece.ssd) for piece in self._pieces], counters, [], {})

    def complete(self) -> None:
        """The next step writes the other slots."""
        for piece in self._pieces:
            piece.fresh = False

    def take_up(self, run: DeadRun, manifest: Manifest) -> None:
        """Through the host, piece by piece.

        Raises:
            EnvironmentFault: It cannot be read back as it was written; says whose bytes.
        """
        with tensors_of(run, manifest.step) as file:
            for piece, extent, counter in zip(self._pieces, manifest.pieces, manifest.counters, strict=True):
                self._take_up_piece(piece, extent, counter, file)

    def _take_up_piece(self, piece: Piece, extent: Extent, counter: float | None, file: int) -> None:
        host = taken_up(extent, piece.target, file)
        _up(piece, host)
        state = self._optimizer.state[piece.held]
        if counter is not None:
            state["step"].fill_(counter)
        piece.turn(state)
        self._taken.append(piece)

    def back(self) -> None:
        """The own values are in the other slots."""
        for piece in self._taken:
            assert piece.spare is not None
            _up(piece, piece.spare)

    def forget(self) -> None:
        """All goes with the run's folder."""

    def remove_before(self) -> None:
        """As `forget`."""

    def release_before(self) -> None:
        """As `forget`."""


@contextmanager
def tensors_of(run: DeadRun, step: int) -> Iterator[int]:
    """The file in which `run` kept what it did up to `step`.

    Raises:
        EnvironmentFault: It cannot be opened.
    """
    try:
        file = os.open(run.path / TENSORS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentFault(
            f"What the run kept of step {step} cannot be read: {error.strerror}.",
            evidence=f"In {offload_dir.given(run.path)}.", fix="memtune clean, and go on from a checkpoint", code="MT365",
        ) from None  # fmt: skip
    try:
        yield file
    finally:
        os.close(file)


def taken_up(extent: Extent, target: Tensor, file: int) -> Tensor:
    """What `file` has in `extent`, in host memory and written to `target`, which is laid out alike."""
    with tier(HOST):
        host = torch.empty_like(target)
    disk.current().read(extent, host, file=file).result()
    torch.ops.memtune.write_ssd_(target, host)
    transfer.written(target)
    return host


def _up(piece: Piece, host: Tensor) -> None:
    weight = local(piece.device).detach()
    torch.ops.memtune.copy_to_device_(weight, piece.parts(host)[0].detach().to(weight.dtype))
