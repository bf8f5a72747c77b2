"""What is on SSD after a step, as a file that is whole or not there: where the pieces are, their checksums, and what is small.

Rule 1. Every piece has two slots. A step writes into the one that the last manifest does not name.
Rule 2. When all pieces of a step are written, the data is flushed to the drive; then manifest `step % 2` is written beside its
        place, flushed and renamed into it. So the last two complete steps are there until the next step's first write.
Rule 3. No rank writes a piece of a step before all ranks have ended the step before: they sum gradients in between, or wait for
        each other (`runtime.kept_experts`, Rule 3). So ranks are at most one step apart, and every rank still has the newest step
        of the one that is behind.
Rule 4. A dead run's folder that has a manifest stays until the run that goes on from it has ended a step of its own; others with
        the same steps go when all ranks have taken them up.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memtune.errors import EnvironmentFault
from memtune.runtime import offload_dir
from memtune.runtime.ssd_file import Extent

SCHEMA: Final = 1
_PATIENCE_S: Final = 1.0


class Durable(NamedTuple):
    """What a step has written and is on the drive; fields are those of `Manifest`."""

    pieces: list[Extent]
    counters: list[float | None]
    folders: list[str]
    notes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Manifest:
    """One complete step of one rank."""

    key: str
    """Of model, optimizer and rank: what else could go on from here would be wrong."""
    step: int
    pieces: list[Extent]
    counters: list[float | None]
    """Steps that each piece's optimizer state counts."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that a checkpoint would hold, and the states of random number generators."""
    folders: list[str] = field(default_factory=list)
    """Names of the folders that have the pieces, where it is not the run's own; never paths."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What else whoever wrote the pieces has to know of them, as plain JSON."""

    def text(self) -> bytes:
        """The file: one line of JSON, one with its hash."""
        pieces = [[each.name, each.offset, each.n_bytes, coded(each.sums.tobytes())] for each in self.pieces]
        values = {name: _tensor_coded(value) for name, value in self.values.items()}
        document = {"schema": SCHEMA, "key": self.key, "step": self.step, "pieces": pieces, "counters": self.counters}
        line = json.dumps({**document, "values": values, "folders": self.folders, "notes": self.notes}).encode()
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Manifest | None:
        """The manifest in `path`; None where it is not there, not whole, or of another version."""
        try:
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
        """Put it into `folder`, on the drive when this returns (Rule 2).

        Raises:
            EnvironmentFault: It cannot be written.
        """
        place = _places(folder, self.key)[self.step % 2]
        new = place.with_name(f".new-{place.name}")
        try:
            with open(new, "wb") as file:
                file.write(self.text())
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, place)
            offload_dir.flush(folder)
        except OSError as error:
            gone = error.errno == errno.ENOENT
            raise EnvironmentFault(
                f"Step {self.step} cannot be kept for resuming: {'its folder was removed' if gone else error.strerror}.",
                evidence=f"In {offload_dir.given(folder)}.",
                fix="let nothing else write into the offload directory; go on from a checkpoint" if gone
                else "free space in the offload directory, or set  resume: checkpoint",
                code="MT365" if gone else "MT362",
            ) from None  # fmt: skip


def _places(folder: Path, key: str) -> tuple[Path, Path]:
    first, second = (folder / f"{offload_dir.MANIFEST}{key[:16]}-{slot}" for slot in (0, 1))
    return first, second


def forget(folder: Path, key: str) -> None:
    """Training cannot go on from what `folder` has of `key`."""
    for place in _places(folder, key):
        place.unlink(missing_ok=True)


def coded(data: bytes) -> str:
    """As text in a manifest."""
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
    """A folder that a dead run left, locked for this process, with the steps that training can go on from."""

    path: Path
    lock: int
    manifests: tuple[Manifest, ...]
    """Newest first."""

    def remove(self) -> None:
        """Nobody needs it any more."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave it to others."""
        os.close(self.lock)


def dead_runs(directories: Iterable[Path], key: str) -> list[DeadRun]:
    """Folders in `directories` with steps of `key`, the one with the newest step first; all are locked until released.

    Those of other ranks, which look at the same time, are never locked.
    """
    found = []
    for left in (each for directory in directories for each in offload_dir.orphans(directory)):
        if not left.resumable or not _kept(left.path, key):
            continue
        if (lock := offload_dir.locked(left.path, _PATIENCE_S)) is None:
            continue
        if mine := _kept(left.path, key):  # another run may have gone on from it, and ended, before the lock was taken
            found.append(DeadRun(left.path, lock, mine))
        else:
            os.close(lock)
    return sorted(found, key=lambda run: -run.manifests[0].step)


def _kept(folder: Path, key: str) -> tuple[Manifest, ...]:
    read = (Manifest.read(place) for place in _places(folder, key))
    return tuple(sorted((each for each in read if each is not None and each.key == key), key=lambda each: -each.step))
