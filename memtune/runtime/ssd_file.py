"""One preallocated file on SSD: extents in it, reads and writes of plain memory by the native engine (`csrc/io`).

Bytes move past the page cache where the file system allows it. Every block carries a checksum, kept here, that is compared on
read: what is damaged, cut off or cannot be written raises an error with its name; nothing wrong is handed out. The file is held
open, so that deleting it does no harm. Nothing here needs torch: `runtime.updater` runs in processes without it.
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.errors import EnvironmentFault
from memtune.runtime.offload_dir import given, orphans
from memtune.units import MIB, format_bytes

ALIGN: Final[int] = _native.IO_ALIGN
_GROW: Final = 64 * MIB
TENSORS: Final = "tensors"
"""Name of the file in a run's folder."""
LATE: Final = 1 << 40
"""Priority of writes: behind every read."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Extent:
    """Where a tensor's bytes are."""

    name: str
    """What errors call it."""
    offset: int
    n_bytes: int
    sums: npt.NDArray[np.uint64]


class Ticket:
    """A transfer under way; `result` returns when it is over.

    What is raised is a copy of the error that is kept: an error knows the frames that it went through, and those the graph whose
    tensors on SSD keep their file, which has the ticket. Nothing of that would ever go.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: EnvironmentFault | None = None
        self._lock = threading.Lock()

    def result(self) -> None:
        """Return once the bytes have arrived; any number of times, from any thread.

        Raises:
            EnvironmentFault: They did not, or not as they were written; says which tensor's.
        """
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except EnvironmentFault as error:
                    self._error = copy(error)
        if self._error is not None:
            raise copy(self._error)


@dataclass
class _Free:
    """Free ranges of a file, sorted and never adjacent: (offset, bytes)."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    def take(self, n_bytes: int) -> int | None:
        """Offset of `n_bytes` from the first range that has them."""
        for i, (offset, size) in enumerate(self.ranges):
            if size >= n_bytes:
                self.ranges[i : i + 1] = [(offset + n_bytes, size - n_bytes)] if size > n_bytes else []
                return offset
        return None

    def give(self, offset: int, n_bytes: int) -> None:
        """Put a range back."""
        i = bisect.bisect(self.ranges, (offset, 0))
        if i < len(self.ranges) and offset + n_bytes == self.ranges[i][0]:
            n_bytes += self.ranges.pop(i)[1]
        if i > 0 and sum(self.ranges[i - 1]) == offset:
            before, size = self.ranges.pop(i - 1)
            offset, n_bytes, i = before, size + n_bytes, i - 1
        self.ranges.insert(i, (offset, n_bytes))


class SsdFile:
    """One file and the engine that serves it.

    Args:
        path: The file; it is made.
        engine: `auto`, `io_uring` or `threads`.
        depth: Blocks under way at once.
        block_bytes: Of one read or write, and of what a checksum covers.
        checksums: Off only to measure what they cost.

    Raises:
        EnvironmentFault: The file cannot be made.
    """

    def __init__(
        self, path: Path, *, engine: str = "auto", depth: int = 16, block_bytes: int = MIB, checksums: bool = True
    ) -> None:
        self.path = path
        self._engine = [_native.IoEngine(which=engine, depth=depth, block_bytes=block_bytes, checksums=checksums)]
        self._fd, self.direct = _opened(path)
        self._bytes = self.used_bytes = 0
        self._free, self._lock = _Free(), threading.RLock()  # a tensor may be let go while another is made
        self._under_way: dict[int, tuple[Bytes, Extent]] = {}  # by the engine's ticket
        weakref.finalize(self, _close, self._engine, self._fd, self._under_way)

    @property
    def engine(self) -> _native.IoEngine:
        """Serves the file until it, or the process, ends: a file that something keeps for ever keeps no engine then."""
        return self._engine[0]

    # -- space -------------------------------------------------------------------------------------------------------------

    def reserve(self, name: str, n_bytes: int) -> Extent:
        """Space for `n_bytes`, which is really there when this returns.

        Raises:
            EnvironmentFault: The disk is full; says how much is wanted and how much is free.
        """
        padded = max(-(-n_bytes // ALIGN) * ALIGN, ALIGN)
        with self._lock:
            offset = self._free.take(padded)
            if offset is None:
                self._grow(name, padded)
                offset = self._free.take(padded)
                assert offset is not None
            extent = Extent(name, offset, n_bytes, np.zeros(self.engine.blocks(n_bytes), np.uint64))
            self.used_bytes += padded
        return extent

    def release(self, extent: Extent) -> None:
        """The space may be used for something else; nothing must be under way."""
        padded = max(-(-extent.n_bytes // ALIGN) * ALIGN, ALIGN)
        with self._lock:
            self._free.give(extent.offset, padded)
            self.used_bytes -= padded

    def _grow(self, name: str, n_bytes: int) -> None:
        for more in (-(-n_bytes // _GROW) * _GROW, n_bytes):  # a nearly full disk may still have what is needed now
            try:
                os.posix_fallocate(self._fd, self._bytes, more)
            except OSError as error:
                failed = error.errno or errno.EIO
                continue
            self._free.give(self._bytes, more)
            self._bytes += more
            return
        os.truncate(self._fd, self._bytes)  # a failed fallocate may leave part of what it took
        raise self._error(name, failed, 0, wanted=n_bytes)

    # -- bytes -------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Return once what was written is on the drive, whatever happens to the machine."""
        os.fdatasync(self._fd)

    def move(self, write: bool, extent: Extent, flat: Bytes, priority: int, file: int | None = None) -> Ticket:
        """Begin to write `flat`, as long as the extent, or to read into it (from `file` where it is not this one).

        `flat` and the extent are kept until that is over, or where nobody asks for the result until the file is closed; smaller
        priorities come first.
        """
        ticket = self.engine.start(write, self._fd if file is None else file, extent.offset, flat, extent.sums, priority)
        self._under_way[ticket] = flat, extent

        def finish() -> None:
            error, block = self.engine.wait(ticket)
            self._under_way.pop(ticket, None)
            if error:
                raise self._error(extent.name, error, block)

        return Ticket(finish)

    def _error(self, name: str, error: int, block: int, wanted: int = 0) -> EnvironmentFault:
        full = error in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what, fix, code = _FULL if full else _FAILURES.get(error, _OTHER)
        fix = "raise the limit on the size of files (ulimit -f), or move less to SSD" if error == errno.EFBIG else fix
        text = os.strerror(error) if error > 0 else "it was given up"
        where = given(self.path.parent)
        evidence = f"{format_bytes(wanted)} more wanted, {_room(where)}." if full else f"In {where}, block {block} of it."
        return EnvironmentFault(what.format(name=name, text=text), evidence=evidence, fix=fix, code=code)


def _room(where: Path) -> str:
    """What is free in the directory `where`, and what could be."""
    try:
        there = os.statvfs(where)
    except OSError:  # somebody has removed it
        return f"{where} is gone"
    kept = sum(each.n_bytes for each in orphans(where) if each.resumable)
    more = f"; runs that ended keep {format_bytes(kept)} to go on from, which memtune clean removes" if kept else ""
    return f"{format_bytes(there.f_bavail * there.f_frsize)} free in {where}{more}"


_FULL: Final = ("There is no room for {name} on SSD: {text}.", "free space, or move less to SSD", "MT362")
_OTHER: Final = ("{name} could not be moved to or from SSD: {text}.", "check the drive", "MT365")
_FAILURES: Final[dict[int, tuple[str, str, str]]] = {
    _native.IO_WRONG_CHECKSUM: (
        "The bytes of {name} that came back from SSD are not those that were written.",
        "check the drive; go on from a checkpoint",
        "MT363",
    ),
    _native.IO_END_OF_FILE: (
        "The file with {name} on SSD has been cut off.",
        "let nothing else write into the offload directory; go on from a checkpoint",
        "MT364",
    ),
}


def _close(engine: list[_native.IoEngine], file: int, under_way: dict[int, tuple[Bytes, Extent]]) -> None:
    engine[0].close()
    engine.clear()
    under_way.clear()  # not before: its thread writes checksums, and what it reads, into this memory
    os.close(file)


def _opened(path: Path) -> tuple[int, bool]:
    """A new file, past the page cache where the file system can."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            return os.open(path, flags | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise EnvironmentFault(
                    f"No file can be made in the offload directory {given(path.parent)}: {error.strerror}.",
                    fix="choose another offload directory", code="MT361",
                ) from None  # fmt: skip
            path.unlink(missing_ok=True)  # some kernels make the file before they refuse
    raise AssertionError("unreachable")
