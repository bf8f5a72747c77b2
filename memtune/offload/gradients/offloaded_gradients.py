"""Gradients that are offloaded when they are ready: from the device to their sums, and to the user's eyes.

    ready --> bucket --full--> D2H copy --room needed, or awaited--> sum of micro-batches --> update
                                                                      ^ shown as `grad` until the step

- The device holds the bucket that is being filled, and those in D2H copies, which are bounded in bytes: the
  peak does not depend on the link's speed. A bucket of one gradient is each gradient alone; without room one
  bucket is in copies at once.
- The sum is `grad` of the optimizer's parameter, in host memory or on SSD (`offload.parameters.ssd_values`).
- From the end of backward to the next forward or step the parameter's `grad` is the sum, which the user may
  change. Where that cannot be, versions of all gradients are noted, so that changes are found.
- A backward that raises drops the gradients that have not reached their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.offload.core import PendingUpdates, own_grad, set_own_grad
from memtune.offload.gradients.version_checks import WatchedGradients
from memtune.runtime import (
    HOST,
    Context,
    hide_grad_of,
    host_like,
    local,
    mark,
    show_grad_of,
    tier,
    to_host_together,
    transfer,
    without_grad,
)


class Sums(Protocol):
    """The place in which the gradients of a step's micro-batches are added up."""

    def begin(self, parameter: nn.Parameter) -> None:
        """Prepare the sum of `parameter`, whose gradient is in a D2H copy."""

    def add(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Add a gradient on the host."""

    def write_changed(self, parameter: nn.Parameter) -> None:
        """Keep what the user has made of the sum."""

    def flush(self) -> None:
        """Wait until all sums are complete."""


_Copies = tuple[list[tuple[nn.Parameter, Tensor]], list[Tensor]]
"""D2H copies of a bucket: (parameter, gradient on the device) of each, and the host copies in that order."""


class HostSums:
    """Sums in host memory.

    Args:
        held: The optimizer's parameter of each parameter.
    """

    def __init__(self, held: Mapping[nn.Parameter, nn.Parameter]) -> None:
        # By identity: torch's hash of a tensor is a Python function, and every gradient is looked up.
        self._held = {id(parameter): each for parameter, each in held.items()}

    def begin(self, parameter: nn.Parameter) -> None:
        """Nothing to prepare."""

    def add(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Add a gradient on the host; the first is the sum itself."""
        held = self._held[id(parameter)]
        earlier = own_grad(held)
        if earlier is None:
            set_own_grad(held, host)
        else:
            with tier(HOST):
                earlier.add_(host)

    def write_changed(self, parameter: nn.Parameter) -> None:
        """Nothing to write: the user has changed the sum itself."""

    def flush(self) -> None:
        """Nothing to wait for."""


class OffloadedGradients:
    """Offloads gradients that are ready, bucket by bucket.

    Args:
        context: Of the model.
        held: The optimizer's parameter of each parameter whose gradient is offloaded.
        resident: Parameters whose gradients are on the device until the step.
        fix: A config that allows clipping, for errors.
        bucket_bytes: Gradients of at least these bytes are copied together; 0: each alone.
        room_bytes: Bound of gradients in D2H copies at once; 0: one bucket.
        sums: Of a step's micro-batches; None: in host memory.
        shows: The user sees the sums as `grad` until the step.
        before_copies: Called with the parameters of a bucket before its copies start.
        arrived: Called with the parameters of a bucket that is in its sums.

    Attributes:
        buckets: Number of buckets sent since the start of training.
        sent_bytes: Their bytes.
    """

    def __init__(
        self,
        context: Context,
        held: Mapping[nn.Parameter, nn.Parameter],
        resident: Collection[nn.Parameter],
        fix: str,
        *,
        bucket_bytes: int = 0,
        room_bytes: int = 0,
        sums: Sums | None = None,
        shows: bool = True,
        before_copies: Callable[[list[nn.Parameter]], None] | None = None,
        arrived: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        self.held, self.shows = held, shows
        self._sums: Sums = HostSums(held) if sums is None else sums
        self._bucket_bytes, self._before_copies, self._arrived = bucket_bytes, before_copies, arrived
        self._bucket: list[tuple[nn.Parameter, Tensor]] = []  # (parameter, its gradient on the device)
        self._bytes_in_bucket = 0
        self._in_flight: PendingUpdates[_Copies] = PendingUpdates(room_bytes)
        self._rows: tuple[Tensor, Tensor] | None = None  # in a copy, and the host gradient they are part of
        self._shown: dict[int, nn.Parameter] = {}
        self._version_check = WatchedGradients(context, resident, held.values(), fix)
        self.buckets = self.sent_bytes = self._before_moment = 0

    # -- ready -----------------------------------------------------------------------------------------------

    def add(self, parameter: nn.Parameter, source: Tensor) -> None:
        """Put the gradient `source` of `parameter` into the bucket, of which no one else has a reference."""
        source = local(source)
        self._bucket.append((parameter, source))
        self._bytes_in_bucket += source.nbytes
        del source
        if self._bytes_in_bucket >= self._bucket_bytes:
            self.send()

    def send(self) -> None:
        """Start the D2H copies of the bucket, after enough earlier ones have finished."""
        if not self._bucket:
            return
        n_bytes = self._bytes_in_bucket
        with without_grad():
            # Before any copy starts: the device has room for what the bound allows.
            self._finish(self._in_flight.make_room(n_bytes))
            bucket, self._bucket, self._bytes_in_bucket = self._bucket, [], 0
            if self._before_copies is not None:
                self._before_copies([parameter for parameter, _ in bucket])
            hosts = to_host_together([source for _, source in bucket])
            self._in_flight.add((bucket, hosts), n_bytes)
            for parameter, _ in bucket:
                self._sums.begin(parameter)
        self.buckets += 1
        self.sent_bytes += n_bytes

    @torch.no_grad()
    def add_rows(self, parameter: nn.Parameter, rows: slice, gradient: Tensor) -> None:
        """Start the D2H copy of rows of a gradient, in order; with the last it is offloaded as others are."""
        # One copy at a time: the previous rows are freed before the next ones are made.
        host = None if self._rows is None else self._rows[1]
        if host is None:
            host = host_like(local(parameter))
            mark(host, HOST)
        transfer.finish(host)
        self._rows = None
        is_last = rows.stop == len(host)
        if is_last:
            self._finish(self._in_flight.make_room(gradient.nbytes))
        torch.ops.memtune.copy_to_host_(host[rows], gradient)
        if is_last:
            self._in_flight.add(([(parameter, gradient)], [host]), gradient.nbytes)
            self._sums.begin(parameter)
        else:
            self._rows = gradient, host

    # -- arrived ---------------------------------------------------------------------------------------------

    def finish_moment(self, *, overlaps: bool) -> None:
        """Wait for D2H copies when a moment ends; `overlaps`: those that started in it may still run."""
        self.finish_copies(self.buckets - self._before_moment if overlaps else 0)
        self._before_moment = self.buckets

    @torch.no_grad()
    def finish_copies(self, keep: int = 0) -> None:
        """Wait for the D2H copies of all buckets but the newest `keep`, and add them to their sums."""
        self._finish(self._in_flight.drain(keep))

    def _finish(self, copies: Iterator[_Copies]) -> None:
        for bucket, hosts in copies:
            for host in hosts:
                transfer.finish(host)
            parameters = [parameter for parameter, _ in bucket]
            # The last references: the device memory is free before the host adds, as the passes predict, and
            # not before: the copy engine reads it.
            bucket.clear()
            hosts.reverse()
            for parameter in parameters:
                # One by one, so that each host copy is freed as soon as it is in the sum.
                self._sums.add(parameter, hosts.pop())
            if self._arrived is not None:
                self._arrived(parameters)

    def abandon(self) -> None:
        """Drop gradients in buckets and D2H copies: their backward, or the step, has raised."""
        # Awaited, not forgotten: the copy engine still writes this pinned memory, which is reused next.
        for _, hosts in self._in_flight.drain():
            for host in hosts:
                transfer.abandon(host)
        self._bucket, self._bytes_in_bucket = [], 0
        self._version_check.forget()
        if self._rows is not None:
            transfer.abandon(self._rows[1])
        self._rows, self._before_moment = None, self.buckets
        self._sums.flush()

    # -- shown to the user -----------------------------------------------------------------------------------

    @property
    def are_used(self) -> bool:
        """True if an update inside this step's backward has used, and freed, a gradient."""
        return self._version_check.are_used

    def flush(self) -> None:
        """Wait until the sums are complete: backward has ended."""
        self._sums.flush()

    def show(self) -> None:
        """Show the sums to the user at the end of backward."""
        # A step that has used some inside backward cannot follow a change of the others, nor one
        # whose ranks average them later: their versions are noted, so that changes are found.
        for parameter, held in self.held.items() if self.shows else ():
            if own_grad(held) is not None:
                show_grad_of(parameter, held)
                self._shown[id(parameter)] = parameter
        if not self.shows or self._version_check.are_used:
            self._version_check.record_versions()

    def hide(self) -> None:
        """Show the gradients no longer: the sums are what the user has made of them."""
        while self._shown:
            _, parameter = self._shown.popitem()
            if hide_grad_of(parameter):
                self._sums.write_changed(parameter)

    def is_shown(self, parameter: nn.Parameter) -> bool:
        """Return True from the end of a backward to the next use of the gradient of `parameter`."""
        return id(parameter) in self._shown

    def add_to_shown(self, parameter: nn.Parameter) -> None:
        """Add a gradient to the sum that is shown: of a penalty on a weight between uses, on the host."""
        gradient = own_grad(parameter)
        set_own_grad(parameter, None)
        if hide_grad_of(parameter):
            self._sums.write_changed(parameter)
        if gradient is not None:
            self._sums.begin(parameter)
            self._sums.add(parameter, local(gradient))
            self._sums.flush()
        show_grad_of(parameter, self.held[parameter])

    def require_unchanged(self) -> None:
        """Check, before a forward or the step, that the gradients are those of the backwards so far."""
        self._version_check.require_unchanged()

    def forget(self) -> None:
        """Drop the noted versions: the step uses the gradients."""
        self._version_check.forget()
