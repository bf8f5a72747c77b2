"""Tensors on SSD: one preallocated file per process (`ssd.ssd_file`), and extents in it.

A tensor on SSD is a torch tensor whose memory is its extent of the file, mapped but never accessed: it has a
shape, a type and a lifetime, and its extent is free again when the last reference is dropped. Only `write`
and `read` move bytes.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtune import _native
from memtune.device import accelerator
from memtune.errors import EnvironmentFault
from memtune.program import Resource, Tier
from memtune.runtime import HOST, SSD, SeamOp, fake_to_host, mark, register, tier, transfer
from memtune.ssd import offload_dir
from memtune.ssd.ssd_file import TENSORS, WRITE_PRIORITY, Extent, SsdFile, Ticket


class Disk(SsdFile):
    """A file of tensors; arguments and errors are those of `SsdFile`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors: dict[int, tuple[Extent, Ticket | None]] = {}  # by address of the mapping

    def write(self, extent: Extent, memory: Tensor, priority: int = WRITE_PRIORITY) -> Ticket:
        """Start to write `memory`, on the host and as long as the extent; it is referenced until then."""
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
        # The storage of the mapping itself: torch's lifetime of the tensor is that of the extent.
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
        """Require that the bytes of `ssd` are those that were written.

        Raises:
            EnvironmentFault: They are not, or the file was truncated; names the tensor.
        """
        # Reads through the mapping do not check.
        with tier(HOST):
            host = torch.empty_strided(ssd.size(), ssd.stride(), dtype=ssd.dtype)
        self.load(host, ssd).result()

    def extent(self, ssd: Tensor) -> Extent:
        """Return the extent of the tensor `ssd`."""
        with self._lock:
            return self._tensors[ssd.untyped_storage().data_ptr()][0]

    def written(self, ssd: Tensor) -> None:
        """Return once the last write to `ssd` is on the drive, or raise its error."""
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
    """Return the bytes that `tensor` spans, without a copy: its own if contiguous, else its storage's."""
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
    """Return this process's disk in the offload directory, opened at the first call and after a fork.

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
    # After a fork the parent's file and engine threads are not this process's.
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


def stored(host: Tensor, name: str) -> Tensor:
    """Return a tensor on SSD with the values of `host`, once they are on the drive.

    Raises:
        EnvironmentFault: There is no room, with `name` in the message.
    """
    ssd: Tensor = torch.ops.memtune.to_ssd(host, name)
    written(ssd)
    mark(ssd, SSD)  # a fake one is not marked yet
    return ssd


def from_ssd(ssd: Tensor) -> Tensor:
    """Return a host tensor of `ssd`'s layout into which a read has started (`transfer.wait`, `finish`)."""
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
