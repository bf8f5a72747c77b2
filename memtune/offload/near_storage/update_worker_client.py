"""The trainer's side of an updater process: starts it, shares memory, sends orders, notices its end."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from memtune.errors import EnvironmentFault
from memtune.program import Resource
from memtune.runtime import HOST, SSD, SeamOp, Tier, mark, register, transfer

_GOODBYE_S: Final = 10.0
"""Seconds that an updater may take to end once its trainer has closed the socket."""
_numbers = itertools.count(1)
_links: weakref.WeakValueDictionary[int, UpdaterLink] = weakref.WeakValueDictionary()


class UpdaterLink:
    """The connection to one updater process.

    Args:
        domain: Number of the updater, for messages.
        directory: Directory of its file.
        spec: The other fields of `update_worker.Updater`'s first line.

    Attributes:
        number: Identifies it in the seam's operators.
        slots: Shared memory of `slot_bytes` bytes each.
        buffers: Shared memory of `buffer_numel` float32 each, which the updater reads records into.
    """

    def __init__(self, domain: int, directory: str, spec: dict[str, Any]) -> None:
        self._restart_hint = (
            "start again: the last complete step is kept" if spec["keep"] else "go on from a checkpoint"
        )
        self._what = f"The updater of storage domain {domain} in {directory}"
        # Raised again by every later order, so that training cannot continue with part of the state lost.
        self._broken: EnvironmentFault | None = None  # raised as a copy, like `ssd.ssd_tensors.Ticket`
        self._lines: list[bytes] = []
        self._rest = b""
        self.number = next(_numbers)
        slot_bytes, buffer_bytes = spec["slot_bytes"], 4 * spec["buffer_numel"]
        # Without a name in /dev/shm: nothing is left behind if both processes are killed.
        memory = os.memfd_create("memtune-updater", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        try:
            # Not ftruncate: a sparse file would be killed by SIGBUS at the first write without memory.
            os.posix_fallocate(
                memory, 0, max(spec["slots"] * slot_bytes + spec["buffers"] * buffer_bytes, mmap.PAGESIZE)
            )
            arguments = [sys.executable, "-m", "memtune.offload.near_storage.update_worker"]
            arguments += [str(each) for each in (theirs.fileno(), memory, os.getpid())]
            self.process = subprocess.Popen(
                arguments, pass_fds=(theirs.fileno(), memory), stdin=subprocess.DEVNULL
            )
            shared = mmap.mmap(memory, 0)
        except OSError as error:
            ours.close()
            raise EnvironmentFault(
                f"{self._what} could not be started: {error.strerror}.",
                fix="fewer domains, or a smaller sub_group_mib",
                code="MT380",
            ) from None
        finally:
            theirs.close()
            os.close(memory)
        self._socket = ours
        # As a finalizer, so that a link that is dropped, or the end of the process, ends the updater.
        self.close = weakref.finalize(self, _close, ours, self.process)
        self.slots = [
            _view_at(shared, i * slot_bytes, slot_bytes, torch.uint8, HOST) for i in range(spec["slots"])
        ]
        first = spec["slots"] * slot_bytes
        self.buffers = [
            _view_at(shared, first + i * buffer_bytes, spec["buffer_numel"], torch.float32, HOST)
            for i in range(spec["buffers"])
        ]
        # Operators get a number, since an operator's arguments are plain values and tensors. Weakly: a link
        # that is dropped must end its process.
        _links[self.number] = self
        self.order({"directory": directory, **spec})

    def ready(self, numel: Sequence[int]) -> list[Tensor]:
        """Wait until the updater is ready; return one tensor per extent of its file, of `numel` float32 each.

        Raises:
            EnvironmentFault: The updater could not start; gives its reason.
        """
        # The tensors are mapped and never read; they represent the extents in tables and state.
        found = self.answer("ready")
        with open(found["path"], "rb") as file:
            mapped = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                if numel
                else mmap.mmap(-1, mmap.PAGESIZE)
            )
        self.path = Path(found["path"])
        places = [place for both in found["places"] for place in both]
        return [
            _view_at(mapped, at, count, torch.float32, SSD) for at, count in zip(places, numel, strict=True)
        ]

    def order(self, what: Any) -> None:
        """Send an order.

        Raises:
            EnvironmentFault: The updater has ended, now or earlier; results of its orders are invalid.
        """
        self.require_whole()
        try:
            self._socket.sendall((what if isinstance(what, str) else json.dumps(what)).encode() + b"\n")
        except OSError:
            while True:  # it may have sent its reason; ends with an error
                self.answer("nothing")

    def require_whole(self) -> None:
        """Raise the fault of the updater again if there was one.

        Raises:
            EnvironmentFault: The updater has ended, or has reported a fault.
        """
        if self._broken is not None:
            raise copy(self._broken)

    def answer(self, expected: str) -> Any:
        """Wait for the reply `expected` and return its content.

        Raises:
            EnvironmentFault: The updater has ended, or reports a fault.
        """
        self.require_whole()
        line = self._line()
        what, more = json.loads(line) if line else ("end", {})
        if what == expected:
            return more
        # Kept: each later order raises it again, so training cannot go on with half an update.
        self._broken = self._fault_of(more) if what == "fault" else self._ended()
        raise copy(self._broken)

    def _fault_of(self, why: dict[str, str]) -> EnvironmentFault:
        return EnvironmentFault(
            f"{self._what} gave up. {why['what']}", evidence=why["evidence"], fix=why["fix"], code=why["code"]
        )

    def _line(self) -> bytes:
        # Replies may arrive in pieces, or several at once: the socket is a stream.
        while not self._lines:
            try:
                more = self._socket.recv(1 << 16)
            except OSError:
                more = b""
            if not more:
                return b""
            *self._lines, self._rest = (self._rest + more).split(b"\n")
        return self._lines.pop(0)

    def _ended(self) -> EnvironmentFault:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GOODBYE_S)
        code = self.process.returncode
        how = (
            f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        )
        return EnvironmentFault(
            f"{self._what} (process {self.process.pid}) has ended {how}.",
            evidence="Its part of the optimizer's state is gone, and this step is not complete.",
            fix=(
                f"{self._restart_hint}; if the system killed it for memory: fewer domains, or a smaller"
                " sub_group_mib"
            ),
            code="MT380",
        )


def _read(host: Tensor, weights: Tensor, moments: Tensor, link: int, order: str) -> None:
    transfer.COUNTERS.add("ssd_read", host.nbytes)
    _links[link].order(order)


def _update(slot: Tensor, host: Tensor, link: int, order: str) -> None:
    _links[link].order(order)


def _write(ssd: Tensor, host: Tensor, link: int, order: str) -> None:
    transfer.COUNTERS.add("ssd_write", host.nbytes)
    _links[link].order(order)


register(
    "updater_read_(Tensor(a!) host, Tensor weights, Tensor moments, int link, str order) -> ()",
    SeamOp(Resource.SSD_READ),
    _read,
)
register(
    "updater_update_(Tensor(a!) slot, Tensor(b!) host, int link, str order) -> ()",
    SeamOp(Resource.HOST_THREADS),
    _update,
)
register(
    "updater_write_(Tensor(a!) ssd, Tensor host, int link, str order) -> ()",
    SeamOp(Resource.SSD_WRITE),
    _write,
)


def _view_at(memory: mmap.mmap, at: int, count: int, dtype: torch.dtype, where: Tier) -> Tensor:
    if not count:
        found = torch.empty(0, dtype=dtype)
    else:
        with warnings.catch_warnings():
            # Torch warns that the mapping is not writable; it is never written.
            warnings.simplefilter("ignore")
            found = torch.frombuffer(memory, dtype=dtype, count=count, offset=at)
    mark(found, where)
    return found


def _close(socket_: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Close the socket, upon which the updater ends; kill it if it does not."""
    socket_.close()
    try:
        process.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
