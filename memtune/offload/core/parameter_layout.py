"""Layouts of offloaded parameters: pages and their frames (Angel-PTM), and chunks (PatrickStar, Elixir).

A page has a fixed size and is the unit that moves. A parameter is a list of *spans*, one on each of its
pages. The next parameter begins on the last page of the one before unless two parameters share that page
already, so a page holds two parameters at most and less than one page per parameter is wasted. On the host
the pages are consecutive. On the device each page has one *frame*, always the same. Frames are a ring, filled
in the order of use: consecutive pages are adjacent there, and a parameter is contiguous memory although some
of its pages may have been evicted for others.

Source: the pages of Angel-PTM (Nie et al. 2023, VLDB 16(12), arXiv:2303.02868, section 4); frames replace its
merging of pages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from memtune.program import I32, Mask, Residency, Units, order_of_use


class Span(NamedTuple):
    """The part of a parameter on one page."""

    page: int
    offset: int
    """Byte of the page at which it begins."""
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Pages:
    """Place of each parameter and frame of each page; parameters are in the order of use.

    Equal arguments of `paged` return the same object.
    """

    page_bytes: int
    frames: int
    n_bytes: Units
    """(parameters,) bytes of each one."""
    block: Units
    """(parameters,) block of each one, ascending."""
    first: Units
    """(parameters,) page on which each one begins, ascending."""
    offset: Units
    """(parameters,) byte of that page at which it begins."""
    frame: Units
    """(pages,) frame of each page on the device."""
    filled: Units
    """(pages,) bytes of each page that parameters occupy, from its beginning."""
    of_block: tuple[Units, ...]
    """The pages of each block's parameters."""
    gathered: bool = False
    """Pages hold a rank's rows, in the order that `residency.order_of_use` defines for FSDP2."""

    @property
    def count(self) -> int:
        """Number of pages."""
        return len(self.frame)

    @property
    def frame_bytes(self) -> int:
        """Bytes of all frames."""
        return self.frames * self.page_bytes

    def spans(self, parameter: int) -> tuple[Span, ...]:
        """Return the spans of a parameter, page by page."""
        page, at, left = self.first[parameter], self.offset[parameter], self.n_bytes[parameter]
        found = []
        while left:
            found.append(Span(page, at, min(left, self.page_bytes - at)))
            left -= found[-1].n_bytes
            page, at = page + 1, 0
        return tuple(found)

    def uses(self) -> tuple[Units, ...]:
        """Return the pages of each moment of a step."""
        of_block = (*self.of_block, ())  # the last one is indexed by -1: no block
        return tuple(of_block[block] for block in order_of_use(len(self.of_block), gathered=self.gathered))


@functools.lru_cache(maxsize=256)
def paged(n_bytes: Units, block: Units, page_bytes: int, frames: int, gathered: bool = False) -> Pages:
    """Place parameters on pages, and pages in frames.

    Args:
        n_bytes: Bytes of each parameter, in the order of use; all positive.
        block: The block of each parameter, ascending from 0.
        page_bytes: Bytes of a page.
        frames: Number of pages that the device holds.
        gathered: Pages hold a rank's rows.

    Raises:
        ValueError: Two pages of one block would use one frame.
    """
    first: list[int] = []
    offset: list[int] = []
    frame: list[int] = []
    filled: list[int] = []
    # Of the last page: its first free byte, its number of parameters, and its frame in an endless ring.
    at, sharers, place = page_bytes, 0, -1
    of_block: list[list[int]] = [[] for _ in range(block[-1] + 1)]
    for size, of in zip(n_bytes, block, strict=True):
        shared = min(size, page_bytes - at) if sharers == 1 else 0  # bytes on the previous parameter's page
        begins, count = place if shared else place + 1, -(-(size - shared) // page_bytes)
        if begins // frames != (place + count) // frames:
            # A parameter is contiguous memory, so it does not wrap around the ring: it starts at frame 0.
            shared, begins, count = 0, (begins // frames + 1) * frames, -(-size // page_bytes)
        first.append(len(frame) - 1 if shared else len(frame))
        offset.append(at if shared else 0)
        if shared:
            at, sharers = at + shared, 2
            filled[-1] = at
        if count:
            start = place + 1 if shared else begins
            frame += [each % frames for each in range(start, start + count)]
            place, at, sharers = start + count - 1, size - shared - (count - 1) * page_bytes, 1
            filled += [page_bytes] * (count - 1) + [at]
        mine = of_block[of]
        mine += range(max(first[-1], mine[-1] + 1 if mine else 0), len(frame))
    # All pages of a block are in use at the same time.
    if any(len({frame[page] for page in pages}) < len(pages) for pages in of_block):
        raise ValueError(f"{frames} frames of {page_bytes} bytes do not hold a block")
    ends = tuple(map(tuple, of_block))
    of_page = tuple(frame), tuple(filled)
    return Pages(page_bytes, frames, n_bytes, block, tuple(first), tuple(offset), *of_page, ends, gathered)


class Loads(NamedTuple):
    """Loads of pages, one row each, in the order of need; all columns but `page` ascend."""

    page: I32
    opens: I32
    """The first moment in which the load may run: all uses of the frame's previous page are over."""
    needed: I32
    """The moment that uses the page."""


@functools.lru_cache(maxsize=64)
def loads_of(pages: Pages) -> Loads:
    """Return all loads of a step: a page is loaded where its frame had another page since its last use."""
    # `opens` is made monotone, so that pages can be loaded in this order.
    frame = np.asarray(pages.frame, np.int32)
    there, last = np.full(pages.frames, -1, np.int32), np.full(pages.frames, -1, np.int32)
    found: list[tuple[I32, I32, I32]] = []
    for moment, used in enumerate(pages.uses()):
        # Backward needs the last page of a block first.
        page = np.asarray(used if moment < len(pages.of_block) else used[::-1], np.int32)
        place = frame[page]
        comes = there[place] != page
        opens = last[place[comes]] + 1
        found.append((page[comes], opens.astype(np.int32), np.full(len(opens), moment, np.int32)))
        there[place], last[place] = page, moment
    page, opens, needed = (np.concatenate(column) for column in zip(*found, strict=True))
    return Loads(page, np.maximum.accumulate(opens), needed)


@functools.lru_cache(maxsize=64)
def timeline(pages: Pages, prefetch: Units) -> Residency:
    """Return the pages that are loaded when each moment begins, those that it uses first.

    A load evicts the page that its frame had.

    Args:
        pages: Layout of the offloaded parameters.
        prefetch: (moments,) pages that may be loaded during each moment's computation: those whose use is
            nearest, as soon as their frames are free. A page that is not resident by the moment that uses it
            is loaded when that begins.

    Raises:
        ValueError: `prefetch` is for another number of moments.
    """
    moments = 2 * len(pages.of_block)
    if len(prefetch) != moments:
        raise ValueError(f"a schedule of {len(prefetch)} moments for {moments}")
    # Loads run in one order: the next one to come is always the one whose use is nearest.
    loads, row = loads_of(pages), 0
    order, comes = loads.page.tolist(), []
    for (latest, open_), most in zip(until(loads, moments), prefetch, strict=True):
        first, row = row, max(row, latest)
        waited, row = row, max(row, min(row + max(most, 0), open_))
        comes.append((*sorted(order[first:waited]), *sorted(order[waited:row])))
    return Residency(((),) * moments + (tuple(range(pages.count)),), (*comes, ()))


def until(loads: Loads, moments: int) -> list[tuple[int, int]]:
    """Return for each moment how many loads are needed up to it, and how many may have run."""
    each = np.arange(moments)
    needed, opens = (
        np.searchsorted(column, each, side="right").tolist() for column in (loads.needed, loads.opens)
    )
    return list(zip(needed, opens, strict=True))


@functools.lru_cache(maxsize=64)
def _joined(pages: Pages) -> Mask:
    """Return (pages,) True where a page is adjacent to the next one both in host memory and in frames."""
    frame, filled = np.asarray(pages.frame), np.asarray(pages.filled)
    found: Mask = np.append((frame[1:] == frame[:-1] + 1) & (filled[:-1] == pages.page_bytes), False)
    return found


def runs(pages: Pages, wanted: I32) -> tuple[I32, I32]:
    """Return the first and last page of each run of ascending `wanted` pages that one copy can move."""
    # Pages of a run are adjacent in host memory and in frames.
    ends = np.append((wanted[1:] != wanted[:-1] + 1) | ~_joined(pages)[wanted[:-1]], True)[: len(wanted)]
    starts = np.append(True, ends[:-1])[: len(wanted)]
    return wanted[starts], wanted[ends]


# -- chunks --------------------------------------------------------------------------------------------------

ALIGNMENT: Final = 256
"""Alignment of each parameter in bytes: kernels choose by it, and bits must not depend on the place."""


def aligned(n_bytes: int) -> int:
    """Return the bytes that a parameter of `n_bytes` takes in a chunk."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Chunks:
    """Place of each parameter; parameters are in the order of use.

    Equal arguments of `pack` return the same object.
    """

    chunk_bytes: int
    chunk: Units
    """(parameters,) chunk of each one, ascending."""
    offset: Units
    """(parameters,) byte in its chunk at which each one begins."""
    of_block: tuple[Units, ...]
    """The chunks of each block's parameters."""
    gathered: bool = False
    """Chunks hold a rank's rows, in the order that `residency.order_of_use` defines for FSDP2."""

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunk[-1] + 1

    @property
    def n_bytes(self) -> int:
        """Bytes of all chunks, including unused space."""
        return self.count * self.chunk_bytes

    def uses(self, prefetch: int = 0) -> tuple[Units, ...]:
        """Return the chunks of each moment of a step, with those of the `prefetch` moments that follow it."""
        return _uses(self, prefetch)


@functools.lru_cache(maxsize=1024)
def _uses(chunks: Chunks, prefetch: int) -> tuple[Units, ...]:
    order = order_of_use(len(chunks.of_block), gathered=chunks.gathered)
    of_block = (*chunks.of_block, ())  # the last one is indexed by -1: no block
    return tuple(
        tuple(dict.fromkeys(chunk for block in order[at : at + 1 + prefetch] for chunk in of_block[block]))
        for at in range(len(order))
    )


@functools.lru_cache(maxsize=512)
def pack(n_bytes: Units, block: Units, chunk_bytes: int, gathered: bool = False) -> Chunks:
    """Place parameters in chunks one after the other; a new chunk begins where the current one has no space.

    Args:
        n_bytes: Bytes of each parameter, in the order of use.
        block: The block of each parameter, ascending from 0.
        chunk_bytes: At least the bytes of the largest parameter.
        gathered: Chunks hold a rank's rows.

    Raises:
        ValueError: A parameter is larger than a chunk.
    """
    if max(n_bytes) > chunk_bytes:
        raise ValueError(f"a parameter of {max(n_bytes)} bytes has no place in a chunk of {chunk_bytes}")
    at, filled, chunk, offset = 0, 0, [], []
    for size in n_bytes:
        # A parameter never spans two chunks: it would be contiguous in neither.
        if filled + size > chunk_bytes:
            at, filled = at + 1, 0
        chunk.append(at)
        offset.append(filled)
        filled += size
    of_block: list[list[int]] = [[] for _ in range(block[-1] + 1)]
    for index, each in zip(block, chunk, strict=True):
        if each not in of_block[index][-1:]:
            of_block[index].append(each)
    return Chunks(chunk_bytes, tuple(chunk), tuple(offset), tuple(map(tuple, of_block)), gathered)
