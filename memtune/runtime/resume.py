"""Training goes on from the last complete step after a crash: what `resume: last_step` keeps and takes up.

Rules 1 to 4 are those of `runtime.manifest`. A resumed run does what a step does: it has its own values in one slot, and the
kept ones go into the other, from where weights go up to the device. So a failure of `apply` finds the own ones where they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import EnvironmentFault
from memtune.runtime import disk, offload_dir, transfer
from memtune.runtime.context import Context
from memtune.runtime.manifest import DeadRun, Manifest, dead_runs, forget
from memtune.runtime.ssd_file import TENSORS, Extent
from memtune.runtime.ssd_piece import Piece
from memtune.runtime.tiers import HOST, tier
from memtune.runtime.tree import local

_CPU_RANDOM: Final = "random numbers, cpu"
_DEVICE_RANDOM: Final = "random numbers, device"


class LastStep:
    """Keeps each complete step of one rank, and takes up the newest one that all ranks have.

    Args:
        context: Its model's buffers, device and ranks.
        pieces: Optimizer state on SSD; each has its spare slot.

    Attributes:
        steps: Complete steps, those of the runs before included.
    """

    def __init__(self, context: Context, pieces: list[Piece]) -> None:
        self._context, self._pieces = context, pieces
        self._state = context.optimizer.state
        self._saved = set(context.model.state_dict())  # of the buffers those that a checkpoint would hold, too
        self._key = self._key_of()
        self._before: list[DeadRun] = []
        self._taken: list[Piece] = []
        self.steps = 0

    def resume(self) -> int:
        """Take up the newest step that all ranks have; all ranks call it. Returns how many steps training has done.

        Raises:
            EnvironmentFault: What was kept cannot be read back as it was written; says whose bytes.
        """
        self._forget()  # of the same model, trained before in this process
        self._before = dead_runs(offload_dir.checked(), self._key)
        self._context.undo.callback(self._release)
        agreed = self._agreed(self._before[0].manifests[0].step if self._before else 0)
        if agreed == 0:
            self._release()
            return 0
        source, manifest = next((run, each) for run in self._before for each in run.manifests if each.step == agreed)
        self._take_up(source, manifest)
        for each in (run for run in self._before if run is not source):  # runs that crash one after the other fill no drive
            each.remove()
        self._before = [source]
        warnings.warn(f"memtune goes on after step {agreed}, the last complete one of a run that ended.", stacklevel=8)
        return agreed

    def complete(self, steps: int = 1) -> None:
        """`steps` are over, all that they changed is written: when this returns, training can go on from there.

        Raises:
            EnvironmentFault: It cannot be kept; the step before is.
        """
        self.steps += steps
        disk.current().flush()
        self._write_manifest()
        self._remove_before()  # Rule 4

    def finish(self) -> None:
        """Nothing is kept any more."""
        disk.folder().remove()
        self._remove_before()

    def _remove_before(self) -> None:
        while self._before:
            self._before.pop().remove()

    def _write_manifest(self) -> None:
        """Its places stay this run's when the optimizer is gone and the process goes on with something else."""
        run = disk.folder()
        run.kept[self._key] = [each for piece in self._pieces for each in (piece.ssd, piece.spare)]
        self._manifest().write(run.path)
        for piece in self._pieces:
            piece.fresh = False

    def _forget(self) -> None:
        run = disk.folder()
        forget(run.path, self._key)
        run.kept.pop(self._key, None)

    def _manifest(self) -> Manifest:
        place = disk.current()
        extents = [place.extent(piece.ssd) for piece in self._pieces]
        counters = [float(step) if (step := self._state[piece.held].get("step")) is not None else None for piece in self._pieces]
        values = _random(self._context)
        values |= {name: local(value) for name, value in self._buffers()}
        return Manifest(self._key, self.steps, extents, counters, values)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in self._context.model.named_buffers() if name in self._saved)

    def _agreed(self, newest: int) -> int:
        """The newest step that every rank has (Rule 3); 0: none."""
        if self._context.ranks == 1:
            return newest
        steps = torch.tensor([newest], device=self._context.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
        return int(steps)

    def _take_up(self, run: DeadRun, manifest: Manifest) -> None:
        buffers = {name: local(value).clone() for name, value in self._buffers()}
        weights = {} if self._context.gather_rows is None else {p: local(p).detach().to("cpu", copy=True) for p in self._whole()}
        self._context.undo.callback(self._back, buffers | _random(self._context), weights)
        self._on_all_ranks(lambda: self._take_up_pieces(run, manifest))
        if self._context.gather_rows is not None:
            self._context.gather_rows()
        self._set(manifest.values)
        self.steps = manifest.step
        self._on_all_ranks(self._keep_again)

    def _keep_again(self) -> None:
        disk.current().flush()
        self._write_manifest()

    def _on_all_ranks(self, act: Callable[[], None]) -> None:
        """`act`, after which every rank knows whether it went well on all: what follows needs them all."""
        failed: Exception | None = None
        try:
            act()
        except Exception as error:  # whatever it is, the others wait for this rank
            failed = error
        if self._agreed(failed is None) == 0:
            raise failed or EnvironmentFault(
                "Another rank cannot go on from the step that it kept.", fix="see that rank's message", code="MT365"
            )

    def _take_up_pieces(self, run: DeadRun, manifest: Manifest) -> None:
        try:
            file = os.open(run.path / TENSORS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise EnvironmentFault(
                f"What the run kept of step {manifest.step} cannot be read: {error.strerror}.",
                evidence=f"In {offload_dir.given(run.path)}.", fix="memtune clean, and go on from a checkpoint", code="MT365",
            ) from None  # fmt: skip
        try:
            for piece, extent, counter in zip(self._pieces, manifest.pieces, manifest.counters, strict=True):
                self._take_up_piece(piece, extent, counter, file)
        finally:
            os.close(file)

    def _take_up_piece(self, piece: Piece, extent: Extent, counter: float | None, file: int) -> None:
        with tier(HOST):
            host = torch.empty_like(piece.ssd)
        disk.current().read(extent, host, file=file).result()
        torch.ops.memtune.write_ssd_(piece.target, host)
        transfer.written(piece.target)
        _up(piece, host)
        state = self._state[piece.held]
        if counter is not None:
            state["step"].fill_(counter)
        piece.turn(state)
        self._taken.append(piece)

    def _whole(self) -> list[nn.Parameter]:
        """Weights of which this rank updates rows and is given the others."""
        return [parameter for parameter in self._context.represented if not isinstance(parameter, DTensor)]

    @torch.no_grad()
    def _back(self, values: dict[str, Tensor], weights: dict[nn.Parameter, Tensor]) -> None:
        """The weights as they were before anything was taken up, of this rank alone: others may not have failed.

        What the optimizer held is put back by others.
        """
        self._forget()
        for piece in self._taken:
            assert piece.spare is not None
            _up(piece, piece.spare)
        for parameter, value in weights.items():
            parameter.copy_(value)
        self._set(values)

    def _release(self) -> None:
        while self._before:
            self._before.pop().release()

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._buffers():
            if name in values:
                with torch.no_grad():
                    local(buffer).copy_(values[name])
        torch.set_rng_state(values[_CPU_RANDOM])
        if _DEVICE_RANDOM in values:
            torch.cuda.set_rng_state(values[_DEVICE_RANDOM], self._context.device)

    def _key_of(self) -> str:
        pieces = [[each.name, list(each.held.shape), str(each.device.dtype), each.moments] for each in self._pieces]
        facts: list[Any] = [type(self._context.optimizer).__name__, self._context.rank, self._context.ranks, pieces]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _random(context: Context) -> dict[str, Tensor]:
    found = {_CPU_RANDOM: torch.get_rng_state()}
    if context.device.type == "cuda":
        found[_DEVICE_RANDOM] = torch.cuda.get_rng_state(context.device)
    return found


def _up(piece: Piece, host: Tensor) -> None:
    weight = local(piece.device).detach()
    torch.ops.memtune.copy_to_device_(weight, piece.parts(host)[0].detach().to(weight.dtype))
