"""Reserved bytes: what a program's allocations and frees do to PyTorch's CUDA caching allocator, replayed in native code.

Out-of-memory is decided by reserved bytes, which depend on the order of allocations and frees and on the allocator's settings.
A stream of several steps shows both the first step, in which the optimizer state appears, and the steady state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from memtune import _native
from memtune.autotune.allocator_settings import AllocatorSettings
from memtune.passes.moments import updates_inside_backward
from memtune.program import FOREVER, I32, I64, U8, Kind, Phase, Resource, Step, Tier
from memtune.units import format_bytes

__all__ = ["STREAMS", "Action", "AllocatorEvents", "AllocatorResult", "AllocatorSettings", "event_stream", "replay"]

STREAMS: Mapping[Resource, int] = {Resource.INTRA_LINK: 1, Resource.INTER_LINK: 1}
"""Stream on which what an op produces is allocated, by its resource; all others use stream 0, that of compute.

FSDP2 allocates communication buffers on streams of its own; copies between tiers allocate on the stream of compute
(`runtime/transfer.py`).
"""


class Action(IntEnum):
    """What an event does."""

    ALLOC = 0
    FREE = 1
    EMPTY_CACHE = 2


@dataclass(frozen=True, eq=False)
class AllocatorEvents:
    """Allocations and frees in the order in which the host asks for them; one row an event, k of them."""

    action: U8  # (k,) Action
    storage: I32  # (k,) which one; the same number may be used again after a free
    bytes: I64  # (k,) asked for, 0 for a free
    stream: I32  # (k,) of an allocation, from 0 on
    op: I64  # (k,) when, in ops; not falling
    ready_op: (
        I64  # (k,) of a free: the op at which all other streams have finished with the storage; at or before `op`: they have
    )
    step: I64  # (steps,) first event of each step

    @classmethod
    def of(cls, columns: I64, first_of_step: I64) -> AllocatorEvents:
        """Events from a matrix of one column an event: action, storage, bytes, stream, op, ready_op."""
        action, storage, n_bytes, stream, op, ready_op = (np.ascontiguousarray(row) for row in columns)
        kinds = (action.astype(np.uint8), storage.astype(np.int32), n_bytes, stream.astype(np.int32))
        return cls(*kinds, op, ready_op, first_of_step)

    def __len__(self) -> int:
        """Number of events."""
        return len(self.action)


@dataclass(frozen=True, eq=False)
class AllocatorResult:
    """What came of a replay."""

    settings: AllocatorSettings
    events: AllocatorEvents
    native: _native.AllocatorReplay

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that the allocator held from the driver."""
        return self.native.peak_reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes of blocks in use, rounding included, as `torch.cuda.max_memory_allocated` counts them."""
        return self.native.peak_allocated_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that was not in use when they were at their peak, from 0 to 1."""
        reserved = self.native.peak_reserved_bytes
        return 1 - self.native.allocated_at_peak_bytes / reserved if reserved else 0.0

    @property
    def step_reserved_bytes(self) -> list[int]:
        """Peak of reserved bytes in each step: the first one, in which the optimizer state appears, then the steady state."""
        return [int(each) for each in self.native.step_reserved_bytes]

    @property
    def step_allocated_bytes(self) -> list[int]:
        """Peak of allocated bytes in each step."""
        return [int(each) for each in self.native.step_allocated_bytes]

    @cached_property
    def oom_step(self) -> int | None:
        """The step of the first allocation that could not be served, None where all were."""
        event = self.native.first_oom.event
        return None if event < 0 else int(np.searchsorted(self.events.step, event, side="right")) - 1

    @property
    def oom_op(self) -> int | None:
        """The op of that allocation."""
        event = self.native.first_oom.event
        return None if event < 0 else int(self.events.op[event])

    @property
    def oom(self) -> str:
        """Why that allocation failed, empty where none did."""
        at = self.native.first_oom
        if at.event < 0:
            return ""
        return (
            f"{format_bytes(at.requested_bytes)} asked for, {format_bytes(at.allocated_bytes)} allocated, "
            f"{format_bytes(at.reserved_bytes)} reserved, largest free block {format_bytes(at.largest_free_bytes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it but the timeline as plain data."""
        return {
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "fragmentation": self.fragmentation,
            "device_allocs": self.native.device_allocs,
            "device_frees": self.native.device_frees,
            "retries": self.native.retries,
            "ooms": self.native.ooms,
            "oom": {"step": self.oom_step, "op": self.oom_op, "reason": self.oom} if self.native.ooms else None,
            "step_reserved_bytes": self.step_reserved_bytes,
            "step_allocated_bytes": self.step_allocated_bytes,
        }


def replay(
    events: AllocatorEvents, settings: AllocatorSettings, capacity_bytes: int | None, *, timeline: bool = False
) -> AllocatorResult:
    """Run `events` through an allocator that starts empty.

    An allocation that cannot be served is counted, and the program goes on as if it had caught the error.

    Args:
        events: What the program does.
        settings: The allocator's.
        capacity_bytes: What the device has to give; None: no end, so that nothing is ever given back to make room.
        timeline: Keep reserved and allocated bytes after each event, and addresses, in `native`.

    Raises:
        ValueError: A column is broken, or a storage is allocated twice or freed without being allocated.
    """
    columns = {name: getattr(events, name) for name in ("action", "storage", "bytes", "stream", "op", "ready_op", "step")}
    limit = settings.limit_bytes(capacity_bytes)
    native = _native.replay_allocator(
        **columns, **settings.native(), capacity_bytes=capacity_bytes, allowed_bytes=limit, timeline=timeline
    )
    return AllocatorResult(settings, events, native)


def event_stream(step: Step, steps: int, *, streams: Mapping[Resource, int] = STREAMS, lag_ops: int = 0) -> AllocatorEvents:
    """The device's allocations and frees of `steps` steps, each of which is `step`.

    Before the first step stands what is there before any (parameters, buffers, the first batch), in order of the storages.
    Optimizer state appears in the first step, before the first op of the optimizer that uses any of it. What a step makes and
    leaves behind is replaced when the next step makes it again. Storages without bytes are left out: they allocate nothing.

    Args:
        step: As recorded or rewritten: a step that is not the first one.
        steps: How many.
        streams: Stream on which what an op of a resource produces is allocated.
        lag_ops: Where an op on another stream used a storage last: after how many further ops the host can see that it has
            finished, as with `record_stream`; 0 where whoever frees waits for the other stream, as this package's runtime does.
    """
    lives = _Lives.of(step, streams, lag_ops)
    parts = [lives.events(number) for number in range(steps)]
    first = np.cumsum([0, *(part.shape[1] for part in parts)])[:steps]
    return AllocatorEvents.of(np.concatenate([np.empty((6, 0), np.int64), *parts], axis=1), first)


@dataclass(frozen=True, eq=False)
class _Lives:
    """When the storages on the device come and go within a step; r of them."""

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
    def of(cls, step: Step, streams: Mapping[Resource, int], lag_ops: int) -> _Lives:
        stream_of_op = np.array([streams.get(each, 0) for each in Resource], np.int64)[step.op_resource]
        made = step.producer >= 0
        stream = np.zeros(step.n_storages, np.int64)
        stream[made] = stream_of_op[step.producer[made]]
        elsewhere = stream_of_op[step.use_op] != stream[step.use_storage]
        ready = np.full(step.n_storages, -1, np.int64)
        np.maximum.at(ready, step.use_storage[elsewhere], step.use_op[elsewhere].astype(np.int64) + lag_ops)
        end = np.where(step.end < step.n_ops, step.end, FOREVER).astype(np.int64)
        start = step.producer.astype(np.int64)
        rows = np.flatnonzero((step.tier == Tier.DEVICE) & (step.bytes > 0))
        columns = (step.bytes, stream, start, _first_start(step, start), end, ready)
        return cls(max(step.n_ops, 1), step.n_storages, rows, *(column[rows] for column in columns))

    def events(self, number: int) -> I64:
        """(6, k) the events of the step with this number, from 0 on, in order."""
        base, first = number * self.n_ops, number == 0
        stays, before = self.end == FOREVER, self.start < 0
        once = stays & before  # there before the first step or from the first one on
        name = np.where(once, 0, number * self.n_storages) + self.storage
        begins = np.maximum(self.appears if first else self.start, 0)
        # What is there before an op comes first, then what the op makes, in whose place something may be left to free.
        parts = [
            self._rows(~once | first, Action.ALLOC, name, self.bytes, base + begins, -1, ~before),
            self._rows(stays & ~before & (not first), Action.FREE, name - self.n_storages, 0, base + begins, -1, 2),
            self._rows(~stays, Action.FREE, name, 0, base + np.maximum(self.end, 0), base + self.ready, 3),
        ]
        rows = np.concatenate(parts, axis=1)
        op, order = rows[4], rows[-1]
        return rows[:-1, np.lexsort((order, op))]

    def _rows(self, which: Any, action: Action, name: I64, n_bytes: Any, op: I64, ready: Any, order: Any) -> I64:
        columns = (action, name, n_bytes, self.stream, op, ready, order)
        return np.stack([np.broadcast_to(column, self.storage.shape)[which].astype(np.int64) for column in columns])


def _first_start(step: Step, start: I64) -> I64:
    """`start` in the first step: optimizer state that is there before all others appears before the optimizer's first use of any.

    torch's optimizers make the state of a whole group of parameters before they update the first one, which inside backward is
    one parameter.
    """
    state = (step.kind == Kind.OPTIMIZER) & (start < 0)
    used = state[step.use_storage] & (step.op_phase[step.use_op] == Phase.OPTIMIZER)
    if not used.any():
        return start
    first = start.copy()
    first[state] = step.use_op[used].min()
    if updates_inside_backward(step):
        rows = np.flatnonzero(used)[::-1]
        first[step.use_storage[rows]] = step.use_op[rows]  # the first one is written last
    return first
