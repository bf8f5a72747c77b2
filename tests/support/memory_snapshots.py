"""Memory snapshots in torch's format, written by the reference allocator of tests/reference while it runs a
program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reference import allocator as reference

Row = tuple[int, int, int, int, int, int]


@dataclass
class Recording(reference.Allocator):
    """The reference allocator, recording the events that torch's `record_trace` records."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)
    """Bytes asked for, by address in use."""
    highest_ever: int = 0
    grows_at: int = 0
    """Address of the memory that `took` reports next."""

    grows_for: int = 0
    """Stream of that memory."""

    def fresh(self, size: int, small: bool, stream: int) -> tuple[reference.Segment, reference.Piece] | None:
        self.grows_for = stream
        return super().fresh(size, small, stream)

    def take_addresses(self, size: int) -> int:
        self.grows_at = super().take_addresses(size)
        return self.grows_at

    def map(self, segment: reference.Segment, hole: reference.Piece, wanted: int) -> bool:
        self.grows_at = hole.address
        return super().map(segment, hole, wanted)

    def write(self, action: str, address: int, size: int, stream: int = 0) -> None:
        place = {"device_free": 0} if action == "oom" else {"addr": address}
        self.entries.append(
            {
                "action": action,
                **place,
                "size": size,
                "stream": stream,
                "frames": [],
                "time_us": len(self.entries),
            }
        )

    def took(self, n_bytes: int) -> None:
        super().took(n_bytes)
        self.highest_ever = max(self.highest_ever, self.reserved)
        self.write(
            "segment_map" if self.expandable_segments else "segment_alloc",
            self.grows_at,
            n_bytes,
            self.grows_for,
        )

    def give_back(self, segment: reference.Segment) -> None:
        self.write("segment_free", segment.pieces[0].address, segment.pieces[0].size, segment.stream)
        super().give_back(segment)

    def unmap(self, segment: reference.Segment, piece: reference.Piece) -> None:
        before, base = self.reserved, segment.pieces[0].address
        first_page = base - (base - piece.address) // segment.page * segment.page
        super().unmap(segment, piece)
        if before > self.reserved:
            self.write("segment_unmap", first_page, before - self.reserved, segment.stream)

    def make_free(self, segment: reference.Segment, piece: reference.Piece) -> None:
        self.write("free_completed", piece.address, self.asked.pop(piece.address), segment.stream)
        super().make_free(segment, piece)

    def segment_infos(self) -> list[dict[str, Any]]:
        """Return one entry per contiguous mapped stretch."""
        found = []
        for segment in self.segments:
            stretches: list[list[reference.Piece]] = [[]]
            for piece in segment.pieces:
                stretches[-1].append(piece) if piece.mapped else stretches.append([])
            found += [self.info(segment, pieces) for pieces in stretches if pieces]
        return found

    def info(self, segment: reference.Segment, pieces: list[reference.Piece]) -> dict[str, Any]:
        waiting = {piece.address for _, _, piece in self.waiting}
        states = [
            "active_awaiting_free"
            if piece.address in waiting
            else "active_allocated"
            if piece.used
            else "inactive"
            for piece in pieces
        ]
        blocks = [
            {
                "address": piece.address,
                "size": piece.size,
                "requested_size": self.asked.get(piece.address, 0),
                "state": state,
                "frames": [],
            }
            for piece, state in zip(pieces, states, strict=True)
        ]
        return {
            "device": 0,
            "address": pieces[0].address,
            "total_size": sum(piece.size for piece in pieces),
            "stream": segment.stream,
            "is_expandable": bool(segment.page),
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "blocks": blocks,
        }


def record(
    rows: list[Row], conf: str = "", *, last: int | None = None, **settings: Any
) -> tuple[dict[str, Any], Recording]:
    """Run `rows` and return the result of `_snapshot()`; `last` limits the trace to that many entries, like a
    full buffer.
    """
    allocator = Recording(**settings)
    live: dict[int, tuple[reference.Segment, reference.Piece] | None] = {}
    for action, storage, n_bytes, stream, op, ready_op in rows:
        if action == 2:
            allocator.empty_cache()
        elif action == 1:
            held = live.pop(storage)
            if held is not None:
                asked = allocator.asked[held[1].address]
                allocator.write("free_requested", held[1].address, asked, held[0].stream)
                allocator.free(*held, op, ready_op)
        else:
            live[storage] = got = allocator.allocate(n_bytes, stream, op)
            if got is None:
                allocator.write("oom", 0, n_bytes, stream)
            else:
                allocator.asked[got[1].address] = n_bytes
                allocator.write("alloc", got[1].address, n_bytes, stream)
    entries = allocator.entries if last is None else allocator.entries[-last:]
    return {
        "segments": allocator.segment_infos(),
        "device_traces": [entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": conf,
            "expandable_segments": allocator.expandable_segments,
        },
        "external_annotations": [],
    }, allocator
