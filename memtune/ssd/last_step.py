"""Resume of training from the last complete step after a crash (`resume: last_step`).

Each piece of state on SSD has two slots. A step writes the slot that the last manifest does not name; when
all is written and flushed, one of two manifests is replaced by a rename. States of a slot:

    spare --a step writes it--> written --manifest replaced--> complete (the other slot is spare then)

- A manifest is complete or absent: it has a hash, and replaces its predecessor by a rename.
- It is written after all that it names has been flushed to the drive.
- All ranks resume the newest step that every one of them has.

A resume works like a step: this run's own values are in one slot, and the values of the manifest are copied
to the other, from which weights are copied to the device. So a failed `apply` finds its own values unchanged.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.device import accelerator, platform_of
from memtune.errors import EnvironmentFault
from memtune.runtime import HOST, Context, local, tier
from memtune.ssd import offload_dir, ssd_tensors
from memtune.ssd.ssd_file import TENSORS, Extent
from memtune.units import format_seconds

_CPU_RANDOM: Final = "random numbers, cpu"
_DEVICE_RANDOM: Final = "random numbers, device"


class Slots(Protocol):
    """State on SSD with two slots for everything: parameters' records, updaters' files, or experts."""

    def facts(self) -> list[Any]:
        """Return the facts that must be equal in the run that resumes."""

    def claim_folders(self, key: str, manifests: list[Manifest]) -> None:
        """Find and lock the places that `manifests` name outside of their own run's folder."""

    def holders(self) -> object:
        """Return the objects that own all slots in this run's folder."""

    def durable(self) -> Durable:
        """Flush all that the step has written, and return its places."""

    def complete(self) -> None:
        """Let later writes use the other slots, because a manifest names these."""

    def resume_from(self, run: DeadRun, manifest: Manifest) -> None:
        """Copy the state that `manifest` names into the slots written next, weights to the device."""

    def restore(self) -> None:
        """Restore the weights from before `resume_from`, even if it was interrupted."""

    def forget(self) -> None:
        """Drop all kept state."""

    def remove_before(self) -> None:
        """Remove the places that `look` found."""

    def release_before(self) -> None:
        """Unlock the places that `look` found."""


class LastStep:
    """Keeper of each complete step of one rank; resumes the newest step that all ranks have.

    Args:
        context: Context with the model, its device and ranks.
        kept: State on SSD, with two slots for everything.

    Attributes:
        steps: Complete steps, including those of earlier runs.
    """

    def __init__(self, context: Context, kept: Slots) -> None:
        self._context, self._kept = context, kept
        self._saved = set(context.model.state_dict())  # persistent buffers only, as in a checkpoint
        self._key = self._key_of()
        self._before: list[DeadRun] = []
        self.steps = 0

    def resume(self) -> int:
        """Resume the newest step that all ranks have; return the number of steps that training has done.

        A collective: all ranks call it.

        Raises:
            EnvironmentFault: Kept bytes cannot be read back as they were written; names the tensor.
        """
        self._forget()  # manifests of the same model, trained before in this process
        self._before = dead_runs(offload_dir.checked_dirs(), self._key)
        # Before the ranks agree: from here on no other process may resume, or clean, these runs.
        self._kept.claim_folders(self._key, [each for run in self._before for each in run.manifests])
        self._context.undo.callback(self._release)
        # A crash may fall between the manifests of two ranks; each keeps two, so the minimum exists
        # everywhere.
        agreed = self._agreed(self._before[0].manifests[0].step if self._before else 0)
        if agreed == 0:
            self._release()
            return 0
        source, manifest = next(
            (run, each) for run in self._before for each in run.manifests if each.step == agreed
        )
        self._resume_from(source, manifest)
        # Older runs are removed now, so that a series of crashes does not fill the drive.
        for each in (run for run in self._before if run is not source):
            each.remove()
        self._before = [source]
        message = f"memtune resumes after step {agreed}, the last complete step of a run that ended."
        warnings.warn(message, stacklevel=_level_of_caller())
        return agreed

    def complete(self, steps: int = 1) -> None:
        """Record that `steps` more steps are complete and written: training can resume from here.

        Raises:
            EnvironmentFault: The step cannot be recorded; the previous one still is.
        """
        self.steps += steps
        self._write_manifest()
        self._remove_before()  # this run has a complete step now, so earlier runs are not needed

    def finish(self) -> None:
        """Drop all kept steps of this model, once all ranks have called this.

        Raises:
            EnvironmentFault: Another rank has not called this within `FINISH_S`.
        """
        # The folder remains until the process ends, because other models of the process may have
        # tensors in it. A collective: where another rank has died in its last step, the error
        # leaves the steps on the drive.
        self._wait_for_all()
        self._forget()
        self._kept.forget()
        self._remove_before()

    def _remove_before(self) -> None:
        while self._before:
            self._before.pop().remove()
        self._kept.remove_before()

    def _write_manifest(self) -> None:
        """Write the manifest; its slots remain this run's even after the optimizer is deleted."""
        run = ssd_tensors.folder()
        # Their extents would otherwise be free, and reused by another model, when the optimizer is deleted.
        run.kept[self._key] = self._kept.holders()
        # Flushed first: a manifest on the drive must never name bytes that are still in a cache.
        pieces, counters, folders, notes = self._kept.durable()
        values = _random(self._context) | {name: local(value) for name, value in self._buffers()}
        Manifest(self._key, self.steps, pieces, counters, values, folders, notes).write(run.path)
        self._kept.complete()

    def _forget(self) -> None:
        run = ssd_tensors.folder()
        forget(run.path, self._key)
        run.kept.pop(self._key, None)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in self._context.model.named_buffers() if name in self._saved)

    def _agreed(self, newest: int) -> int:
        """Return the newest step that every rank has; 0: none."""
        if self._context.placement.world_size == 1:
            return newest
        steps = torch.tensor([newest], device=self._context.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
        return int(steps)

    def _wait_for_all(self) -> None:
        if self._context.placement.world_size == 1:
            return
        began = time.monotonic()
        # Not a barrier, which may choose another device.
        work = dist.all_reduce(torch.zeros(1, device=self._context.device), async_op=True)
        try:
            work.wait(timedelta(seconds=FINISH_S))
        except RuntimeError:
            if time.monotonic() - began < FINISH_S:  # another rank has died
                raise
            raise EnvironmentFault(
                f"finish() has waited {format_seconds(FINISH_S)} for the other ranks.",
                evidence="At least one has not called it, or has died; the steps for resuming are kept.",
                fix="call finish() on all ranks; memtune clean removes the steps",
                code="MT365",
            ) from None

    def _resume_from(self, run: DeadRun, manifest: Manifest) -> None:
        placement = self._context.placement
        buffers = {name: local(value).clone() for name, value in self._buffers()}
        weights = (
            {}
            if placement.all_gather_weights is None
            else {p: local(p).detach().to("cpu", copy=True) for p in self._gathered_weights()}
        )
        # Before anything is overwritten, since a failure in the middle must be undone too.
        self._context.undo.callback(self._back, buffers | _random(self._context), weights)
        self._on_all_ranks(lambda: self._kept.resume_from(run, manifest))
        if placement.all_gather_weights is not None:
            placement.all_gather_weights()
        self._set(manifest.values)
        self.steps = manifest.step
        # The resumed step becomes this run's own, so that a crash before its first step loses nothing.
        self._on_all_ranks(self._write_manifest)

    def _on_all_ranks(self, act: Callable[[], None]) -> None:
        """Run `act`; raise on every rank if it failed on one, because the next steps need all ranks."""
        failed: Exception | None = None
        try:
            act()
        except Exception as error:  # of any type, because the other ranks wait in `_agreed`
            failed = error
        if self._agreed(failed is None) == 0:
            raise failed or EnvironmentFault(
                "Another rank cannot resume the step that it kept.",
                fix="see that rank's message",
                code="MT365",
            )

    def _gathered_weights(self) -> list[nn.Parameter]:
        """Return the weights of which this rank updates rows and gathers the others."""
        return [
            parameter
            for parameter in self._context.placement.optimizer_params
            if not isinstance(parameter, DTensor)
        ]

    @torch.no_grad()
    def _back(self, values: dict[str, Tensor], weights: dict[nn.Parameter, Tensor]) -> None:
        """Restore this rank's weights from before the resume; other ranks may not have failed."""
        # The optimizer's state is restored by its own `undo`.
        self._forget()
        self._kept.restore()
        for parameter, value in weights.items():
            parameter.copy_(value)
        self._set(values)

    def _release(self) -> None:
        while self._before:
            self._before.pop().release()
        self._kept.release_before()

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._buffers():
            if name in values:
                with torch.no_grad():
                    local(buffer).copy_(values[name])
        torch.set_rng_state(values[_CPU_RANDOM])
        if _DEVICE_RANDOM in values:
            accelerator.set_rng_state(self._context.device, values[_DEVICE_RANDOM])

    def _key_of(self) -> str:
        context = self._context
        ranks = context.placement.rank, context.placement.world_size
        # The rank too: another number of ranks has other rows, which fit no shard of these.
        facts: list[Any] = [type(context.optimizer).__name__, *ranks, self._kept.facts()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _level_of_caller() -> int:
    """Return the `stacklevel` of the caller outside of memtune; techniques call from different depths."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "memtune":
        frame, level = frame.f_back, level + 1
    return level


def _random(context: Context) -> dict[str, Tensor]:
    found = {_CPU_RANDOM: torch.get_rng_state()}
    if not platform_of(context.device).is_host:
        found[_DEVICE_RANDOM] = accelerator.get_rng_state(context.device)
    return found


# The manifest of a step on SSD: places and checksums of the pieces, and small values. It is complete or
# absent.
SCHEMA: Final = 1
_PATIENCE_S: Final = 1.0
FINISH_S = 600.0
"""Seconds for which `finish` waits for the other ranks."""


class Durable(NamedTuple):
    """Places of a step's writes, flushed to the drive; fields are those of `Manifest`."""

    pieces: list[Extent]
    counters: list[float | None]
    folders: list[str]
    notes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Manifest:
    """One complete step of one rank."""

    key: str
    """Hash of model, optimizer and rank: no other run may resume from it."""
    step: int
    pieces: list[Extent]
    counters: list[float | None]
    """Step count of each piece's optimizer state."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that a checkpoint would have, and states of random number generators."""
    folders: list[str] = field(default_factory=list)
    """Names of the folders with the pieces, if not the run's own; never paths."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Further facts for the component that wrote the pieces, as plain JSON."""

    def text(self) -> bytes:
        """Return the file's content: one line of JSON, one with its hash."""
        pieces = [[each.name, each.offset, each.n_bytes, coded(each.sums.tobytes())] for each in self.pieces]
        values = {name: _tensor_coded(value) for name, value in self.values.items()}
        document = {
            "schema": SCHEMA,
            "key": self.key,
            "step": self.step,
            "pieces": pieces,
            "counters": self.counters,
        }
        line = json.dumps(
            {**document, "values": values, "folders": self.folders, "notes": self.notes}
        ).encode()
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """Return the manifest in `path`; None if it is missing, incomplete, or of another version."""
        try:
            # A torn or foreign file fails here or below, and counts as absent: the other manifest is then the
            # newest.
            line, found, end = path.read_bytes().split(b"\n")
            if end or hashlib.sha256(line).hexdigest().encode() != found:
                return None
            document = json.loads(line)
            if document["schema"] != SCHEMA:
                return None
            pieces = [
                Extent(name, offset, n_bytes, np.frombuffer(base64.b64decode(sums), np.uint64).copy())
                for name, offset, n_bytes, sums in document["pieces"]
            ]
            values = {name: _tensor_decoded(*value) for name, value in document["values"].items()}
            more = document.get("folders", []), document.get("notes", {})
            return cls(document["key"], document["step"], pieces, document["counters"], values, *more)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        """Write it into `folder`; it is on the drive when this returns.

        Raises:
            EnvironmentFault: It cannot be written.
        """
        # By parity: the manifest of the step before remains until this one is in place.
        place = _places(folder, self.key)[self.step % 2]
        new = place.with_name(f".new-{place.name}")
        try:
            new.unlink(missing_ok=True)  # of a step that a crash interrupted
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(handle, "wb") as file:
                file.write(self.text())
                file.flush()
                os.fsync(file.fileno())
            # Atomic, and durable only after the folder has been flushed.
            os.replace(new, place)
            offload_dir.flush(folder)
        except OSError as error:
            gone = error.errno == errno.ENOENT  # another process removed the folder
            raise EnvironmentFault(
                f"Step {self.step} cannot be kept for resuming:"
                f" {'its folder was removed' if gone else error.strerror}.",
                evidence=f"In {offload_dir.given(folder)}.",
                fix=(
                    "let nothing else write into the offload directory; resume from a checkpoint"
                    if gone
                    else "free space in the offload directory, or set  resume: checkpoint"
                ),
                code="MT365" if gone else "MT362",
            ) from None


def _places(folder: Path, key: str) -> tuple[Path, Path]:
    first, second = (folder / f"{offload_dir.MANIFEST}{key[:16]}-{slot}" for slot in (0, 1))
    return first, second


def forget(folder: Path, key: str) -> None:
    """Remove the manifests of `key` in `folder`."""
    for place in _places(folder, key):
        place.unlink(missing_ok=True)


def coded(data: bytes) -> str:
    """Return `data` as text for a manifest."""
    return base64.b64encode(data).decode()


def _tensor_coded(value: Tensor) -> list[Any]:
    host = value.detach().cpu().contiguous()
    return [
        str(host.dtype).removeprefix("torch."),
        list(host.shape),
        coded(host.reshape(-1).view(torch.uint8).numpy().tobytes()),
    ]


def _tensor_decoded(dtype: str, shape: list[int], data: str) -> Tensor:
    flat = torch.frombuffer(bytearray(base64.b64decode(data)) or bytearray(1), dtype=torch.uint8)
    kind = getattr(torch, dtype)
    numel = int(np.prod(shape))
    return flat[: numel * kind.itemsize].view(kind).view(shape) if numel else torch.empty(shape, dtype=kind)


@dataclass(frozen=True, eq=False)
class DeadRun:
    """A folder that a dead run left, locked by this process, with the steps that can be resumed."""

    path: Path
    lock: int
    manifests: tuple[Manifest, ...]
    """Newest first."""

    def remove(self) -> None:
        """Remove the folder."""
        offload_dir.remove_folder(self.path)
        self.release()

    def release(self) -> None:
        """Unlock the folder for other processes."""
        os.close(self.lock)


def dead_runs(directories: Iterable[Path], key: str) -> list[DeadRun]:
    """Return the folders in `directories` with steps of `key`, newest first, locked until released."""
    # Folders of other ranks, which search at the same time, are never locked.
    found = []
    for left in (each for directory in directories for each in offload_dir.orphans(directory)):
        if not left.resumable or not _kept(left.path, key):
            continue
        if (lock := offload_dir.locked(left.path, _PATIENCE_S)) is None:
            continue
        # Read again under the lock: another run may have resumed it, and ended, before the lock was taken.
        if mine := _kept(left.path, key):
            found.append(DeadRun(left.path, lock, mine))
        else:
            os.close(lock)
    return sorted(found, key=lambda run: -run.manifests[0].step)


def _kept(folder: Path, key: str) -> tuple[Manifest, ...]:
    read = (Manifest.read(place) for place in _places(folder, key))
    return tuple(
        sorted((each for each in read if each is not None and each.key == key), key=lambda each: -each.step)
    )


# Records: a parameter's weight and moments in one contiguous piece, with two slots.
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

    def claim_folders(self, key: str, manifests: list[Manifest]) -> None:
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
            # The slot just written has the complete step now; `target` is the other one again.
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

    def restore(self) -> None:
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
    # The manifest is written after this, and must name bytes that are on the drive.
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
    values: list[Tensor] | None = None
    """Weight and moments of a piece in host memory, where only the weight is copied: `ssd` is the weight."""

    def parts(self, of: Tensor) -> list[Tensor]:
        """Return the weight and moments in `of`, which has the layout of the piece."""
        if self.values is not None:
            return self.values
        if self.held.numel() == 0:  # an empty shard
            return [of.view(self.held.shape)] * (1 + len(self.moments))
        return [part.view(self.held.shape) for part in of.split(self.held.numel())]

    @property
    def target(self) -> Tensor:
        """Slot that a step writes; never the one with the last complete step."""
        return self.ssd if self.spare is None or self.fresh else self.spare

    def switch(self, state: dict[str, Any]) -> None:
        """Make `target` the piece from now on; `state` and the optimizer's parameter follow."""
        # Loaded state that has not been written to the piece yet is not replaced.
        if self.spare is None or self.fresh:
            return
        # State of another storage was loaded by the user and is not on this slot.
        was = self.ssd.untyped_storage()._cdata
        self.ssd, self.spare, self.fresh = self.spare, self.ssd, True
        weight, *moments = self.parts(self.ssd)
        self.held.data = weight
        for name, moment in zip(self.moments, moments, strict=True):
            if (value := state.get(name)) is not None and value.untyped_storage()._cdata == was:
                state[name] = moment
