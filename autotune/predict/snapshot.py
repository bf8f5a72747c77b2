"""Read a memory snapshot of torch as allocations and frees that can be replayed.

Gaps of a trace are filled as follows: if it begins after allocations were made, the segments and blocks of
that moment are those of the snapshot's end, followed backwards through the trace; where that contradicts
itself, storages that existed before are taken as allocated in order of their addresses; an allocation that
failed is requested again and freed at once; a release of cached memory releases all cached memory, whatever
its cause, unless a capacity shows that the allocator itself was out of memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memtune import safe_pickle
from memtune.autotune.predict.caching_allocator import Action, AllocatorEvents, AllocatorSettings, HeldMemory
from memtune.errors import UsageError, missing_file
from memtune.program import I64

_GROWS = ("segment_alloc", "segment_map")
_SHRINKS = ("segment_free", "segment_unmap")
_StreamOf = Callable[[dict[str, Any], str, str], int]
_KNOWN = ("alloc", "free_requested", "free_completed", "oom", *_GROWS, *_SHRINKS)
_WAITING = ("active_pending_free", "active_awaiting_free")
_NEVER = 2**62
_BLOCK, _SMALL, _SMALL_SEGMENT = 512, 2**20, 2**21
"""torch's allocator: sizes are multiples of the first, requests up to the second have their own segments, of
the third.
"""
_MOST_BYTES = 2**45
"""Upper bound of any size in a snapshot: 32 TiB."""
_FIX = "write it again: torch.cuda.memory._dump_snapshot('snapshot.pickle')"
_RECORD = "call torch.cuda.memory._record_memory_history() before the part in question, then _dump_snapshot"


@dataclass(frozen=True)
class Recorded:
    """Statistics of the allocator itself during the trace."""

    settings: str
    """`PYTORCH_CUDA_ALLOC_CONF` of the run, empty if the snapshot does not contain it."""
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    """Of sizes rounded up to multiples of 512."""
    fragmentation: float
    """Share of the reserved bytes that was unused at the reserved peak."""
    device_allocs: int
    ooms: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One device's trace, ready to be replayed."""

    device: int
    entries: int
    storages_before: int
    """Number of storages that existed when the trace began."""
    events: AllocatorEvents
    recorded: Recorded
    notes: tuple[str, ...]


def read_trace(path: Path, *, device: int | None = None, capacity_bytes: int | None = None) -> Trace:
    """Return the trace of one device in the snapshot at `path`; by default the device with most entries.

    Args:
        path: A file of `_dump_snapshot`, or a pickle of the result of `_snapshot()`.
        device: Its index.
        capacity_bytes: Device memory available to the process. If given, releases because it was full are
            left to the replay.

    Raises:
        UsageError: There is no such file (MT110), it cannot be read (MT141) or would run code (MT142), it is
            no snapshot of a known form (MT143), or has no trace of the device (MT144).
    """
    if not path.is_file():
        raise missing_file(path, "give the path of a snapshot")
    snapshot = _Snapshot.parse(safe_pickle.load(path.read_bytes(), path.name, fix=_FIX), path.name)
    return _TraceReader(snapshot, snapshot.device(device), capacity_bytes).trace()


@dataclass(frozen=True)
class _Snapshot:
    """The relevant parts of the file, type-checked."""

    name: str
    segments: list[dict[str, Any]]
    traces: list[list[dict[str, Any]]]
    settings: str

    @classmethod
    def parse(cls, loaded: Any, name: str) -> _Snapshot:
        if isinstance(loaded, list):
            raise _unknown(name, "it is a list, as torch 1.x wrote it, without a trace")
        if not isinstance(loaded, dict):
            raise _unknown(name, f"it holds a {type(loaded).__name__}")
        missing = [each for each in ("segments", "device_traces") if not isinstance(loaded.get(each), list)]
        if missing:
            raise _unknown(
                name,
                f"it has no list '{missing[0]}' but {', '.join(map(str, list(loaded)[:8])) or 'nothing'}",
            )
        traces = loaded["device_traces"]
        if not all(isinstance(trace, list) for trace in traces):
            raise _unknown(name, "device_traces is not one list a device")
        conf = loaded.get("allocator_settings")
        text = (
            conf.get("PYTORCH_CUDA_ALLOC_CONF", conf.get("PYTORCH_ALLOC_CONF", ""))
            if isinstance(conf, dict)
            else ""
        )
        return cls(name, loaded["segments"], traces, text if isinstance(text, str) else "")

    def device(self, asked: int | None) -> int:
        lengths = [len(trace) for trace in self.traces]
        if not any(lengths):
            raise UsageError(
                f"{self.name} holds no trace.",
                evidence="nothing was being recorded",
                fix=_RECORD,
                code="MT144",
            )
        found = max(range(len(lengths)), key=lengths.__getitem__) if asked is None else asked
        if not 0 <= found < len(lengths) or not lengths[found]:
            known = ", ".join(str(i) for i, length in enumerate(lengths) if length)
            raise UsageError(
                f"{self.name} holds no trace of device {found}.",
                evidence=f"it has: {known}",
                fix=_RECORD,
                code="MT144",
            )
        return found

    def number(self, entry: Any, key: str, where: str, default: int | None = None) -> int:
        """Return `entry[key]`, a number from 0 on."""
        value = entry.get(key, default) if isinstance(entry, dict) else None
        if type(value) is not int or not 0 <= value < (
            2**64 if key in ("addr", "address", "stream") else _MOST_BYTES
        ):
            raise _unknown(self.name, f"{where} has no '{key}' but {str(value)[:40]}")
        return value


def _unknown(name: str, why: str) -> UsageError:
    what = f"{name} is no memory snapshot of a form that is known (torch 2.1 and later)."
    return UsageError(what, evidence=why, fix=_RECORD, code="MT143")


@dataclass(slots=True)
class _Row:
    """An event of the trace: columns of `AllocatorEvents`."""

    action: Action
    storage: int
    n_bytes: int = 0
    stream: int = 0
    op: int = 0
    """Number of the entry, from 1; 0 for what was there when the trace began."""
    ready_op: int = -1
    """Of a free: entry by which other streams have finished with the block; -1 for at once."""


_COLUMNS = attrgetter("action", "storage", "n_bytes", "stream", "op", "ready_op")


@dataclass
class _TraceReader:
    """Reads the entries once, collecting rows."""

    snapshot: _Snapshot
    device: int
    capacity_bytes: int | None
    rows: list[_Row] = field(default_factory=list)
    before: list[tuple[int, _Row]] = field(default_factory=list)  # address and row of what was there
    live: dict[int, int] = field(default_factory=dict)  # address → storage
    pending_frees: dict[int, _Row] = field(default_factory=dict)  # address → a free that waits
    streams: dict[tuple[int, Any], int] = field(default_factory=dict)
    storages: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    block_bytes: dict[int, int] = field(default_factory=dict)
    """Storage that was there when it began → bytes of its block, if it is there at the end."""
    held: HeldMemory | None = None

    def trace(self) -> Trace:
        entries = self.snapshot.traces[self.device]
        for op, entry in enumerate(entries, start=1):
            self._entry(op, entry, f"entry {op - 1} of device {self.device}")
        self._add_never_freed()
        self.before.sort(key=lambda each: each[0])
        reserved = self._reserved(entries)
        if entries and sum(self.ignored.values()) == len(entries):
            kinds = ", ".join(f"'{each}'" for each in sorted(self.ignored)[:5])
            raise _unknown(
                self.snapshot.name, f"none of its {len(entries)} entries is of a kind that is known: {kinds}"
            )
        rows = [row for _, row in self.before] + self._with_releases(entries, reserved)
        columns = np.array([_COLUMNS(row) for row in rows], np.int64).reshape(-1, 6).T
        events = AllocatorEvents.from_columns(columns, np.zeros(1, np.int64))
        self.held = self._initial_memory(entries, int(reserved[0]))
        events = replace(events, held=self.held)
        return Trace(
            self.device,
            len(entries),
            len(self.before),
            events,
            self._recorded(entries, reserved),
            self._notes(),
        )

    def _entry(self, op: int, entry: Any, where: str) -> None:
        action = entry.get("action") if isinstance(entry, dict) else None
        if not isinstance(action, str):
            raise _unknown(self.snapshot.name, f"{where} has no action")
        if action not in _KNOWN:
            self.ignored[action] += 1
            return
        size = self.snapshot.number(entry, "size", where)
        if action == "oom":
            self.rows.append(_Row(Action.ALLOC, self._name(), size, self._stream(entry, where), op))
            self.rows.append(_Row(Action.FREE, self.storages - 1, op=op))
        elif action in ("alloc", "free_requested", "free_completed"):
            address = self.snapshot.number(entry, "addr", where)
            getattr(self, f"_{action}")(op, address, size, self._stream(entry, where))

    def _alloc(self, op: int, address: int, size: int, stream: int) -> None:
        if address in self.live:  # its free is not in the trace
            self.rows.append(_Row(Action.FREE, self.live[address], op=op))
        self.live[address] = self._name()
        self.rows.append(_Row(Action.ALLOC, self.live[address], size, stream, op))

    def _free_requested(self, op: int, address: int, size: int, stream: int) -> None:
        storage = self.live.pop(address, None)
        if storage is None:
            storage = self._add_preexisting(address, size, stream)
        self.pending_frees[address] = _Row(Action.FREE, storage, op=op, ready_op=_NEVER)
        self.rows.append(self.pending_frees[address])

    def _free_completed(self, op: int, address: int, size: int, stream: int) -> None:
        row = self.pending_frees.pop(address, None)
        if row is None:  # it was asked for before the trace began
            self.rows.append(_Row(Action.FREE, self._add_preexisting(address, size, stream), op=op))
        else:
            # The next entry completes it: no other stream was using the block.
            row.ready_op = -1 if op == row.op + 1 else op

    def _add_never_freed(self) -> None:
        """Add blocks in use at the end whose allocation is not in the trace."""
        for number, segment in enumerate(self.snapshot.segments):
            where = f"segment {number}"
            if self.snapshot.number(segment, "device", where, 0) != self.device:
                continue
            address = self.snapshot.number(segment, "address", where)
            blocks = segment.get("blocks")
            for block in blocks if isinstance(blocks, list) else []:
                size = self.snapshot.number(block, "size", where)
                state = block.get("state")
                waits = state in _WAITING and address not in self.pending_frees
                if (state == "active_allocated" or waits) and address not in self.live:
                    asked = self.snapshot.number(block, "requested_size", where, size)
                    stream = self._stream(segment, where, "segment_pool_id")
                    storage = self._add_preexisting(address, asked or size, stream)
                    self.block_bytes[storage] = size
                    if waits:  # freed before the trace began, and still in use by a stream when it ends
                        self.rows.append(_Row(Action.FREE, storage, ready_op=_NEVER))
                address += size

    def _add_preexisting(self, address: int, size: int, stream: int) -> int:
        storage = self._name()
        self.before.append((address, _Row(Action.ALLOC, storage, size, stream)))
        return storage

    def _name(self) -> int:
        self.storages += 1
        return self.storages - 1

    def _stream(self, entry: dict[str, Any], where: str, pool: str = "pool_id") -> int:
        """Private pools of CUDA graphs share no blocks with others: they are streams of their own."""
        which = entry.get(pool)
        private = isinstance(which, tuple) and all(type(each) is int for each in which) and any(which)
        key = (self.snapshot.number(entry, "stream", where, 0), which if private else None)
        return self.streams.setdefault(key, len(self.streams))

    def _reserved(self, entries: list[dict[str, Any]]) -> I64:
        """Return (entries + 1,) bytes reserved before each entry and after the last."""
        change = [
            (
                each["size"] * ((each["action"] in _GROWS) - (each["action"] in _SHRINKS))
                if each["action"] in _KNOWN
                else 0
            )
            for each in entries
        ]
        sums = np.concatenate([[0], np.cumsum(np.array(change, np.int64))])
        mine = [each for each in self.snapshot.segments if each.get("device", 0) == self.device]
        end = sum(self.snapshot.number(each, "total_size", "a segment") for each in mine)
        # The level is known only at the end of the trace; never below zero, where the two disagree.
        return sums + max(end - int(sums[-1]), -int(sums.min()))

    def _initial_memory(self, entries: list[dict[str, Any]], reserved: int) -> HeldMemory | None:
        """Return the first segments and blocks; None without any, or if the snapshot contradicts itself."""
        segments = _HeldSegments.at_end(self.snapshot, self.device, self._stream)
        if segments is None or not segments.rewind(entries, self._stream) or not segments.rows:
            return None
        in_order, sizes = sorted(segments.rows), _BlockSizes.parse(self.snapshot.settings)
        begins = [each.address for each in in_order]
        blocks = []
        for number, (address, row) in enumerate(self.before):
            at = bisect_right(begins, address) - 1
            if at < 0 or in_order[at].stream != row.stream:
                return None
            end = in_order[at].end
            if number + 1 < len(self.before):
                end = min(end, self.before[number + 1][0])
            size = self.block_bytes.get(row.storage) or sizes.rounded(row.n_bytes)
            left = end - address - size
            if left < 0:
                # Two blocks overlap, so the storages' sizes are not those of this allocator.
                return None
            if row.storage not in self.block_bytes and not in_order[at].small and not segments.expandable:
                size += left if left <= _SMALL or size >= sizes.max_split_bytes else 0  # torch left it uncut
            blocks.append((address, size))
        if sum(each.n_bytes for each in in_order) != reserved:
            return None
        return HeldMemory(
            segment_address=np.array(begins, np.int64),
            segment_bytes=np.array([each.n_bytes for each in in_order], np.int64),
            segment_stream=np.array([each.stream for each in in_order], np.int32),
            segment_small=np.array([each.small for each in in_order], np.uint8),
            block_address=np.array([block[0] for block in blocks], np.int64),
            block_bytes=np.array([block[1] for block in blocks], np.int64),
            expandable=segments.expandable,
        )

    def _with_releases(self, entries: list[dict[str, Any]], reserved: I64) -> list[_Row]:
        """Return the rows, with a call of empty_cache where cached memory was released."""
        calls, run = [], False
        for op, entry in enumerate(entries, start=1):
            gives_back = entry["action"] in _SHRINKS
            # Releases in a row, with frees that complete between them, are one call.
            if gives_back and not run and not self._was_full(entries, op - 1, int(reserved[op - 1])):
                calls.append(_Row(Action.EMPTY_CACHE, storage=0, op=op))
            run = gives_back or (run and entry["action"] == "free_completed")
        return sorted([*self.rows, *calls], key=lambda row: row.op)

    def _was_full(self, entries: list[dict[str, Any]], at: int, reserved: int) -> bool:
        """Return whether a release from here on made room for an allocation that would have failed."""
        if self.capacity_bytes is None:
            return False
        while at < len(entries) and entries[at]["action"] in (*_SHRINKS, "free_completed"):
            at += 1
        wants = at < len(entries) and entries[at]["action"] in (*_GROWS, "oom")
        return wants and reserved + int(entries[at]["size"]) > self.capacity_bytes

    def _recorded(self, entries: list[dict[str, Any]], reserved: I64) -> Recorded:
        before = [row for _, row in self.before]
        blocks = {
            row.storage: -(-row.n_bytes // 512) * 512
            for row in (*self.rows, *before)
            if row.action is Action.ALLOC
        }
        # As torch counts allocated bytes: by blocks, in multiples of 512.
        start = sum(blocks[row.storage] for row in before)
        failed = {op for op, each in enumerate(entries, start=1) if each["action"] == "oom"}
        change = np.zeros(len(entries) + 2, np.int64)
        for row in self.rows:
            if row.op not in failed:
                # Failed requests were never allocated.
                change[row.op] += blocks[row.storage] * (1 if row.action is Action.ALLOC else -1)
        allocated = start + np.cumsum(change)
        peak = int(np.argmax(reserved))
        # The segment that made the peak serves the request after it, whose bytes are in use then.
        served = peak + 1 < len(allocated) and peak < len(entries) and entries[peak]["action"] == "alloc"
        in_use = int(allocated[peak + 1 if served else peak])
        most = int(reserved[peak])
        return Recorded(
            settings=self.snapshot.settings,
            peak_reserved_bytes=most,
            peak_allocated_bytes=int(allocated.max()),
            fragmentation=max(0.0, 1 - in_use / most) if most else 0.0,
            device_allocs=sum(each["action"] in _GROWS for each in entries),
            ooms=len(failed),
        )

    def _notes(self) -> tuple[str, ...]:
        others = [str(i) for i, trace in enumerate(self.snapshot.traces) if trace and i != self.device]
        notes = (
            [f"device {self.device} of {', '.join(sorted([str(self.device), *others]))}"] if others else []
        )
        if self.held is not None:
            form = "expandable" if self.held.expandable else "plain"
            notes.append(
                f"{len(self.before)} storages existed before the trace; a replay with {form} segments starts"
                " from those of the snapshot, others place the storages again, in order of address"
            )
        elif self.before:
            notes.append(
                f"{len(self.before)} storages existed before the trace; they are placed again, in order"
                " of address"
            )
        if any(key[1] is not None for key in self.streams):
            notes.append("private pools of CUDA graphs are taken as streams of their own")
        return (*notes, *(f"{count} entries '{action}' ignored" for action, count in self.ignored.items()))


class _Segment(NamedTuple):
    """A segment of the driver's memory."""

    address: int
    n_bytes: int
    stream: int
    small: int
    """1 if it is of the pool for small blocks, else 0."""

    @property
    def end(self) -> int:
        """First address behind it."""
        return self.address + self.n_bytes


@dataclass
class _HeldSegments:
    """Segments of one device, followed backwards from the end of the trace."""

    rows: list[_Segment]
    expandable: bool

    @classmethod
    def at_end(cls, snapshot: _Snapshot, device: int, stream_of: _StreamOf) -> _HeldSegments | None:
        """Return the segments of the snapshot; None if plain and expandable ones are mixed."""
        rows, forms = [], set()
        for number, segment in enumerate(snapshot.segments):
            where = f"segment {number}"
            if snapshot.number(segment, "device", where, 0) != device:
                continue
            address, n_bytes = (snapshot.number(segment, key, where) for key in ("address", "total_size"))
            forms.add(bool(segment.get("is_expandable", False)))
            small = int(segment.get("segment_type") == "small")
            rows.append(_Segment(address, n_bytes, stream_of(segment, where, "segment_pool_id"), small))
        actions = {entry["action"] for entry in snapshot.traces[device]}
        forms |= {True} if actions & {"segment_map", "segment_unmap"} else set()
        forms |= {False} if actions & {"segment_alloc", "segment_free"} else set()
        return cls(rows, True in forms) if len(forms) == 1 else None

    def rewind(self, entries: list[dict[str, Any]], stream_of: _StreamOf) -> bool:
        """Undo the entries, last first; return False where they contradict the segments."""
        for number in range(len(entries) - 1, -1, -1):
            entry = entries[number]
            # Only the driver's memory changes segments; blocks inside follow from the storages.
            if entry["action"] not in (*_GROWS, *_SHRINKS) or not entry["size"]:
                continue
            address, end = entry.get("addr"), entry.get("addr", 0) + entry["size"]
            if not isinstance(address, int):
                return False
            stream = stream_of(entry, f"entry {number}", "pool_id")
            if not (
                self._remove(address, end) if entry["action"] in _GROWS else self._add(address, end, stream)
            ):
                return False
        return True

    def _remove(self, address: int, end: int) -> bool:
        """Cut [address, end) out of the segment that holds it."""
        for at, row in enumerate(self.rows):
            if row.address <= address and end <= row.end:
                left = [(row.address, address - row.address), (end, row.end - end)]
                # Plain segments come and leave whole; a partial one contradicts the snapshot.
                if not self.expandable and any(n_bytes for _, n_bytes in left):
                    return False
                self.rows[at : at + 1] = [
                    row._replace(address=start, n_bytes=n_bytes) for start, n_bytes in left if n_bytes
                ]
                return True
        return False

    def _add(self, address: int, end: int, stream: int) -> bool:
        if any(row.address < end and address < row.end for row in self.rows):
            return False
        small = int(end - address <= _SMALL_SEGMENT)
        if self.expandable:
            # The pool of the mapped stretch nearest below: ranges of addresses belong to one pool each.
            below = [row for row in self.rows if row.stream == stream and row.address < address]
            small = max(below).small if below else small
            for row in [row for row in self.rows if (row.stream, row.small) == (stream, small)]:
                if row.end == address or row.address == end:
                    address, end = min(address, row.address), max(end, row.end)
                    self.rows.remove(row)
        self.rows.append(_Segment(address, end - address, stream, small))
        return True


@dataclass(frozen=True)
class _BlockSizes:
    """Rules of the recorded run's settings for the sizes of blocks."""

    divisions: list[int]
    max_split_bytes: int

    @classmethod
    def parse(cls, text: str) -> _BlockSizes:
        try:
            native = AllocatorSettings.parse(text).native()
        except UsageError:  # recorded by a torch with more settings
            native = AllocatorSettings().native()
        return cls(native.get("roundup_divisions") or [0], native.get("max_split_bytes") or _NEVER)

    def rounded(self, n_bytes: int) -> int:
        """Return the size of the block that serves a request of `n_bytes`."""
        power = max(n_bytes, 1).bit_length() - 1
        divisions = self.divisions[min(max(power - 20, 0), len(self.divisions) - 1)]
        part = (1 << power) // divisions if divisions > 1 and n_bytes > _BLOCK * divisions else _BLOCK
        return -(-max(n_bytes, 1) // part) * part
