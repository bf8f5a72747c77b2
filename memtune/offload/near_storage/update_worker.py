"""A process that owns one storage domain: its file, its part of the optimizer's state, and the native update
of both.

It is started by `offload.near_storage.update_worker_client` and does what it is told, line by line, in order;
what it reads and writes is under way meanwhile. Gradients come and weights go through memory that both
processes have. It knows nothing of torch, so it starts in a fraction of a second and takes little memory. It
ends with its trainer, however that ends: the end of the trainer's socket, or of the trainer itself, is
noticed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.errors import EnvironmentFault
from memtune.ssd import TENSORS, WRITE_PRIORITY, Extent, RunFolder, SsdFile, Ticket, cores_of_drive, flush

_PATIENCE_S: Final = 1.0
"""How long it waits for an order before it looks whether its trainer is there."""
_FIRST: Final = ("adamw", "sgd", "lion")
"""Rules whose first moment comes first; that of `adagrad` is a second one."""
F32 = npt.NDArray[np.float32]


class Updater:
    """Updates sub-groups of one domain.

    Args:
        told: The first line: where the file goes, what is in it, and how to update.
        memory: Shared with the trainer: slots, then buffers.
        socket_: Orders come from here, answers go there.
    """

    def __init__(self, told: dict[str, Any], memory: mmap.mmap, socket_: socket.socket) -> None:
        self._told, self._socket = told, socket_
        slot_bytes, numel = told["slot_bytes"], told["buffer_numel"]
        every = np.frombuffer(memory, np.uint8)
        self._slots = [every[i * slot_bytes : (i + 1) * slot_bytes] for i in range(told["slots"])]
        buffers = every[told["slots"] * slot_bytes :].view(np.float32)
        self._buffers: list[F32] = [buffers[i * numel : (i + 1) * numel] for i in range(told["buffers"])]
        self._folder = RunFolder(Path(told["directory"]))  # which the trainer has looked at
        self._file = SsdFile(self._folder.path / TENSORS)
        self._groups = told["sub_groups"]
        self._extents = [self._reserved(group) for group in self._groups]
        self._spares = [self._reserved(group) for group in self._groups] if told["keep"] else []
        self._fresh: set[int] = (
            set()
        )  # sub-groups written since the last complete step, which is in their spare slots
        self._under_way: list[list[Ticket]] = [[] for _ in self._buffers]
        self._events: list[tuple[str, int, int]] = []
        self._bytes = {"read": 0, "written": 0}

    def _reserved(self, group: dict[str, Any]) -> tuple[Extent, Extent]:
        name, weights, moments = group["name"], 4 * group["numel"], 4 * group["moments"]
        reserve = self._file.reserve
        return reserve(f"the weights of {name}", weights), reserve(f"the optimizer state of {name}", moments)

    def ready(self) -> None:
        """Say where the file is, and where in it each sub-group."""
        places = [[weights.offset, moments.offset] for weights, moments in self._extents + self._spares]
        self.say("ready", {"path": str(self._file.path), "places": places})

    def say(self, what: str, more: Any = None) -> None:
        """Answer the trainer."""
        with contextlib.suppress(OSError):  # it is gone, which the next wait for an order shows
            self._socket.settimeout(None)
            self._socket.sendall(json.dumps([what, more]).encode() + b"\n")
        self._socket.settimeout(_PATIENCE_S)

    def obey(self, order: list[Any]) -> None:
        """Do what one line says."""
        acts: dict[str, Callable[..., None]] = {
            "begin": self._events.clear,
            "read": self._read,
            "update": self._update,
            "write": self._write,
            "later": self._later,
            "settle": self._settle,
            "keep": self._keep,
            "complete": self._fresh.clear,
            "forget": self._forget,
            "take": self._take,
        }
        acts[order[0]](*order[1:])

    def _event(self, what: str, group: int) -> None:
        self._events.append((what, group, time.monotonic_ns()))

    def _parts(self, group: int, buffer: int) -> tuple[F32, F32]:
        numel, moments = self._groups[group]["numel"], self._groups[group]["moments"]
        both = self._buffers[buffer]
        return both[:numel], both[numel : numel + moments]

    def _arrived(self, buffer: int) -> None:
        while self._under_way[buffer]:
            self._under_way[buffer].pop(0).result()

    def _read(self, group: int, buffer: int) -> None:
        self._arrived(buffer)
        self._event("read", group)
        for extent, part in zip(self._extents[group], self._parts(group, buffer), strict=True):
            self._under_way[buffer].append(self._file.move(False, extent, part.view(np.uint8), 0))
            self._bytes["read"] += part.nbytes

    def _update(self, group: int, buffer: int, slot: int, updates: list[tuple[int, dict[str, Any]]]) -> None:
        """The weights are handed over before any byte of them is written."""
        self._arrived(buffer)
        self._event("update", group)
        weights, moments = self._parts(group, buffer)
        for index, numbers in updates:
            self._update_segment(
                self._groups[group]["segments"][index], numbers, self._slots[slot], weights, moments
            )
        self._event("weights handed over", group)
        self.say("updated", group)

    def _update_segment(
        self,
        segment: dict[str, int],
        numbers: dict[str, Any],
        slot: npt.NDArray[np.uint8],
        weights: F32,
        moments: F32,
    ) -> None:
        count, rule = segment["numel"], self._told["rule"]
        narrow = segment["itemsize"] == 2
        out = slot[segment["slot"] :][: count * segment["itemsize"]].view(np.uint16 if narrow else np.float32)
        weight = weights[segment["weight"] :][:count]
        parts = [moments[segment["moment"] + i * count :][:count] for i in range(segment["moments"])]
        if rule not in _FIRST:
            parts.insert(0, None)  # type: ignore[arg-type]
        first, second = [*parts, None, None][:2]
        gradient = out if not segment["sent"] else _scattered(slot[segment["slot"] :], segment, out.dtype)
        settings = _native.OptimizerNumbers(**numbers)
        threads = self._told["threads"]
        _native.optimizer_update(
            rule,
            "float32",
            weight,
            gradient,
            out if narrow else None,
            first,
            second,
            None,
            None,
            settings,
            threads,
        )
        if not narrow:
            out[:] = weight

    def _write(self, group: int, buffer: int) -> None:
        if self._spares and group not in self._fresh:
            self._extents[group], self._spares[group] = self._spares[group], self._extents[group]
            self._fresh.add(group)
        self._start_write("write weights", group, buffer, 0)

    def _later(self, group: int, buffer: int) -> None:
        self._start_write("write moments", group, buffer, 1)

    def _start_write(self, what: str, group: int, buffer: int, part: int) -> None:
        """Weights (part 0) pass moments (part 1) of other sub-groups that wait for the drive."""
        flat = self._parts(group, buffer)[part]
        self._event(what, group)
        self._under_way[buffer].append(
            self._file.move(True, self._extents[group][part], flat.view(np.uint8), WRITE_PRIORITY + part)
        )
        self._bytes["written"] += flat.nbytes

    def _settle(self) -> None:
        for buffer in range(len(self._buffers)):
            self._arrived(buffer)
        self._event("all written", -1)
        self.say("settled", {"bytes": self._bytes, "events": self._events})

    # -- what training can go on from (`offload.near_storage.worker_slots`) ----------------------------------

    def _keep(self, name: str) -> None:
        """All is on the drive, and this folder stays: say where it is, and the checksums."""
        for buffer in range(len(self._buffers)):
            self._arrived(buffer)
        self._file.flush()
        if not (self._folder.path / name).exists():
            (self._folder.path / name).touch()
            flush(self._folder.path)
        places = [
            [each.offset, base64.b64encode(each.sums.tobytes()).decode()]
            for both in self._extents
            for each in both
        ]
        self.say("kept", places)

    def _forget(self, name: str) -> None:
        (self._folder.path / name).unlink(missing_ok=True)

    def _take(self, group: int, buffer: int, folder: str, places: list[tuple[int, str]]) -> None:
        """Read a sub-group that an updater before this one wrote in `folder`."""
        self._arrived(buffer)
        file = os.open(Path(folder) / TENSORS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for (offset, sums), own, part in zip(
                places, self._extents[group], self._parts(group, buffer), strict=True
            ):
                there = Extent(
                    own.name, offset, own.n_bytes, np.frombuffer(base64.b64decode(sums), np.uint64).copy()
                )
                self._file.move(False, there, part.view(np.uint8), 0, file).result()
        finally:
            os.close(file)


def _scattered(
    sent: npt.NDArray[np.uint8], segment: dict[str, int], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """The gradient whose `sent` largest values came, followed by their places; the others are zero."""
    count, values_bytes = segment["sent"], segment["sent"] * segment["itemsize"]
    places = sent[segment["places"] :][: 4 * count].view(np.int32)
    dense = np.zeros(segment["numel"], dtype)
    dense[places] = sent[:values_bytes].view(dtype)
    return dense


def _lines(socket_: socket.socket, trainer: int) -> Iterator[bytes]:
    """Orders as they come; ends with the trainer."""
    socket_.settimeout(_PATIENCE_S)
    rest = b""
    while True:
        try:
            more = socket_.recv(1 << 20)
        except TimeoutError:
            if os.getppid() != trainer:  # whoever was forked from it may still hold its end of the socket
                return
            continue
        except OSError:
            return
        if not more:
            return
        *lines, rest = (rest + more).split(b"\n")
        yield from lines


def _work(socket_: socket.socket, memory: mmap.mmap, trainer: int) -> None:
    lines = _lines(socket_, trainer)
    first = next(lines, None)
    if first is None:
        return
    told = json.loads(first)
    if (cores := cores_of_drive(Path(told["directory"]))) is not None:
        os.sched_setaffinity(0, cores)
    updater = Updater(told, memory, socket_)
    updater.ready()
    for line in lines:
        updater.obey(json.loads(line))


def main() -> None:
    """`python -m memtune.offload.near_storage.update_worker SOCKET MEMORY TRAINER`: file descriptors, and the
    process that started this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what an interrupt means
    fd, memory_fd, trainer = map(int, sys.argv[1:])
    socket_ = socket.socket(fileno=fd)
    try:
        _work(socket_, mmap.mmap(memory_fd, 0), trainer)
    except EnvironmentFault as fault:
        text = {"what": fault.what, "evidence": fault.evidence, "fix": fault.fix, "code": fault.code}
        with contextlib.suppress(OSError):
            socket_.sendall(json.dumps(["fault", text]).encode() + b"\n")
        sys.exit(3)


if __name__ == "__main__":
    main()
