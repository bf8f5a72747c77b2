"""An updater process: owns one storage domain, that is, its file, its part of the optimizer state and their
native update.

`offload.near_storage.update_worker_client` starts it. It executes orders line by line, in sequence; reads and
writes of the drive run asynchronously. Gradients and weights pass through shared memory. It imports no torch,
so it starts in a fraction of a second and needs little memory. It ends with its trainer, even if the trainer
is killed: it notices the end of the socket, or of its parent process.
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
"""Seconds to wait for an order before it checks that its trainer is alive."""
_FIRST: Final = ("adamw", "sgd", "lion")
"""Rules whose first moment comes first; that of `adagrad` is a second moment."""
F32 = npt.NDArray[np.float32]


class Updater:
    """Updates the sub-groups of one domain.

    Args:
        spec: The first line: directory, sub-groups, and the update rule.
        memory: Shared with the trainer: slots, then buffers.
        socket_: Receives orders, sends replies.
    """

    def __init__(self, spec: dict[str, Any], memory: mmap.mmap, socket_: socket.socket) -> None:
        self._spec, self._socket = spec, socket_
        slot_bytes, numel = spec["slot_bytes"], spec["buffer_numel"]
        every = np.frombuffer(memory, np.uint8)
        # Views, no copies: the trainer's D2H copies write straight into what the kernel reads.
        self._slots = [every[i * slot_bytes : (i + 1) * slot_bytes] for i in range(spec["slots"])]
        buffers = every[spec["slots"] * slot_bytes :].view(np.float32)
        self._buffers: list[F32] = [buffers[i * numel : (i + 1) * numel] for i in range(spec["buffers"])]
        # A folder of its own, whose lock the kernel releases with this process.
        self._folder = RunFolder(Path(spec["directory"]))  # the trainer has checked it
        self._file = SsdFile(self._folder.path / TENSORS)
        self._groups = spec["sub_groups"]
        self._extents = [self._reserve(group) for group in self._groups]
        # Reserved at the start: a drive without room for two slots is refused before training begins.
        self._spares = [self._reserve(group) for group in self._groups] if spec["keep"] else []
        # Sub-groups written since the last complete step, which is in their spare slots.
        self._fresh: set[int] = set()
        self._in_flight: list[list[Ticket]] = [[] for _ in self._buffers]
        self._events: list[tuple[str, int, int]] = []
        self._bytes = {"read": 0, "written": 0}

    def _reserve(self, group: dict[str, Any]) -> tuple[Extent, Extent]:
        name, weights, moments = group["name"], 4 * group["numel"], 4 * group["moments"]
        reserve = self._file.reserve
        return reserve(f"the weights of {name}", weights), reserve(f"the optimizer state of {name}", moments)

    def ready(self) -> None:
        """Report the file, and the offset of each sub-group in it."""
        places = [[weights.offset, moments.offset] for weights, moments in self._extents + self._spares]
        self.reply("ready", {"path": str(self._file.path), "places": places})

    def reply(self, what: str, more: Any = None) -> None:
        """Send a line to the trainer."""
        with contextlib.suppress(OSError):  # the trainer is gone; the next wait for an order ends
            self._socket.settimeout(None)
            self._socket.sendall(json.dumps([what, more]).encode() + b"\n")
        self._socket.settimeout(_PATIENCE_S)

    def execute(self, order: list[Any]) -> None:
        """Execute one order."""
        acts: dict[str, Callable[..., None]] = {
            "begin": self._events.clear,
            "read": self._read,
            "update": self._update,
            "write_weights": self._write_weights,
            "write_moments": self._write_moments,
            "settle": self._settle,
            "keep": self._make_durable,
            "complete": self._fresh.clear,
            "forget": self._forget,
            "take": self._adopt,
        }
        acts[order[0]](*order[1:])

    def _event(self, what: str, group: int) -> None:
        self._events.append((what, group, time.monotonic_ns()))

    def _parts(self, group: int, buffer: int) -> tuple[F32, F32]:
        numel, moments = self._groups[group]["numel"], self._groups[group]["moments"]
        both = self._buffers[buffer]
        return both[:numel], both[numel : numel + moments]

    def _wait_buffer(self, buffer: int) -> None:
        while self._in_flight[buffer]:
            self._in_flight[buffer].pop(0).result()

    def _read(self, group: int, buffer: int) -> None:
        # Its previous contents may still be in writes.
        self._wait_buffer(buffer)
        self._event("read", group)
        for extent, part in zip(self._extents[group], self._parts(group, buffer), strict=True):
            self._in_flight[buffer].append(self._file.move(False, extent, part.view(np.uint8), 0))
            self._bytes["read"] += part.nbytes

    def _update(self, group: int, buffer: int, slot: int, updates: list[tuple[int, dict[str, Any]]]) -> None:
        """Update a sub-group and hand its weights over before any of them is written."""
        # Ends the read of this sub-group; reads of other buffers go on.
        self._wait_buffer(buffer)
        self._event("update", group)
        weights, moments = self._parts(group, buffer)
        for index, numbers in updates:
            self._update_segment(
                self._groups[group]["segments"][index], numbers, self._slots[slot], weights, moments
            )
        self._event("weights handed over", group)
        # The trainer copies the weights from the slot while they are written from the buffer.
        self.reply("updated", group)

    def _update_segment(
        self,
        segment: dict[str, int],
        numbers: dict[str, Any],
        slot: npt.NDArray[np.uint8],
        weights: F32,
        moments: F32,
    ) -> None:
        count, rule = segment["numel"], self._spec["rule"]
        narrow = segment["itemsize"] == 2
        out = slot[segment["slot"] :][: count * segment["itemsize"]].view(np.uint16 if narrow else np.float32)
        weight = weights[segment["weight"] :][:count]
        parts = [moments[segment["moment"] + i * count :][:count] for i in range(segment["moments"])]
        if rule not in _FIRST:
            # The kernel takes (first, second) moments; this rule has a second one only.
            parts.insert(0, None)  # type: ignore[arg-type]
        first, second = [*parts, None, None][:2]
        gradient = out if not segment["n_sent"] else _scattered(slot[segment["slot"] :], segment, out.dtype)
        settings = _native.OptimizerNumbers(**numbers)
        threads = self._spec["threads"]
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
            # bfloat16: the kernel writes the rounded weight to `out` itself.
            out[:] = weight

    def _write_weights(self, group: int, buffer: int) -> None:
        # First write since the last complete step: swap, so that its slot is not overwritten.
        if self._spares and group not in self._fresh:
            self._extents[group], self._spares[group] = self._spares[group], self._extents[group]
            self._fresh.add(group)
        self._start_write("write weights", group, buffer, 0)

    def _write_moments(self, group: int, buffer: int) -> None:
        self._start_write("write moments", group, buffer, 1)

    def _start_write(self, what: str, group: int, buffer: int, part: int) -> None:
        """Start writing weights (part 0) or moments (part 1)."""
        # Weights have a higher priority than moments of other sub-groups in the drive's queue.
        flat = self._parts(group, buffer)[part]
        self._event(what, group)
        self._in_flight[buffer].append(
            self._file.move(True, self._extents[group][part], flat.view(np.uint8), WRITE_PRIORITY + part)
        )
        self._bytes["written"] += flat.nbytes

    def _settle(self) -> None:
        for buffer in range(len(self._buffers)):
            self._wait_buffer(buffer)
        self._event("all written", -1)
        self.reply("settled", {"bytes": self._bytes, "events": self._events})

    # -- complete steps (`offload.near_storage.worker_slots`) ------------------------------------------------

    def _make_durable(self, name: str) -> None:
        """Make all writes durable and mark the folder as kept; reply with offsets and checksums."""
        for buffer in range(len(self._buffers)):
            self._wait_buffer(buffer)
        self._file.flush()
        if not (self._folder.path / name).exists():
            (self._folder.path / name).touch()
            # The marker must survive a power failure before a manifest names this folder.
            flush(self._folder.path)
        places = [
            [each.offset, base64.b64encode(each.sums.tobytes()).decode()]
            for both in self._extents
            for each in both
        ]
        self.reply("kept", places)

    def _forget(self, name: str) -> None:
        (self._folder.path / name).unlink(missing_ok=True)

    def _adopt(self, group: int, buffer: int, folder: str, places: list[tuple[int, str]]) -> None:
        """Read a sub-group that an updater of an earlier run wrote in `folder`."""
        self._wait_buffer(buffer)
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
    received: npt.NDArray[np.uint8], segment: dict[str, int], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Return the dense gradient of the sent largest values and their indices; the others are zero."""
    count, values_bytes = segment["n_sent"], segment["n_sent"] * segment["itemsize"]
    places = received[segment["places"] :][: 4 * count].view(np.int32)
    # The update rule then decays weights and moments of elements that were not sent, as for any zero
    # gradient.
    dense = np.zeros(segment["numel"], dtype)
    dense[places] = received[:values_bytes].view(dtype)
    return dense


def _lines(socket_: socket.socket, trainer: int) -> Iterator[bytes]:
    """Yield orders as they arrive; end with the trainer."""
    socket_.settimeout(_PATIENCE_S)
    rest = b""
    while True:
        try:
            more = socket_.recv(1 << 20)
        except TimeoutError:
            if os.getppid() != trainer:  # a process forked from it may still hold its end of the socket
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
    spec = json.loads(first)
    if (cores := cores_of_drive(Path(spec["directory"]))) is not None:
        # The drive's controller belongs to one socket; other cores would copy across sockets.
        os.sched_setaffinity(0, cores)
    updater = Updater(spec, memory, socket_)
    updater.ready()
    for line in lines:
        updater.execute(json.loads(line))


def main() -> None:
    """Run an updater: `python -m memtune.offload.near_storage.update_worker SOCKET MEMORY TRAINER`.

    SOCKET and MEMORY are file descriptors, TRAINER is the process id of the parent.
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
