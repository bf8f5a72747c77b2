"""Predict reserved bytes: replay a program's allocations in a model of PyTorch's CUDA caching allocator.

Reserved bytes decide out-of-memory; they depend on the order of allocations and frees and on the allocator's
settings. A stream of several steps shows both the first step, in which the optimizer state is allocated, and
the steady state. The replay is native code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from memtune import _native
from memtune.autotune.predict.allocator_settings import AllocatorSettings
from memtune.program import (
    FOREVER,
    I32,
    I64,
    U8,
    WRITES,
    Kind,
    Phase,
    Resource,
    Step,
    Tier,
    updates_inside_backward,
)
from memtune.units import format_bytes

__all__ = [
    "STREAMS",
    "Action",
    "AllocatorEvents",
    "AllocatorResult",
    "AllocatorSettings",
    "HeldMemory",
    "event_stream",
    "replay",
]

STREAMS: Mapping[Resource, int] = {Resource.INTRA_LINK: 1, Resource.INTER_LINK: 1}
"""Stream on which an op's outputs are allocated, by its resource; all others use stream 0, the compute
stream.

Copies between tiers allocate on the compute stream (`runtime/transfer.py`).
"""


class Action(IntEnum):
    """Kind of an event."""

    ALLOC = 0
    FREE = 1
    EMPTY_CACHE = 2


@dataclass(frozen=True, eq=False)
class HeldMemory:
    """Memory that the allocator holds before the first event: s segments and b blocks, by rising address."""

    segment_address: I64  # (s,)
    segment_bytes: I64  # (s,)
    segment_stream: I32  # (s,)
    segment_small: U8  # (s,) 1 if it belongs to the small pool
    block_address: I64  # (b,) of the storages that the first b events allocate; all else is free
    block_bytes: I64  # (b,)
    expandable: bool
    """Segments are contiguous mapped stretches of expandable ones."""

    def columns(self) -> dict[str, Any]:
        """Return the columns as the native replay reads them."""
        return {name: value for name, value in vars(self).items() if name != "expandable"}


@dataclass(frozen=True, eq=False)
class AllocatorEvents:
    """Allocations and frees in the order in which the host requests them; one row per event, k of them."""

    action: U8  # (k,) Action
    storage: I32  # (k,) which one; the same number may be used again after a free
    bytes: I64  # (k,) asked for, 0 for a free
    stream: I32  # (k,) of an allocation, from 0 on
    op: I64  # (k,) when, in ops; not falling
    # (k,) of a free: the op at which all other streams have finished with the storage; at or before `op`:
    # they have
    ready_op: I64
    step: I64  # (steps,) first event of each step
    held: HeldMemory | None = None

    @classmethod
    def from_columns(cls, columns: I64, first_of_step: I64) -> AllocatorEvents:
        """Return events from rows of action, storage, bytes, stream, op, ready_op; a column per event."""
        action, storage, n_bytes, stream, op, ready_op = (np.ascontiguousarray(row) for row in columns)
        kinds = (action.astype(np.uint8), storage.astype(np.int32), n_bytes, stream.astype(np.int32))
        return cls(*kinds, op, ready_op, first_of_step)

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.action)


@dataclass(frozen=True, eq=False)
class AllocatorResult:
    """Result of a replay."""

    settings: AllocatorSettings
    events: AllocatorEvents
    native: _native.AllocatorReplay

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the most bytes that the allocator held from the driver."""
        return self.native.peak_reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the most bytes of blocks in use, as `torch.cuda.max_memory_allocated` counts them."""
        return self.native.peak_allocated_bytes

    @property
    def fragmentation(self) -> float:
        """Return the share of reserved bytes that was unused at the reserved peak, from 0 to 1."""
        reserved = self.native.peak_reserved_bytes
        return 1 - self.native.allocated_at_peak_bytes / reserved if reserved else 0.0

    @property
    def step_reserved_bytes(self) -> list[int]:
        """Return the peak of reserved bytes in each step; the optimizer state is allocated in the first."""
        return [int(each) for each in self.native.step_reserved_bytes]

    @property
    def step_allocated_bytes(self) -> list[int]:
        """Return the peak of allocated bytes in each step."""
        return [int(each) for each in self.native.step_allocated_bytes]

    @cached_property
    def oom_step(self) -> int | None:
        """Return the step of the first allocation that failed, None if none did."""
        event = self.native.first_oom.event
        return None if event < 0 else int(np.searchsorted(self.events.step, event, side="right")) - 1

    @property
    def oom_op(self) -> int | None:
        """Return the op of that allocation."""
        event = self.native.first_oom.event
        return None if event < 0 else int(self.events.op[event])

    @property
    def oom(self) -> str:
        """Return a description of that failed allocation, empty if there is none."""
        at = self.native.first_oom
        if at.event < 0:
            return ""
        return (
            f"{format_bytes(at.requested_bytes)} asked for, {format_bytes(at.allocated_bytes)} allocated,"
            f" {format_bytes(at.reserved_bytes)} reserved, largest free block"
            f" {format_bytes(at.largest_free_bytes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it but the timeline as plain data."""
        return {
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "fragmentation": self.fragmentation,
            "device_allocs": self.native.device_allocs,
            "device_frees": self.native.device_frees,
            "retries": self.native.retries,
            "ooms": self.native.ooms,
            "oom": (
                {"step": self.oom_step, "op": self.oom_op, "reason": self.oom} if self.native.ooms else None
            ),
            "step_reserved_bytes": self.step_reserved_bytes,
            "step_allocated_bytes": self.step_allocated_bytes,
        }


def replay(
    events: AllocatorEvents,
    settings: AllocatorSettings,
    capacity_bytes: int | None,
    *,
    timeline: bool = False,
) -> AllocatorResult:
    """Replay `events` in an allocator that starts with `events.held`, or empty.

    Memory is held only by torch's own allocator, and only in segments of the same form, expandable or not;
    under other settings the storages of that memory are allocated again.

    Args:
        events: Allocations and frees of the program.
        settings: The allocator's.
        capacity_bytes: Memory of the device; None for no limit, so that cached memory is never released.
        timeline: Keep reserved and allocated bytes after each event, and addresses, in `native`.

    Raises:
        ValueError: A column is malformed, or a storage is allocated twice or freed without being allocated.
    """
    # An allocation that fails is counted, and the program continues as if it had caught the error.
    columns = {
        name: getattr(events, name)
        for name in ("action", "storage", "bytes", "stream", "op", "ready_op", "step")
    }
    limit, native_settings = settings.limit_bytes(capacity_bytes), settings.native()
    held = events.held
    is_kept = (
        held is not None
        and held.expandable == settings.expandable_segments
        # cudaMallocAsync and memtune's arenas have no segments that a snapshot could describe.
        and not native_settings.get("asynchronous")
        and native_settings.get("arena") is None
    )
    native = _native.replay_allocator(
        **columns,
        **native_settings,
        capacity_bytes=capacity_bytes,
        allowed_bytes=limit,
        timeline=timeline,
        held=held.columns() if held is not None and is_kept else {},
    )
    return AllocatorResult(settings, events, native)


def event_stream(step: Step, steps: int) -> AllocatorEvents:
    """Return the device's allocations and frees of `steps` repetitions of the steady-state `step`."""
    # Storages that exist before the step (parameters, buffers, the first batch) are allocated before
    # the first one, in order. Optimizer state is allocated in the first step, before the first
    # optimizer op that uses any of it. Storages that outlive their step are freed when the next step
    # allocates them again. Storages of zero bytes are skipped.
    lives = _Lifetimes.from_step(step)
    parts = [lives.events(number) for number in range(steps)]
    first = np.cumsum([0, *(part.shape[1] for part in parts)])[:steps]
    return AllocatorEvents.from_columns(np.concatenate([np.empty((6, 0), np.int64), *parts], axis=1), first)


@dataclass(frozen=True, eq=False)
class _Lifetimes:
    """Op indices at which device storages are allocated and freed within a step; r of them."""

    n_ops: int
    n_storages: int
    storage: I64  # (r,)
    bytes: I64  # (r,)
    stream: I64  # (r,)
    start: I64  # (r,) op that allocates, -1 before the step
    appears: I64  # (r,) as `start`, in the first step
    end: I64  # (r,) op that frees, FOREVER where it outlives the step
    ready: I64  # (r,) op at which other streams have finished, -1 where none used it

    @classmethod
    def from_step(cls, step: Step) -> _Lifetimes:
        stream_of_op = np.array([STREAMS.get(each, 0) for each in Resource], np.int64)[step.ops.resource]
        made = step.storages.producer >= 0
        stream = np.zeros(step.storages.n, np.int64)
        stream[made] = stream_of_op[step.storages.producer[made]]
        side = _fsdp_streams(step)
        stream[side > 0] = side[side > 0]
        # The free of memtune's runtime waits for the other stream; `record_stream` would lag behind it.
        on_other_stream = stream_of_op[step.uses.op] != stream[step.uses.storage]
        ready = np.full(step.storages.n, -1, np.int64)
        np.maximum.at(ready, step.uses.storage[on_other_stream], step.uses.op[on_other_stream])
        end = np.where(step.freed_after < step.ops.n, step.freed_after, FOREVER).astype(np.int64)
        start = step.storages.producer.astype(np.int64)
        rows = np.flatnonzero((step.storages.tier == Tier.DEVICE) & (step.storages.bytes > 0))
        columns = (step.storages.bytes, stream, start, _first_start(step, start), end, ready)
        return cls(max(step.ops.n, 1), step.storages.n, rows, *(column[rows] for column in columns))

    def events(self, number: int) -> I64:
        """Return (6, k) events of step `number`, counted from 0, in order."""
        base, first = number * self.n_ops, number == 0
        outlives_step, before = self.end == FOREVER, self.start < 0
        once = outlives_step & before  # there before the first step or from the first one on
        # Storages of each step are other ones; those that outlive all steps keep their number.
        name = np.where(once, 0, number * self.n_storages) + self.storage
        begins = np.maximum(self.appears if first else self.start, 0)
        # Order at one op: allocations that precede it, its own outputs, then frees, because an output may
        # take over the row of a storage that the step before left allocated.
        parts = [
            self._rows(~once | first, Action.ALLOC, name, self.bytes, base + begins, -1, ~before),
            self._rows(
                outlives_step & ~before & (not first),
                Action.FREE,
                name - self.n_storages,
                0,
                base + begins,
                -1,
                2,
            ),
            self._rows(
                ~outlives_step, Action.FREE, name, 0, base + np.maximum(self.end, 0), base + self.ready, 3
            ),
        ]
        rows = np.concatenate(parts, axis=1)
        op, order = rows[4], rows[-1]
        return rows[:-1, np.lexsort((order, op))]

    def _rows(
        self, which: Any, action: Action, name: I64, n_bytes: Any, op: I64, ready: Any, order: Any
    ) -> I64:
        columns = (action, name, n_bytes, self.stream, op, ready, order)
        return np.stack(
            [np.broadcast_to(column, self.storage.shape)[which].astype(np.int64) for column in columns]
        )


_COPY_IN_STREAM, _REDUCE_STREAM = 2, 3


def _fsdp_streams(step: Step) -> I64:
    """Return (m,) the stream on which FSDP2 allocates each storage, if none of `STREAMS`; 0 otherwise."""
    # Inputs and outputs of all-gathers are allocated on the stream that copies inputs in, sharded gradients
    # on that of reductions, whose inputs are packed on the compute stream. Blocks of one stream serve no
    # other, so each stream reserves its own peak (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
    # `foreach_all_gather`, `foreach_reduce`).
    found = np.zeros(step.storages.n, np.int64)
    if not any(name.startswith("fsdp.") for name in step.names):
        return found
    producer = step.storages.producer
    for part, number in (("all_gather", _COPY_IN_STREAM), ("reduce_scatter", _REDUCE_STREAM)):
        named = np.array([part in name for name in step.names], bool)
        mine = named[step.ops.name[step.uses.op]]
        if number == _REDUCE_STREAM:
            mine &= step.uses.mode == WRITES
        found[step.uses.storage[mine]] = number
    allocated = (producer >= 0) & (step.ops.resource[np.maximum(producer, 0)] == Resource.NOTHING)
    return np.where(allocated, found, 0)


def _first_start(step: Step, start: I64) -> I64:
    """Return `start` in the first step."""
    # Optimizer state that is there before all others appears before the optimizer's first use of any.
    # torch's optimizers make the state of a whole group of parameters before they update the first one, which
    # inside backward is one parameter.
    state = (step.storages.kind == Kind.OPTIMIZER) & (start < 0)
    used = state[step.uses.storage] & (step.ops.phase[step.uses.op] == Phase.OPTIMIZER)
    if not used.any():
        return start
    first = start.copy()
    first[state] = step.uses.op[used].min()
    if updates_inside_backward(step):
        rows = np.flatnonzero(used)[::-1]
        first[step.uses.storage[rows]] = step.uses.op[rows]  # the first one is written last
    return first
