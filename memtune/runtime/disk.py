"""Tensors on SSD: one preallocated file per process, extents in it (`runtime.ssd_file`).

A tensor on SSD is a torch tensor whose memory is its extent of the file, mapped and never touched: it has a shape, a type and a
life, and when the last reference goes its extent is free again. Bytes move through `write` and `read` alone.
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
from memtune.errors import EnvironmentFault
from memtune.runtime import offload_dir
from memtune.runtime.ssd_file import LATE, TENSORS, Extent, SsdFile, Ticket
from memtune.runtime.tiers import HOST, SSD, mark, tier


class Disk(SsdFile):
    """A file of tensors; arguments and errors are those of `SsdFile`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors: dict[int, tuple[Extent, Ticket | None]] = {}  # by address of the mapping

    def write(self, extent: Extent, memory: Tensor, priority: int = LATE) -> Ticket:
        """Begin to write `memory`, as long as the extent and on the host; it is kept until that is over."""
        return self.move(True, extent, bytes_of(memory).numpy(), priority)

    def read(self, extent: Extent, memory: Tensor, priority: int = 0, file: int | None = None) -> Ticket:
        """Begin to read into `memory`, from `file` where it is not this one; smaller priorities come first."""
        return self.move(False, extent, bytes_of(memory).numpy(), priority, file)

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """A new tensor on SSD of `like`'s type, shape and strides; its bytes are whatever is there until it is written.

        Raises:
            EnvironmentFault: There is no room, the file has been cut off, or the system gives no more mappings; says for what.
        """
        extent = self.reserve(name, bytes_of(like).numel())
        try:
            return self._over(extent, like)
        except BaseException:  # the system gives a process so many mappings and no more
            self.release(extent)
            raise

    def _over(self, extent: Extent, like: Tensor) -> Tensor:
        """A tensor like `like` over the mapped bytes of `extent`, which it gives back when it goes."""
        n_bytes = extent.n_bytes
        try:
            mapped = mmap.mmap(self._fd, max(n_bytes, 1), offset=extent.offset)
        except (ValueError, OSError) as error:  # ValueError: somebody has cut the file off
            failed = error.errno or errno.EIO if isinstance(error, OSError) else _native.IO_END_OF_FILE
            raise self._error(extent.name, failed, 0) from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat = torch.frombuffer(mapped, dtype=torch.uint8, count=max(n_bytes, 1))
        out = torch.empty(0, dtype=like.dtype)
        out.set_(flat.untyped_storage(), 0, like.size(), like.stride())
        mark(out, SSD)
        key = out.untyped_storage().data_ptr()
        with self._lock:
            self._tensors[key] = extent, None
        weakref.finalize(mapped, self._forget, key).atexit = False
        return out

    def store(self, ssd: Tensor, host: Tensor) -> Ticket:
        """Begin to write `host` to the tensor `ssd`."""
        with self._lock:
            extent, before = self._tensors[ssd.untyped_storage().data_ptr()]
            if before is not None:
                before.result()
            ticket = self.write(extent, host)
            self._tensors[ssd.untyped_storage().data_ptr()] = extent, ticket
        return ticket

    def load(self, host: Tensor, ssd: Tensor, priority: int = 0) -> Ticket:
        """Begin to read the tensor `ssd` into `host`, after a write of it that is still under way."""
        with self._lock:
            extent, before = self._tensors[ssd.untyped_storage().data_ptr()]
        if before is not None:
            before.result()
        return self.read(extent, host, priority)

    def verify(self, ssd: Tensor) -> None:
        """Check that the bytes of `ssd` are those that were written: whoever reads them through the mapping is told nothing.

        Raises:
            EnvironmentFault: They are not, or the file has been cut off; says whose.
        """
        with tier(HOST):
            host = torch.empty_strided(ssd.size(), ssd.stride(), dtype=ssd.dtype)
        self.load(host, ssd).result()

    def extent(self, ssd: Tensor) -> Extent:
        """Where the tensor `ssd` is."""
        with self._lock:
            return self._tensors[ssd.untyped_storage().data_ptr()][0]

    def written(self, ssd: Tensor) -> None:
        """Return once what was stored in `ssd` is on the drive."""
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
                    pass  # nobody will read it
            self.release(extent)


def verified(ssd: Tensor) -> Tensor:
    """`ssd`, whose bytes somebody is about to read through its mapping; see `Disk.verify`. Fake tensors have none."""
    if not isinstance(ssd, FakeTensor):
        current().verify(ssd)
    return ssd


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes that `tensor` spans, not copied: its own where it is contiguous, else all of its storage."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    if not tensor.is_contiguous():
        return whole
    start = tensor.storage_offset() * tensor.itemsize
    return whole[start : start + tensor.nbytes]


_disk: tuple[int, str, Disk, offload_dir.RunFolder] | None = None


def opened() -> Disk | None:
    """This process's disk, if it has one by now."""
    return _disk[2] if _disk is not None and _disk[0] == os.getpid() else None


def current() -> Disk:
    """This process's disk in the offload directory, opened at the first call and again after a fork.

    Raises:
        EnvironmentFault: The directory cannot be used.
    """
    return _current()[0]


def folder() -> offload_dir.RunFolder:
    """The folder that `current` is in."""
    return _current()[1]


def _current() -> tuple[Disk, offload_dir.RunFolder]:
    global _disk
    root = offload_dir.allowed()
    if _disk is None or _disk[:2] != (os.getpid(), root):
        run = offload_dir.RunFolder(offload_dir.checked())
        _disk = os.getpid(), root, Disk(run.path / TENSORS), run
    return _disk[2:]
