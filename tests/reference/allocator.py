"""Reference model of PyTorch's CUDA caching allocator: slow and simple, a list of segments of pieces.

Written from torch's documentation and source: it shares no code with the native model in csrc, has no
indices, and scans all pieces for each query.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20
NO_END = 2**63 - 1


@dataclass(eq=False)
class Piece:
    """A contiguous part of a segment."""

    address: int
    size: int
    used: bool = False
    mapped: bool = True
    freed_at_search: int = 0


@dataclass(eq=False)
class Segment:
    """Memory of one cudaMalloc, or one reserved address range; its pieces in address order, without gaps."""

    small: bool
    stream: int
    pieces: list[Piece]
    page: int = 0
    """Size of the pages of a range, 0 for a plain segment."""

    def join_neighbours(self) -> None:
        """Join adjacent free pieces; the age of the joined piece is that of the younger one."""
        joined: list[Piece] = []
        for piece in self.pieces:
            before = joined[-1] if joined else None
            if before is None or before.used or piece.used or before.mapped != piece.mapped:
                joined.append(piece)
                continue
            before.size += piece.size
            before.freed_at_search = max(before.freed_at_search, piece.freed_at_search)
        self.pieces = joined


@dataclass
class Outcome:
    """Results of a replay, with the fields of the native one."""

    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_event: int = -1
    allocated_at_peak_bytes: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    retries: int = 0
    ooms: int = 0
    first_oom: tuple[int, int, int, int, int] = (-1, 0, 0, 0, 0)
    step_reserved_bytes: list[int] = field(default_factory=list)
    step_allocated_bytes: list[int] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)
    address: list[int] = field(default_factory=list)


@dataclass
class Allocator:
    """The allocator of one device; arguments are those of the native replay."""

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    large_segment_bytes: int = 20 * MIB
    roundup_divisions: list[int] = field(default_factory=lambda: [0] * 16)
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    asynchronous: bool = False
    capacity_bytes: int | None = None
    allowed_bytes: int | None = None

    segments: list[Segment] = field(default_factory=list)
    waiting: list[tuple[int, Segment, Piece]] = field(default_factory=list)
    searches: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    next_address: int = 0
    reserved: int = 0
    highest: int = 0
    """Most reserved bytes since this was reset."""
    device_allocs: int = 0
    device_frees: int = 0
    retries: int = 0

    def pieces(self, small: bool, stream: int | None = None) -> Iterator[tuple[Segment, Piece]]:
        """Return the free mapped pieces of a pool by size, then address."""
        found = [
            (segment, piece)
            for segment in self.segments
            for piece in segment.pieces
            if segment.small == small and stream in (None, segment.stream) and piece.mapped and not piece.used
        ]
        return iter(sorted(found, key=lambda each: (each[1].size, each[1].address)))

    # Allocation

    def allocate(self, n_bytes: int, stream: int, op: int) -> tuple[Segment, Piece] | None:
        self.finish(op)
        size = self.rounded(n_bytes)
        small = size <= MIB
        found = self.cached(size, small, stream)
        if found is None:
            self.collect()
            found = self.fresh(size, small, stream)
            if found is None and self.release_oversize(size, small, stream):
                found = self.fresh(size, small, stream)
            if found is None:
                self.empty_cache()
                self.retries += 1
                found = self.fresh(size, small, stream)
        if found is None:
            return None
        segment, piece = found
        rest = piece.size - size
        if small or self.expandable_segments:
            cut = rest >= 512
        else:
            cut = rest > MIB and (self.max_split_bytes is None or size < self.max_split_bytes)
        if cut:
            at = segment.pieces.index(piece)
            segment.pieces.insert(
                at + 1, Piece(piece.address + size, rest, freed_at_search=self.searches[small])
            )
            piece.size = size
        piece.used = True
        return segment, piece

    def rounded(self, n_bytes: int) -> int:
        if n_bytes <= 512:
            return 512
        floor = 1 << (n_bytes.bit_length() - 1)
        interval = min(max(floor.bit_length() - 1 - 20, 0), 15)
        divisions = self.roundup_divisions[interval]
        part = floor // divisions if divisions > 1 and n_bytes > 512 * divisions else 512
        while n_bytes % part:
            n_bytes += part - n_bytes % part
        return n_bytes

    def collects(self) -> bool:
        return self.garbage_collection_threshold > 0 and self.allowed_bytes is not None

    def cached(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        if self.collects():
            self.searches[small] += 1
        fitting = [each for each in self.pieces(small, stream) if each[1].size >= size]
        if not fitting:
            return None
        best = 0
        if self.expandable_segments:
            while best + 1 < len(fitting) and self.room(*fitting[best + 1]) < self.room(*fitting[best]):
                best += 1
        segment, piece = fitting[best]
        if self.max_split_bytes is not None:
            slack = (
                self.large_segment_bytes
                if self.max_non_split_rounding_bytes is None
                else self.max_non_split_rounding_bytes
            )
            if size < self.max_split_bytes <= piece.size:
                return None
            if size >= self.max_split_bytes and piece.size >= size + slack:
                return None
        return segment, piece

    def room(self, segment: Segment, piece: Piece) -> int:
        """Return the size to which the piece can grow by mapping the hole after it."""
        after = segment.pieces.index(piece) + 1
        follows = after < len(segment.pieces) and not segment.pieces[after].mapped
        return piece.size + (segment.pieces[after].size if follows else 0)

    def fresh(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        if small:
            needed = 2 * MIB
        elif size < 10 * MIB:
            needed = self.large_segment_bytes
        else:
            needed = -(-size // (2 * MIB)) * 2 * MIB
        if self.allowed_bytes is not None and self.reserved + needed > self.allowed_bytes:
            return None
        if self.expandable_segments:
            return self.fresh_in_range(size, small, stream)
        if self.capacity_bytes is not None and self.reserved + needed > self.capacity_bytes:
            return None
        segment = Segment(small, stream, [Piece(self.take_addresses(needed), needed)])
        self.segments.append(segment)
        self.took(needed)
        return segment, segment.pieces[0]

    def take_addresses(self, size: int) -> int:
        address = self.next_address
        self.next_address += -(-size // (2 * MIB)) * 2 * MIB
        return address

    def took(self, n_bytes: int) -> None:
        self.reserved += n_bytes
        self.highest = max(self.highest, self.reserved)
        self.device_allocs += 1

    # Expandable segments

    def fresh_in_range(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        segment, first = self.place(size, small, stream)
        start = segment.pieces[first].address
        while True:
            here = next(
                piece for piece in segment.pieces if piece.address <= start < piece.address + piece.size
            )
            if here.mapped and here.size >= size:
                return segment, here
            if not here.mapped:
                hole, wanted = here, min(here.size, size)
            else:
                hole = segment.pieces[segment.pieces.index(here) + 1]
                wanted = min(size - here.size, hole.size)
            if not self.map(segment, hole, wanted):
                return None

    def place(self, size: int, small: bool, stream: int) -> tuple[Segment, int]:
        """Return the lowest hole with `size` unused bytes, including a free piece just before it."""
        ranges = [
            each for each in self.segments if each.page and each.small == small and each.stream == stream
        ]
        for segment in ranges:
            for i, piece in enumerate(segment.pieces):
                if piece.mapped:
                    continue
                first = i - 1 if i and not segment.pieces[i - 1].used else i
                free = 0
                for each in segment.pieces[first:]:
                    if each.used:
                        break
                    free += each.size
                if free >= size:
                    return segment, first
        page = 2 * MIB if small else self.large_segment_bytes
        total = 2**46 if self.capacity_bytes is None else self.capacity_bytes + self.capacity_bytes // 8
        total = -(-total // page) * page
        segment = Segment(small, stream, [Piece(self.take_addresses(total), total, mapped=False)], page)
        self.segments.append(segment)
        return segment, 0

    def map(self, segment: Segment, hole: Piece, wanted: int) -> bool:
        wanted = -(-wanted // segment.page) * segment.page
        if self.capacity_bytes is not None and self.reserved + wanted > self.capacity_bytes:
            return False
        if wanted < hole.size:
            at = segment.pieces.index(hole)
            segment.pieces.insert(at + 1, Piece(hole.address + wanted, hole.size - wanted, mapped=False))
        hole.size, hole.mapped, hole.freed_at_search = wanted, True, self.searches[segment.small]
        segment.join_neighbours()
        self.took(wanted)
        return True

    def unmap(self, segment: Segment, piece: Piece) -> None:
        base = segment.pieces[0].address
        pages = [
            address
            for address in range(
                base + (piece.address - base) // segment.page * segment.page,
                piece.address + piece.size,
                segment.page,
            )
            if address >= piece.address and address + segment.page <= piece.address + piece.size
        ]
        if not pages:
            return
        first, end, stop = pages[0], pages[-1] + segment.page, piece.address + piece.size
        now = self.searches[segment.small]
        cut = [
            Piece(piece.address, first - piece.address, freed_at_search=now),
            Piece(first, end - first, mapped=False),
        ]
        cut.append(Piece(end, stop - end, freed_at_search=now))
        at = segment.pieces.index(piece)
        segment.pieces[at : at + 1] = [each for each in cut if each.size]
        segment.join_neighbours()
        self.reserved -= end - first
        self.device_frees += 1
        if all(not each.mapped for each in segment.pieces):
            self.segments.remove(segment)

    # Freeing

    def free(self, segment: Segment, piece: Piece, op: int, ready_op: int) -> None:
        if ready_op > op:
            self.waiting.append((ready_op, segment, piece))
        else:
            self.make_free(segment, piece)

    def finish(self, op: int) -> None:
        ready = [each for each in self.waiting if each[0] <= op]
        self.waiting = [each for each in self.waiting if each[0] > op]
        for _, segment, piece in ready:
            self.make_free(segment, piece)

    def make_free(self, segment: Segment, piece: Piece) -> None:
        piece.used, piece.freed_at_search = False, self.searches[segment.small]
        segment.join_neighbours()

    def give_back(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self.reserved -= segment.pieces[0].size
        self.device_frees += 1

    def empty_cache(self) -> None:
        self.finish(NO_END)
        for small in (False, True):
            for segment, piece in list(self.pieces(small)):
                if segment.page:
                    self.unmap(segment, piece)
                elif len(segment.pieces) == 1:
                    self.give_back(segment)

    def release_oversize(self, size: int, small: bool, stream: int) -> bool:
        if self.max_split_bytes is None:
            return False
        wanted = max(size, self.max_split_bytes)
        free = list(self.pieces(small, stream))
        enough = [segment for segment, piece in free if piece.size >= wanted]
        if enough and not enough[0].page:
            self.give_back(enough[0])
            return True
        released = 0
        for segment, piece in reversed(
            [each for each in free if self.max_split_bytes <= each[1].size < wanted]
        ):
            if released >= wanted:
                break
            if not segment.page:
                released += piece.size
                self.give_back(segment)
        return released >= wanted

    def collect(self) -> None:
        if not self.collects() or self.allowed_bytes is None:
            return
        threshold = int(self.garbage_collection_threshold * self.allowed_bytes)
        target = self.reserved - threshold
        if target <= 0:
            return
        idle = [each for each in self.pieces(small=False) if len(each[0].pieces) == 1 and not each[0].page]
        age = {id(piece): self.searches[False] - piece.freed_at_search for _, piece in idle}
        while target > 0 and idle:
            mean = sum(age[id(piece)] for _, piece in idle) / len(idle)
            for segment, piece in [each for each in idle if age[id(each[1])] >= mean]:
                target -= piece.size
                self.give_back(segment)
            idle = [each for each in idle if age[id(each[1])] < mean]

    def largest_free(self) -> int:
        return max((piece.size for small in (False, True) for _, piece in self.pieces(small)), default=0)

    def check(self) -> None:
        """Check the invariants."""
        spans = sorted((piece.address, piece.size) for segment in self.segments for piece in segment.pieces)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        mapped = sum(piece.size for segment in self.segments for piece in segment.pieces if piece.mapped)
        assert mapped == self.reserved


Event = tuple[int, int, int, int, int, int]


def replay(events: list[Event], first_of_step: list[int], **settings: object) -> Outcome:
    """Replay (action, storage, bytes, stream, op, ready_op) rows; failed allocations are caught errors."""
    allocator, out = Allocator(**settings), Outcome()  # type: ignore[arg-type]
    live: dict[int, tuple[Segment, Piece] | None] = {}
    allocated = 0
    for number, (action, storage, n_bytes, stream, op, ready_op) in enumerate(events):
        if number in first_of_step:
            out.step_reserved_bytes.append(allocator.reserved)
            out.step_allocated_bytes.append(allocated)
            allocator.highest = allocator.reserved
        address = -1
        if action == 2:
            allocator.empty_cache()
        elif action == 1:
            held = live.pop(storage)
            if held is not None:
                allocated -= held[1].size
                allocator.free(*held, op, ready_op)
        elif n_bytes == 0:
            live[storage] = None
        else:
            live[storage] = got = allocator.allocate(n_bytes, stream, op)
            if got is None:
                out.ooms += 1
                if out.ooms == 1:
                    out.first_oom = (number, n_bytes, allocated, allocator.reserved, allocator.largest_free())
            else:
                allocated += got[1].size
                address = got[1].address
        allocator.check()
        if allocator.highest > out.peak_reserved_bytes:
            out.peak_reserved_bytes, out.peak_event, out.allocated_at_peak_bytes = (
                allocator.highest,
                number,
                allocated,
            )
        out.step_reserved_bytes[-1] = max(out.step_reserved_bytes[-1], allocator.highest)
        out.step_allocated_bytes[-1] = max(out.step_allocated_bytes[-1], allocated)
        out.peak_allocated_bytes = max(out.peak_allocated_bytes, allocated)
        out.reserved_bytes.append(allocator.reserved)
        out.allocated_bytes.append(allocated)
        out.address.append(address)
    out.device_allocs, out.device_frees, out.retries = (
        allocator.device_allocs,
        allocator.device_frees,
        allocator.retries,
    )
    return out
