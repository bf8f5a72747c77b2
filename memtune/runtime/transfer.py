"""Copies between tiers: a side stream with events on CUDA, a thread on CPU, and a counter of the bytes on every link.

To and from SSD (`runtime.disk`) likewise: `to_ssd` and `from_ssd` only start; `written` and `wait` say when they are over.

`to_host` and `copy_to_host` only *start* a copy; whoever reads the host tensor or frees the source calls `wait` first.
`to_device` and `copy_to_device` wait for what they read and are complete, in stream order, when they return; but `to_device`
inside `ahead_apart` only starts, and `is_there` says when what it returned is there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtune.errors import EnvironmentFault
from memtune.runtime import disk
from memtune.runtime.huge_pages import in_huge_pages
from memtune.runtime.page_locked import page_locked
from memtune.runtime.ssd_file import Ticket
from memtune.runtime.tiers import HOST, tier


class ByteCounters:
    """Bytes moved by link name since the last `take`; safe from any thread."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, link: str, n_bytes: int) -> None:
        """Count `n_bytes` on `link`."""
        with self._lock:
            self._bytes[link] += n_bytes

    def take(self) -> dict[str, int]:
        """The counts so far, by link; starts again from zero."""
        with self._lock:
            counted, self._bytes = dict(self._bytes), Counter()
        return counted


COUNTERS = ByteCounters()
_pool: ThreadPoolExecutor | None = None
_upload_pool: ThreadPoolExecutor | None = None
_side_streams: dict[int, torch.cuda.Stream] = {}
_upload_streams: dict[int, torch.cuda.Stream] = {}
# What is under way, by address of the host storage: the thread's future on CPU, the stream's event on CUDA, a read from SSD.
_pending: dict[int, Future[None] | torch.cuda.Event | Ticket] = {}
_coming: dict[int, Future[None] | torch.cuda.Event] = {}
"""What comes `ahead_apart`, by address of the storage on the device."""
_is_apart = False
_room = _ROOM = 256
"""As many copies may be under way before those that are over are looked for."""


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(1, thread_name_prefix="memtune-copy")
    return _pool


def _upload_threads() -> ThreadPoolExecutor:
    global _upload_pool
    if _upload_pool is None:
        _upload_pool = ThreadPoolExecutor(1, thread_name_prefix="memtune-upload")
    return _upload_pool


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index or 0
    if index not in _side_streams:
        _side_streams[index] = torch.cuda.Stream(device)
    return _side_streams[index]


def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index or 0
    if index not in _upload_streams:
        _upload_streams[index] = torch.cuda.Stream(device)
    return _upload_streams[index]


def _like(x: Tensor, locked: bool) -> Tensor:
    memory = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=locked)
    return memory if locked else in_huge_pages(memory)  # what is locked has been backed already


def _start(host: Tensor, x: Tensor) -> None:
    """Start copying `x` into `host`; the caller keeps `x` alive until `wait(host)`."""
    COUNTERS.add("device_to_host", x.nbytes)
    key = host.untyped_storage()._cdata
    if x.is_cuda:
        stream = _side_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        _forget_passed()
        _pending[key] = event
    else:
        _pending[key] = _threads().submit(_copy, [host, x])


def _forget_passed() -> None:
    """Drop the events that have passed, of host tensors that nobody may ask about any more."""
    global _room
    if len(_pending) >= _room:
        waiting = list(_pending.items())  # at once: other threads read from SSD meanwhile
        for key in [key for key, each in waiting if isinstance(each, torch.cuda.Event) and each.query()]:
            _pending.pop(key, None)
        _room = max(_ROOM, 2 * len(_pending))


def _copy(pair: list[Tensor]) -> None:
    """Copy the second of `pair` into the first, and hold neither once that is known to be done."""
    with torch.no_grad():
        pair[0].copy_(pair[1], non_blocking=True)
    pair.clear()


def wait(host: Tensor) -> None:
    """Return once the copy into `host` is complete (CPU), or make the current stream wait for it (CUDA)."""
    pending = _pending.pop(host.untyped_storage()._cdata, None)
    if isinstance(pending, Future | Ticket):
        pending.result()
    elif pending is not None:
        pending.wait()
        if not pending.query():  # the host has not waited: `finish` has to yet
            _pending[host.untyped_storage()._cdata] = pending


def finish(host: Tensor) -> None:
    """Return once the copy into `host` is complete for the host as well: host code may read it."""
    pending = _pending.pop(host.untyped_storage()._cdata, None)
    if isinstance(pending, Future | Ticket):
        pending.result()
    elif pending is not None:
        pending.synchronize()


def to_host(x: Tensor) -> Tensor:
    """A host tensor of `x`'s layout into which a copy has been started."""
    host = host_like(x)
    _start(host, x)
    return host


def host_like(x: Tensor) -> Tensor:
    """Host memory of `x`'s layout, page-locked where `x` is on a GPU."""
    with tier(HOST):
        return page_locked(partial(_like, x), wanted=x.is_cuda)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A new tensor on `device` with the values of `x`."""
    wait(x)
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    _fill(out, x)
    return out


def to_device_beside(x: Tensor, beside: Tensor, device: torch.device) -> Tensor:
    """A new tensor on `device` with the values of `x`, of one dimension, and then those of `beside`, which is there already."""
    wait(x)
    out = torch.empty(x.numel() + beside.numel(), dtype=x.dtype, device=device)
    with torch.no_grad():
        out[x.numel() :].copy_(beside)
    if beside.is_cuda:
        beside.record_stream(torch.cuda.current_stream(device))  # the caller lets go of it now
    _fill(out[: x.numel()], x)
    return out


def _fill(out: Tensor, x: Tensor) -> None:
    """Copy the host tensor `x` into `out`, or start to do so where it comes `ahead_apart`."""
    COUNTERS.add("host_to_device", x.nbytes)
    key = out.untyped_storage()._cdata
    if _is_apart and out.device.type != "cuda":
        _coming[key] = _upload_threads().submit(_copy, [out, x])
        return
    with torch.no_grad():
        out.copy_(x, non_blocking=True)
    if _is_apart:
        event = torch.cuda.Event()
        event.record()
        _coming[key] = event


@contextlib.contextmanager
def ahead(device: torch.device) -> Iterator[None]:
    """Copies to `device` inside, and memory taken for them, are on a stream of their own, after all work issued so far.

    So memory that compute has just given back is not overwritten under it; see `caught_up`.
    """
    if device.type != "cuda":
        yield
        return
    stream = _upload_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def caught_up(device: torch.device) -> None:
    """The current stream goes on when all that was copied `ahead` is there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_upload_stream(device))


def issued(device: torch.device) -> torch.cuda.Event | None:
    """Passes when all that the current stream was given so far is done; None on CPU, where it is."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def ahead_apart(device: torch.device) -> Iterator[None]:
    """As `ahead`, and each tensor that `to_device` gives is waited for by itself (`is_there`); on CPU a thread copies."""
    global _is_apart
    _is_apart = True
    try:
        with ahead(device):
            yield
    finally:
        _is_apart = False


def is_there(out: Tensor) -> None:
    """Return once `out`, which came `ahead_apart`, is there (CPU), or make the current stream wait for it (CUDA)."""
    coming = _coming.pop(out.untyped_storage()._cdata, None)
    if isinstance(coming, Future):
        coming.result()
    elif coming is not None:
        coming.wait()


def copy_to_host(host: Tensor, x: Tensor) -> None:
    """Start copying `x` into the existing host tensor `host`."""
    _start(host, x)


def copy_to_device(x: Tensor, host: Tensor) -> None:
    """Copy the host tensor `host` into `x`."""
    wait(host)
    COUNTERS.add("host_to_device", x.nbytes)
    with torch.no_grad():
        x.copy_(host, non_blocking=True)


def to_ssd(host: Tensor, name: str) -> Tensor:
    """A tensor on SSD to which a write of `host` has been started, once the copy into `host` is complete for the host as well.

    Raises:
        EnvironmentFault: There is no room, with `name` in the message; or the offload directory cannot be used.
    """
    finish(host)
    place = disk.current()
    ssd = place.tensor(name, host)
    COUNTERS.add("ssd_write", host.nbytes)
    place.store(ssd, host)
    return ssd


def from_ssd(ssd: Tensor) -> Tensor:
    """A host tensor of `ssd`'s layout into which a read has been started."""
    with tier(HOST):
        host = page_locked(partial(_like, ssd), wanted=torch.cuda.is_available())  # it goes on to a device, where there is one
    COUNTERS.add("ssd_read", ssd.nbytes)
    _pending[host.untyped_storage()._cdata] = disk.current().load(host, ssd)
    return host


def write_ssd(ssd: Tensor, host: Tensor) -> None:
    """Start writing `host` to the tensor `ssd`, in whose order of memory."""
    finish(host)
    if host.stride() != ssd.stride() and not (host.is_contiguous() and ssd.is_contiguous()):
        with tier(HOST):
            host = torch.empty_strided(ssd.size(), ssd.stride(), dtype=ssd.dtype).copy_(host)
    COUNTERS.add("ssd_write", host.nbytes)
    disk.current().store(ssd, host)


def written(ssd: Tensor) -> None:
    """Return once what was stored in `ssd` is there, or raise what went wrong; nothing for a fake tensor."""
    if not isinstance(ssd, FakeTensor):
        disk.current().written(ssd)


def abandon(host: Tensor) -> None:
    """Wait for what is under way into `host`, whose bytes nobody wants."""
    with contextlib.suppress(EnvironmentFault):
        finish(host)
