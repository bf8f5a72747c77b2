"""Collectives of simulated devices: gloo's, on a stream of their own as NCCL's are.

The host runs a collective when it is issued; only its place in the order is that of the stream. A missing
`wait` is a race between the collective and the op that uses its tensors.

NCCL refuses more than gloo, and so does this backend:

1. A group that was made for devices alone sends no tensor of the host; objects and barriers then go through
  the current device.
2. All ranks of a group must take part in its first use on a device, and each rank needs a device of its own.
3. Tensors are contiguous and of a type that NCCL knows, and those of a call are on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "simulated"
_Group: Any = dist.ProcessGroup  # its stub has overloads that are never called on a subclass
_c10d: Any = dist.distributed_c10d  # private
_TYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
)
"""Types of tensors that NCCL sends (torch, ProcessGroupNCCL)."""
_ALL_MEET = timedelta(seconds=30)
"""Time in which all ranks must send a message, if the group has had no other use."""
_sends_host = True


@contextmanager
def devices_alone() -> Iterator[None]:
    """Refuse collectives of host tensors in this context, as a group of NCCL alone does."""
    global _sends_host
    before, _sends_host = _sends_host, False
    try:
        yield
    finally:
        _sends_host = before


class _Work(dist.Work):
    """A collective that has been issued; `wait` orders the current stream after it."""

    def __init__(self, event: torch.Event | None, results: list[Tensor]) -> None:
        super().__init__()
        self._event = event
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the host goes on."""
        if self._event is not None:
            self._event.wait(torch.accelerator.current_stream(self._event.device))
        return True

    def is_completed(self) -> bool:
        """Return whether the collective is over for the host."""
        return self._event is None or self._event.query()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return the results, ordered by `wait`."""
        self.wait()
        return self._future


class _Message(_Work):
    """A message that is on its way while the host goes on; `wait` returns when gloo has moved it."""

    def __init__(self, event: torch.Event | None, tensors: list[Tensor], message: dist.Work) -> None:
        super().__init__(event, tensors)
        self._message, self._tensors = message, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the message, and make the current stream wait for it."""
        self._message.wait()
        return super().wait()


class SimulatedGroup(_Group):  # type: ignore[misc]
    """Group of ranks on simulated devices; one that was made for the host too sends its tensors by gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[int, torch.Stream] = {}
        self._name = ""

    def getBackendName(self) -> str:
        """Return the name under which `init_process_group` knows it."""
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the types of devices whose tensors it sends; torch asks where to put objects."""
        config = _c10d._world.pg_backend_config.get(self, "")
        host = [torch.device("cpu")] if _sends_host and "cpu:" in config else []
        return [*host, torch.device("sim")]

    # Torch keeps a name with a group's backends, of which this group has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Return the name under which torch finds the group."""
        return self._name

    @property
    def pg_name(self) -> str:
        """Return `group_name`."""
        return self._name

    def _issue(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[..., Any],
        results: list[Tensor] | None = None,
    ) -> dist.Work:
        """Run `run`, a call of gloo that takes a function from tensors to the ones it uses."""
        event, work = self._begin(name, reads, writes, run)
        work.wait()
        return _Work(event, [*writes] if results is None else results)

    def _begin(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], run: Callable[..., Any]
    ) -> tuple[torch.Event | None, dist.Work]:
        """Return the event after which the tensors of `run` are complete, once gloo's work is."""
        device = self._device_of(name, (*reads, *writes))
        if device.type == "cpu":
            return None, run(lambda tensor: tensor)
        stream = self._stream_on(device, _ALL_MEET if name in ("send", "recv") else None)
        stream.wait_stream(torch.accelerator.current_stream(device))
        before = torch.accelerator.current_stream(device)
        # The current device stays as it was.
        with torch.accelerator.device_index(device.index):
            torch.accelerator.set_stream(stream)
            try:
                torch.ops.memtune_sim.use(list(reads), list(writes), f"{NAME}::{name}")
            finally:
                torch.accelerator.set_stream(before)
        return stream.record_event(), run(torch.ops.memtune_sim.kernel_view)

    def _device_of(self, name: str, tensors: Sequence[Tensor]) -> torch.device:
        """Return the device of the tensors of a call.

        Raises:
            RuntimeError: NCCL would refuse them.
        """
        device, *others = dict.fromkeys(each.device for each in tensors)
        if others:
            raise RuntimeError(f"{NAME}::{name}: tensors on {device} and {others[0]}")
        if device.type not in (each.type for each in self._device_types):
            raise RuntimeError(f"{NAME}::{name}: No backend type associated with device type {device.type}")
        for each in tensors if device.type == "sim" else ():
            if not each.is_contiguous() and not each.is_contiguous(memory_format=torch.channels_last):
                raise RuntimeError(f"{NAME}::{name}: Tensors must be contiguous")
            if each.dtype not in _TYPES:
                raise RuntimeError(f"{NAME}::{name}: NCCL sends no tensors of type {each.dtype}")
        return device

    def _stream_on(self, device: torch.device, most: timedelta | None = None) -> torch.Stream:
        """Return the stream of the collectives on `device`; at its first use all ranks meet, as to make a
        communicator of NCCL.

        Raises:
            RuntimeError: Two ranks use the same device, or some take no part within `most`.
        """
        if device.index not in self._streams:
            mine, opts = torch.tensor([device.index]), _c10d.AllgatherOptions()
            everyone = [torch.empty_like(mine) for _ in range(self.size())]
            if most is not None:
                opts.timeout = most
            try:
                self._gloo.allgather([everyone], [mine], opts).wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{NAME}: all ranks of a group must take part in its first use ({error})"
                ) from error
            if len({int(each) for each in everyone}) < self.size():
                raise RuntimeError(f"{NAME}: Duplicate GPU detected: several ranks use {device}")
            self._streams[device.index] = torch.Stream(device)
        return self._streams[device.index]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Sum, or another reduction, in place."""
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._issue(
            "allreduce", tensors, tensors, lambda view: self._gloo.allreduce([*map(view, tensors)], opts)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Send the tensors of `opts.rootRank` to all ranks."""
        opts = dist.BroadcastOptions() if opts is None else opts
        reads, writes = (tensors, []) if opts.rootRank == self.rank() else ([], tensors)
        return self._issue(
            "broadcast", reads, writes, lambda view: self._gloo.broadcast([*map(view, tensors)], opts)
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather the inputs of all ranks into each rank's list of outputs."""
        return self._issue(
            "allgather",
            inputs,
            [each for row in outputs for each in row],
            lambda view: self._gloo.allgather([[*map(view, row)] for row in outputs], [*map(view, inputs)]),
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Gather the inputs of all ranks into one tensor; an input in its place there is not written."""
        rows = [*output.view(self.size(), -1).unbind()] if source.numel() else []
        if rows and rows[self.rank()].data_ptr() == source.data_ptr():
            del rows[self.rank()]
        return self._issue(
            "allgather",
            [source],
            rows,
            lambda view: self._gloo.allgather(
                [[*view(output).view(self.size(), -1).unbind()]], [view(source).view(-1)]
            ),
            [output],
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """Reduce the inputs of all ranks, of which each rank gets its part."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._issue(
            "reduce_scatter",
            [source],
            [output],
            lambda view: self._gloo._reduce_scatter_base(view(output), view(source), opts),
        )

    # The stream of the collectives keeps their order, so the last one's work covers them all.
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return [self.all_gather_single(output, source) for output, source in pairs][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce and scatter several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(output, source, opts) for output, source in pairs][-1]

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Gather the inputs of all ranks into the outputs of `opts.rootRank`; other ranks have none."""
        return self._issue(
            "gather",
            inputs,
            [each for row in outputs for each in row],
            lambda view: self._gloo.gather(
                [[*map(view, row)] for row in outputs], [*map(view, inputs)], opts
            ),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """Send each rank one of the inputs of `opts.rootRank`; other ranks have none."""
        return self._issue(
            "scatter",
            [each for row in inputs for each in row],
            outputs,
            lambda view: self._gloo.scatter(
                [*map(view, outputs)], [[*map(view, row)] for row in inputs], opts
            ),
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: list[int],
        source_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send each rank its rows of `source`, and receive those of `output`."""
        return self._issue(
            "alltoall",
            [source],
            [output],
            lambda view: self._gloo.alltoall_base(view(output), view(source), output_sizes, source_sizes),
        )

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        """Send a tensor to one rank."""
        begun = self._begin(
            "send", tensors, [], lambda view: self._gloo.send([*map(view, tensors)], target, tag)
        )
        return _Message(begun[0], tensors, begun[1])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive a tensor from one rank."""
        begun = self._begin(
            "recv", [], tensors, lambda view: self._gloo.recv([*map(view, tensors)], source, tag)
        )
        return _Message(begun[0], tensors, begun[1])

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks, and for this rank's current device."""
        if opts is None or opts.device is None or opts.device.type != "cpu":
            here = torch.accelerator.current_device_index()
            self._stream_on(torch.device("sim", here))
            torch.accelerator.synchronize(here)
        self._gloo.barrier().wait()
        return _Work(None, [])


def register() -> None:
    """Make it the backend of `sim`, and of the host in groups that have both."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(store, rank, size, timeout)

    dist.Backend.register_backend(NAME, make, devices=["sim"])
