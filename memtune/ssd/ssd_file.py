"""Files of a run on SSD: extents that are reserved, written and read by the native engine, with checksums.

No torch, so that updater processes (`offload.near_storage.update_worker`) start at once and stay small.
`ssd.ssd_tensors` makes tensors of extents.
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
from memtune.ssd.offload_dir import given, orphans
from memtune.units import MIB, format_bytes

ALIGN: Final[int] = _native.IO_ALIGN
_GROW: Final = 64 * MIB
TENSORS: Final = "tensors"
"""Name of the file in a run's folder."""
WRITE_PRIORITY: Final = 1 << 40
"""Priority of writes, lower than that of every read."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Extent:
    """Place of a tensor's bytes."""

    name: str
    """Name of the tensor in errors."""
    offset: int
    n_bytes: int
    sums: npt.NDArray[np.uint64]


class Ticket:
    """A running transfer; `result` returns when it is over.

    Each call raises a copy of the error. An error refers to the frames that it passed, these refer to the
    graph whose tensors on SSD keep their file, and the file refers to the ticket: a cycle that would never be
    freed.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: EnvironmentFault | None = None
        self._lock = threading.Lock()

    def result(self) -> None:
        """Return once the bytes have arrived; may be called any number of times, from any thread.

        Raises:
            EnvironmentFault: The transfer failed, or the bytes are not those written; names the tensor.
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
        """Return the offset of `n_bytes` in the first range that is large enough; None if there is none."""
        for i, (offset, size) in enumerate(self.ranges):
            if size >= n_bytes:
                self.ranges[i : i + 1] = [(offset + n_bytes, size - n_bytes)] if size > n_bytes else []
                return offset
        return None

    def give(self, offset: int, n_bytes: int) -> None:
        """Return a range to the free ones."""
        i = bisect.bisect(self.ranges, (offset, 0))
        if i < len(self.ranges) and offset + n_bytes == self.ranges[i][0]:
            n_bytes += self.ranges.pop(i)[1]
        if i > 0 and sum(self.ranges[i - 1]) == offset:
            before, size = self.ranges.pop(i - 1)
            offset, n_bytes, i = before, size + n_bytes, i - 1
        self.ranges.insert(i, (offset, n_bytes))


class SsdFile:
    """A file and the engine that serves it.

    Args:
        path: The file, which is created.
        engine: `auto`, `io_uring` or `threads`.
        depth: Number of blocks in flight.
        block_bytes: Size of one read or write, and of the range of a checksum.
        checksums: Off only to measure their cost.

    Raises:
        EnvironmentFault: The file cannot be created.
    """

    def __init__(
        self,
        path: Path,
        *,
        engine: str = "auto",
        depth: int = 16,
        block_bytes: int = MIB,
        checksums: bool = True,
    ) -> None:
        self.path = path
        self._engine = [
            _native.IoEngine(which=engine, depth=depth, block_bytes=block_bytes, checksums=checksums)
        ]
        self._fd, self.direct = _opened(path)
        self._bytes = self.used_bytes = 0
        # Re-entrant: garbage collection may free a tensor, and so its extent, while another one is reserved.
        self._free, self._lock = _Free(), threading.RLock()
        self._under_way: dict[int, tuple[Bytes, Extent]] = {}  # by the engine's ticket
        weakref.finalize(self, _close, self._engine, self._fd, self._under_way)

    @property
    def engine(self) -> _native.IoEngine:
        """The engine, until the file is closed or the process ends."""
        # A file that is never freed holds no engine after that.
        return self._engine[0]

    # -- space -----------------------------------------------------------------------------------------------

    def reserve(self, name: str, n_bytes: int) -> Extent:
        """Return an extent of `n_bytes`, which are allocated on the drive when this returns.

        Raises:
            EnvironmentFault: The drive is full; the message has the bytes wanted and free.
        """
        padded = max(-(-n_bytes // ALIGN) * ALIGN, ALIGN)
        # `O_DIRECT` moves whole blocks, at multiples of their size.
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
        """Free the extent; no transfer may be using it."""
        padded = max(-(-extent.n_bytes // ALIGN) * ALIGN, ALIGN)
        with self._lock:
            self._free.give(extent.offset, padded)
            self.used_bytes -= padded

    def _grow(self, name: str, n_bytes: int) -> None:
        # A nearly full disk may have room for these bytes, although not for a whole step of growth.
        for more in (-(-n_bytes // _GROW) * _GROW, n_bytes):
            try:
                os.posix_fallocate(self._fd, self._bytes, more)
            except OSError as error:
                failed = error.errno or errno.EIO
                continue
            self._free.give(self._bytes, more)
            self._bytes += more
            return
        os.truncate(self._fd, self._bytes)  # a failed fallocate may have extended the file
        raise self._error(name, failed, 0, wanted=n_bytes)

    # -- bytes -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Return once all writes are on the drive, safe against a crash of the machine."""
        os.fdatasync(self._fd)

    def move(
        self, write: bool, extent: Extent, flat: Bytes, priority: int, file: int | None = None
    ) -> Ticket:
        """Start to write `flat`, as long as the extent, or to read into it (from `file` if given).

        `flat` and the extent are referenced until the transfer is over, or if its result is never awaited
        until the file is closed. Smaller priorities run first.
        """
        ticket = self.engine.start(
            write, self._fd if file is None else file, extent.offset, flat, extent.sums, priority
        )
        # The engine's threads access this memory by address alone.
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
        fix = (
            "raise the limit on the size of files (ulimit -f), or offload less to SSD"
            if error == errno.EFBIG
            else fix
        )
        text = os.strerror(error) if error > 0 else "the transfer was cancelled"
        where = given(self.path.parent)
        evidence = (
            f"{format_bytes(wanted)} more wanted, {_room(where)}."
            if full
            else f"In {where}, block {block} of it."
        )
        return EnvironmentFault(what.format(name=name, text=text), evidence=evidence, fix=fix, code=code)


def _room(where: Path) -> str:
    """Return a text with the bytes free in the directory `where`, and those that could be freed."""
    try:
        there = os.statvfs(where)
    except OSError:  # another process has removed it
        return f"{where} was removed"
    kept = sum(each.n_bytes for each in orphans(where) if each.resumable)
    more = (
        f"; runs that ended keep {format_bytes(kept)} to resume from, which memtune clean removes"
        if kept
        else ""
    )
    return f"{format_bytes(there.f_bavail * there.f_frsize)} free in {where}{more}"


_FULL: Final = ("There is no room for {name} on SSD: {text}.", "free space, or offload less to SSD", "MT362")
_OTHER: Final = ("{name} could not be copied to or from SSD: {text}.", "check the drive", "MT365")
_FAILURES: Final[dict[int, tuple[str, str, str]]] = {
    _native.IO_WRONG_CHECKSUM: (
        "The bytes of {name} read from SSD are not those that were written.",
        "check the drive; resume from a checkpoint",
        "MT363",
    ),
    _native.IO_END_OF_FILE: (
        "The file with {name} on SSD has been truncated.",
        "let nothing else write into the offload directory; resume from a checkpoint",
        "MT364",
    ),
}


def _close(engine: list[_native.IoEngine], file: int, under_way: dict[int, tuple[Bytes, Extent]]) -> None:
    # First: it ends transfers that are not awaited.
    engine[0].close()
    engine.clear()
    under_way.clear()  # after the engine: its thread writes data and checksums into this memory
    os.close(file)


def _opened(path: Path) -> tuple[int, bool]:
    """Create a file, without the page cache (`O_DIRECT`) if the file system supports that."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            return os.open(path, flags | direct, 0o600), bool(direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise EnvironmentFault(
                    f"No file can be made in the offload directory {given(path.parent)}: {error.strerror}.",
                    fix="choose another offload directory",
                    code="MT361",
                ) from None
            path.unlink(missing_ok=True)  # some kernels create the file before they refuse `O_DIRECT`
    raise AssertionError("unreachable")


_BLOCK: Final = Path("/sys/dev/block")
_NODES: Final = Path("/sys/devices/system/node")


def cores_of_drive(directory: Path, block: Path = _BLOCK, nodes: Path = _NODES) -> set[int] | None:
    """Return the cores of the node of `directory`'s drive that this process may use; None if it is unknown.

    Args:
        directory: A directory on the drive.
        block: The system's folder of block devices.
        nodes: The system's folder of NUMA nodes.
    """
    device = os.stat(directory).st_dev
    try:
        place = (block / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        # A partition has no node of its own; its drive's controller, a parent in sysfs, has.
        found = next(each / "numa_node" for each in (place, *place.parents) if (each / "numa_node").is_file())
        node = int(found.read_text())
        mine = (
            cores_in((nodes / f"node{node}" / "cpulist").read_text()) & os.sched_getaffinity(0)
            if node >= 0
            else set()
        )
    except (OSError, ValueError, StopIteration, AttributeError):  # no such device, no such file, not Linux
        return None
    return mine or None


def cores_in(text: str) -> set[int]:
    """Return a list such as `0-3,8` as a set."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)}
