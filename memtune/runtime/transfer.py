"""Copies between tiers: a side stream with events on accelerators, a thread on CPU, and a counter of the
bytes on every link.

`to_host` and `copy_to_host` only *start* a copy; the caller must call `wait` before it reads the host tensor
or frees the source. `to_device` and `copy_to_device` wait for their source and are complete, in stream order,
when they return. Inside `prefetching_separately`, `to_device` only starts, and `wait_tensor` completes it.

Another tier that fills host memory (`ssd.ssd_tensors`) registers its reads by `started`; they are awaited in
the same way.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtune import _native
from memtune.device import Capability, accelerator, platform_of, streams
from memtune.errors import EnvironmentFault
from memtune.runtime.memory_tiers import HOST, cloned, tier


class Pending(Protocol):
    """Copy into host memory that is in flight on another thread or engine."""

    def result(self) -> object:
        """Return when it is complete, or raise its error."""


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
        """Return the counts so far, by link, and reset them to zero."""
        with self._lock:
            counted, self._bytes = dict(self._bytes), Counter()
        return counted


COUNTERS = ByteCounters()
# Copies in flight, by address of the host storage: the stream's event, the thread's future on CPU, another
# tier's read.
_pending: dict[int, Pending | torch.Event] = {}
_prefetched: dict[int, Future[None] | torch.Event] = {}
"""Copies started inside `prefetching_separately`, by address of the storage on the device."""
_is_separate = False
_INLINE_BYTES = 64 << 10
"""On CPU a copy of at most this many bytes takes less time than waking the thread that copies."""
_pending_limit = _PENDING_LIMIT = 256
"""Number of entries in `_pending` at which passed events are searched for and dropped."""


_NO_CONTEXT: Final = contextlib.nullcontext()


def without_grad() -> contextlib.AbstractContextManager[Any]:
    """Return `torch.no_grad()`, or a null context, which costs nothing, if gradients are off already."""
    # They are off inside backward, where hooks run for every parameter.
    return torch.no_grad() if torch.is_grad_enabled() else _NO_CONTEXT


# One thread or stream per direction, as a GPU has one copy engine per direction: copies of one kind run in
# order.
@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="memtune-copy")


@functools.cache
def _upload_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="memtune-upload")


def _stream(direction: str, device: torch.device) -> torch.Stream:
    # By index: the same stream for a device that is named without one.
    key = direction, device.index or 0
    if key not in _streams:
        _streams[key] = torch.Stream(device)
    return _streams[key]


_streams: dict[tuple[str, int], torch.Stream] = {}


def _like(x: Tensor, locked: bool) -> Tensor:
    if locked:  # pinned memory already has its pages
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=True)
    return in_huge_pages(torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu"))


def _start(host: Tensor, x: Tensor) -> None:
    """Start copying `x` into `host`; the caller keeps `x` alive until `wait(host)`."""
    COUNTERS.add("device_to_host", x.nbytes)
    if accelerator.has_streams(x.device):
        _start_on_side_stream([host], [x])
    # By storage: views of a host tensor are waited for together. A copy in flight must not end after this.
    elif x.nbytes <= _INLINE_BYTES and not (_pending and host.untyped_storage()._cdata in _pending):
        _copy([host, x])
    else:
        _pending[host.untyped_storage()._cdata] = _threads().submit(_copy, [host, x])


def _start_on_side_stream(hosts: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    device = xs[0].device
    stream = _stream("to_host", device)
    streams.wait_current(stream, device)  # `xs` may still be computed there
    with streams.on(stream), without_grad():
        torch._foreach_copy_(list(hosts), list(xs), non_blocking=True)
    _forget_passed()
    event = streams.recorded(device, stream)
    for host in hosts:
        _pending[host.untyped_storage()._cdata] = event


def _forget_passed() -> None:
    """Drop events that have passed, of host tensors that no caller waits for."""
    global _pending_limit
    if len(_pending) >= _pending_limit:
        waiting = list(_pending.items())  # a snapshot, because other threads add SSD reads meanwhile
        for key in [key for key, each in waiting if isinstance(each, torch.Event) and each.query()]:
            _pending.pop(key, None)
        # Doubled, so that the search costs a constant time per copy even if many events are still to pass.
        _pending_limit = max(_PENDING_LIMIT, 2 * len(_pending))


def _copy(pair: list[Tensor]) -> None:
    """Copy the second of `pair` into the first, and drop the references once the copy is complete."""
    with without_grad():
        pair[0].copy_(pair[1], non_blocking=True)
    pair.clear()


def wait(host: Tensor) -> None:
    """Return once the copy into `host` is complete (CPU), or make the current stream wait for it."""
    if not _pending:
        return
    pending = _pending.pop(host.untyped_storage()._cdata, None)
    if pending is not None and not isinstance(pending, torch.Event):
        # On CPU the future is complete for the host and for every stream there is.
        pending.result()
    elif pending is not None:
        streams.wait(pending)
        if not pending.query():  # only the stream waits: `finish` must still find the event
            _pending[host.untyped_storage()._cdata] = pending


def finish(host: Tensor) -> None:
    """Return once the copy into `host` is complete for the host as well, so that host code may read it."""
    if not _pending:
        return
    pending = _pending.pop(host.untyped_storage()._cdata, None)
    if pending is not None and not isinstance(pending, torch.Event):
        pending.result()
    elif pending is not None:
        pending.synchronize()


def started(host: Tensor, pending: Pending) -> None:
    """Register `pending`, a read that another tier has started into `host`, for `wait` and `finish`."""
    _pending[host.untyped_storage()._cdata] = pending


def finish_all(hosts: Iterable[Tensor]) -> None:
    """Do the same as `finish` for each of `hosts`."""
    for host in hosts if _pending else ():
        finish(host)


def to_host(x: Tensor) -> Tensor:
    """Return a new host tensor of `x`'s layout and start the copy of `x` into it."""
    if x.is_cpu and x.nbytes <= _INLINE_BYTES and x.is_contiguous() and not x.requires_grad:
        COUNTERS.add("device_to_host", x.nbytes)
        return cloned(x, HOST)  # small activations in forward, gradients in backward
    host = host_like(x)
    _start(host, x)
    return host


def to_host_together(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return new host tensors of the layouts of `xs`, of one device, and start their copies."""
    sizes = [x.nbytes for x in xs]
    largest = max(sizes)
    COUNTERS.add("device_to_host", sum(sizes))
    if accelerator.has_streams(xs[0].device):
        hosts = [host_like(x) for x in xs]
        _start_on_side_stream(hosts, xs)
        return hosts
    # Of every gradient in backward, and of small activations in forward, which are detached.
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if largest <= _INLINE_BYTES and xs[0].is_cpu and not is_recorded:
        with tier(HOST):
            return [x.clone() if x.is_contiguous() else _with_strides(x) for x in xs]
    with tier(HOST):
        hosts = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu") for x in xs]
    if largest >= PAGE_BYTES:
        for host in hosts:
            in_huge_pages(host)
    if largest <= _INLINE_BYTES:
        _copy_together(hosts, xs)
        return hosts
    for host, x, n_bytes in zip(hosts, xs, sizes, strict=True):
        if n_bytes > _INLINE_BYTES:
            _pending[host.untyped_storage()._cdata] = _threads().submit(_copy, [host, x])
        else:
            _copy_together([host], [x])
    return hosts


def _with_strides(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(x)


def _copy_together(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled():
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(of), non_blocking=True)
    else:  # in backward, for every gradient
        torch._foreach_copy_(list(to), list(of), non_blocking=True)


def host_like(x: Tensor, *, locked: bool | None = None) -> Tensor:
    """Return host memory of `x`'s layout, page-locked by default if `x`'s device copies pinned memory."""
    with tier(HOST):
        return page_locked(functools.partial(_like, x), wanted=pins(x.device) if locked is None else locked)


def pins(device: torch.device) -> bool:
    """Return whether copies between the host and `device` use pinned memory."""
    return Capability.PINNED in platform_of(device).capabilities


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor on `device` with the values of `x`."""
    # The host copy may still be filled by a D2H copy or an SSD read.
    wait(x)
    # Contiguous: a clone would close the gaps of another.
    if (
        device.type == "cpu"
        and x.nbytes <= _INLINE_BYTES
        and x.is_contiguous()
        and not torch.is_grad_enabled()
    ):
        COUNTERS.add("host_to_device", x.nbytes)
        return x.clone()  # in backward, for every tensor
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    _fill(out, x)
    return out


def to_device_with_tail(x: Tensor, tail: Tensor, device: torch.device) -> Tensor:
    """Return a new 1-D tensor on `device`: the host tensor `x`, then the device tensor `tail`."""
    wait(x)
    out = torch.empty(x.numel() + tail.numel(), dtype=x.dtype, device=device)
    with torch.no_grad():
        out[x.numel() :].copy_(tail)
    streams.used_on(tail)  # the caller may free it right after this call
    _fill(out[: x.numel()], x)
    return out


def _fill(out: Tensor, x: Tensor) -> None:
    """Copy the host tensor `x` into `out`; inside `prefetching_separately` only start the copy."""
    COUNTERS.add("host_to_device", x.nbytes)
    on_stream = accelerator.has_streams(out.device)
    if _is_separate and not on_stream and x.nbytes > _INLINE_BYTES:
        _prefetched[out.untyped_storage()._cdata] = _upload_threads().submit(_copy, [out, x])
        return
    with without_grad():
        out.copy_(x, non_blocking=True)
    if _is_separate and on_stream:
        _prefetched[out.untyped_storage()._cdata] = streams.recorded(out.device)


@contextlib.contextmanager
def prefetching(device: torch.device) -> Iterator[None]:
    """Run copies to `device` on a separate stream after all work issued so far."""
    # The wait protects memory that compute has just freed from being overwritten while in use; see
    # `wait_prefetched`.
    if not accelerator.has_streams(device):
        yield
        return
    stream = _stream("to_device", device)
    streams.wait_current(stream, device)
    with streams.on(stream):
        yield


def wait_prefetched(device: torch.device) -> None:
    """Make the current stream wait for all copies started inside `prefetching`."""
    if accelerator.has_streams(device):
        streams.current(device).wait_stream(_stream("to_device", device))


def issued(device: torch.device) -> torch.Event | None:
    """Return an event that passes when the work issued to the current stream is done; None on CPU."""
    return streams.recorded(device) if accelerator.has_streams(device) else None


class prefetching_separately:
    """Like `prefetching`, with a separate `wait_tensor` for each tensor; on CPU a thread copies."""

    __slots__ = ("_on_stream",)

    # Entered for every prefetched activation, so there is no generator.
    def __init__(self, device: torch.device) -> None:
        self._on_stream = prefetching(device) if accelerator.has_streams(device) else None

    def __enter__(self) -> None:
        global _is_separate
        if self._on_stream is not None:
            self._on_stream.__enter__()
        _is_separate = True

    def __exit__(self, *error: Any) -> None:
        global _is_separate
        _is_separate = False
        if self._on_stream is not None:
            self._on_stream.__exit__(*error)


def wait_tensor(out: Tensor) -> None:
    """Wait for `out` of `prefetching_separately`: the host on CPU, the current stream elsewhere."""
    if not _prefetched:
        return
    pending = _prefetched.pop(out.untyped_storage()._cdata, None)
    if isinstance(pending, Future):
        pending.result()
    elif pending is not None:
        streams.wait(pending)


def copy_to_host(host: Tensor, x: Tensor) -> None:
    """Start copying `x` into the existing host tensor `host`."""
    _start(host, x)


def copy_to_device(x: Tensor, host: Tensor) -> None:
    """Copy the host tensor `host` into `x`."""
    wait(host)
    COUNTERS.add("host_to_device", x.nbytes)
    with without_grad():
        x.copy_(host, non_blocking=True)


def copy_to_device_together(xs: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy the host tensors `hosts` into `xs`."""
    for host in hosts if _pending else ():
        wait(host)
    COUNTERS.add("host_to_device", sum([x.nbytes for x in xs]))
    _copy_together(xs, hosts)


def abandon(host: Tensor) -> None:
    """Wait for the copy in flight into `host`, whose bytes are no longer needed."""
    with contextlib.suppress(EnvironmentFault):
        finish(host)


# Huge pages of 2 MiB, for tensors that are streamed each step (gradients, masters, moments): fewer page-table
# walks.
PAGE_BYTES = 2 << 20


def in_huge_pages(memory: Tensor) -> Tensor:
    """Ask the system for huge pages for `memory`, which has not been written yet; return `memory`."""
    # A hint: a system without huge pages ignores it. Only whole huge pages inside the tensor are
    # requested, so resident memory does not grow.
    if memory.nbytes >= PAGE_BYTES and not (isinstance(memory, FakeTensor) or memory.is_meta):
        # The kernel chooses the page size when a page is first touched.
        _native.wish_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory


_reported = False


def page_locked(make: Callable[[bool], Tensor], wanted: bool) -> Tensor:
    """Return `make(locked)`, pinned if `wanted` and the system allows it; else warn once per process."""
    if wanted:
        try:
            return make(True)
        except RuntimeError as error:  # torch.AcceleratorError among them
            _report(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return make(False)


def _report(reason: str) -> None:
    global _reported
    if not _reported:
        _reported = True
        warnings.warn(
            f"The system pins no more host memory for copies to the GPU ({reason}): they use pageable memory,"
            " which is slower. Give the container more memory or a higher limit, or offload less.",
            stacklevel=4,
        )
