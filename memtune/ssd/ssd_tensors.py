"""Tensors on SSD: one preallocated file per process, and extents in it.

A tensor on SSD is a torch tensor whose memory is its extent of the file, mapped but never accessed: it has a
shape, a type and a lifetime, and its extent is free again when the last reference is dropped. Only `write`
and `read` move bytes.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtune import _native
from memtune.device import accelerator
from memtune.errors import EnvironmentFault
from memtune.program import Resource, Tier
from memtune.runtime import HOST, SSD, SeamOp, fake_to_host, mark, register, tier, transfer
from memtune.ssd import offload_dir
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
        """The engine, until the file is closed or the process ends; a file that is never freed holds no
        engine after that.
        """
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


class Disk(SsdFile):
    """A file of tensors; arguments and errors are those of `SsdFile`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors: dict[int, tuple[Extent, Ticket | None]] = {}  # by address of the mapping

    def write(self, extent: Extent, memory: Tensor, priority: int = WRITE_PRIORITY) -> Ticket:
        """Start to write `memory`, on the host and as long as the extent; it is referenced until that is
        over.
        """
        return self.move(True, extent, bytes_of(memory).numpy(), priority)

    def read(self, extent: Extent, memory: Tensor, priority: int = 0, file: int | None = None) -> Ticket:
        """Start to read into `memory`, from `file` if given; smaller priorities run first."""
        return self.move(False, extent, bytes_of(memory).numpy(), priority, file)

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """Return a new tensor on SSD with `like`'s type, shape and strides; its bytes are undefined until it
        is written.

        Raises:
            EnvironmentFault: The drive is full, the file was truncated, or the system has no more mappings;
                names the tensor.
        """
        extent = self.reserve(name, bytes_of(like).numel())
        try:
            return self._over(extent, like)
        except BaseException:  # the number of mappings of a process is limited
            self.release(extent)
            raise

    def _over(self, extent: Extent, like: Tensor) -> Tensor:
        """Return a tensor like `like` over the mapped bytes of `extent`, which is released with it."""
        n_bytes = extent.n_bytes
        try:
            mapped = mmap.mmap(self._fd, max(n_bytes, 1), offset=extent.offset)
        except (ValueError, OSError) as error:  # ValueError: another process has truncated the file
            failed = error.errno or errno.EIO if isinstance(error, OSError) else _native.IO_END_OF_FILE
            raise self._error(extent.name, failed, 0) from None
        with warnings.catch_warnings():  # torch warns that the buffer might be read-only
            warnings.simplefilter("ignore")
            flat = torch.frombuffer(mapped, dtype=torch.uint8, count=max(n_bytes, 1))
        out = torch.empty(0, dtype=like.dtype)
        out.set_(flat.untyped_storage(), 0, like.size(), like.stride())
        mark(out, SSD)
        key = out.untyped_storage().data_ptr()
        with self._lock:
            self._tensors[key] = extent, None
        # On the mapping: every view of the tensor refers to it.
        weakref.finalize(mapped, self._forget, key).atexit = False
        return out

    def store(self, ssd: Tensor, host: Tensor) -> Ticket:
        """Start to write `host` to the tensor `ssd`."""
        with self._lock:
            extent, before = self._tensors[ssd.untyped_storage().data_ptr()]
            if before is not None:
                before.result()
            ticket = self.write(extent, host)
            self._tensors[ssd.untyped_storage().data_ptr()] = extent, ticket
        return ticket

    def load(self, host: Tensor, ssd: Tensor, priority: int = 0) -> Ticket:
        """Start to read the tensor `ssd` into `host`, after a running write of it."""
        with self._lock:
            extent, before = self._tensors[ssd.untyped_storage().data_ptr()]
        if before is not None:
            before.result()
        return self.read(extent, host, priority)

    def verify(self, ssd: Tensor) -> None:
        """Check that the bytes of `ssd` are those that were written; reads through the mapping do not check.

        Raises:
            EnvironmentFault: They are not, or the file was truncated; names the tensor.
        """
        with tier(HOST):
            host = torch.empty_strided(ssd.size(), ssd.stride(), dtype=ssd.dtype)
        self.load(host, ssd).result()

    def extent(self, ssd: Tensor) -> Extent:
        """Return the extent of the tensor `ssd`."""
        with self._lock:
            return self._tensors[ssd.untyped_storage().data_ptr()][0]

    def written(self, ssd: Tensor) -> None:
        """Return once the last write to `ssd` is on the drive."""
        with self._lock:
            before = self._tensors[ssd.untyped_storage().data_ptr()][1]
        if before is not None:
            before.result()

    def _forget(self, key: int) -> None:
        with self._lock:
            extent, before = self._tensors.pop(key)
            if before is not None:
                try:
                    before.result()
                except EnvironmentFault:
                    pass  # its bytes are no longer needed
            self.release(extent)


def verified(ssd: Tensor) -> Tensor:
    """Return `ssd` after a check of its bytes, for a read through its mapping; fake tensors have none."""
    if not isinstance(ssd, FakeTensor):
        current().verify(ssd)
    return ssd


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes that `tensor` spans, without a copy: its own if contiguous, else all of its
    storage.
    """
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if not tensor.is_contiguous():
        return whole
    start = tensor.storage_offset() * tensor.itemsize
    return whole[start : start + tensor.nbytes]


_disk: tuple[int, str, Disk, offload_dir.RunFolder] | None = None


def opened() -> Disk | None:
    """Return this process's disk, if it is open."""
    return _disk[2] if _disk is not None and _disk[0] == os.getpid() else None


def current() -> Disk:
    """Return this process's disk in the offload directory, opened at the first call and again after a fork.

    Raises:
        EnvironmentFault: The directory cannot be used.
    """
    return _current()[0]


def folder() -> offload_dir.RunFolder:
    """Return the folder of `current`."""
    return _current()[1]


def _current() -> tuple[Disk, offload_dir.RunFolder]:
    global _disk
    root = offload_dir.allowed()
    if _disk is None or _disk[:2] != (os.getpid(), root):
        run = offload_dir.RunFolder(offload_dir.checked())
        _disk = os.getpid(), root, Disk(run.path / TENSORS), run
    return _disk[2:]


# -- the copies of this tier ---------------------------------------------------------------------------------


def to_ssd(host: Tensor, name: str) -> Tensor:
    """Return a tensor on SSD after starting a write of `host` to it, once the copy into `host` is complete.

    Raises:
        EnvironmentFault: There is no room, with `name` in the message; or the offload directory cannot be
            used.
    """
    transfer.finish(host)
    place = current()
    ssd = place.tensor(name, host)
    transfer.COUNTERS.add("ssd_write", host.nbytes)
    place.store(ssd, host)
    return ssd


def from_ssd(ssd: Tensor) -> Tensor:
    """Return a host tensor of `ssd`'s layout after starting a read into it; `transfer.wait` and `finish` wait
    for it.
    """
    host = transfer.host_like(ssd, locked=accelerator.is_present())  # pinned, for the reload to the device
    transfer.COUNTERS.add("ssd_read", ssd.nbytes)
    transfer.started(host, current().load(host, ssd))
    return host


def write_ssd(ssd: Tensor, host: Tensor) -> None:
    """Start writing `host` to the tensor `ssd`, in the memory order of `ssd`."""
    transfer.finish(host)
    if host.stride() != ssd.stride() and not (host.is_contiguous() and ssd.is_contiguous()):
        with tier(HOST):
            host = torch.empty_strided(ssd.size(), ssd.stride(), dtype=ssd.dtype).copy_(host)
    transfer.COUNTERS.add("ssd_write", host.nbytes)
    current().store(ssd, host)


def written(ssd: Tensor) -> None:
    """Return once the last write to `ssd` is on the drive, or raise its error; does nothing for a fake
    tensor.
    """
    if not isinstance(ssd, FakeTensor):
        current().written(ssd)


register(
    "to_ssd(Tensor x, str name) -> Tensor",
    SeamOp(Resource.SSD_WRITE, Tier.SSD),
    to_ssd,
    lambda x, name: fake_to_host(x),
)
register("from_ssd(Tensor x) -> Tensor", SeamOp(Resource.SSD_READ, Tier.HOST), from_ssd, fake_to_host)
register("write_ssd_(Tensor(a!) ssd, Tensor x) -> ()", SeamOp(Resource.SSD_WRITE), write_ssd)
