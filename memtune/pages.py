"""Parameters in pages of one size, in the order in which they are used, and the frames of the device that pages come to.

A page is the unit that moves. A parameter is a list of *spans*, one on each of its pages: it fills pages from the one on which it
begins, the next parameter begins on its last page if no other lies there, so a page holds two parameters at most and less than a
page per parameter is wasted. On the host the pages lie one after the other. On the device each page has a *frame* of its own that
it always comes to; frames are a ring, filled in the order of use, so that pages which follow one another lie side by side and a
parameter is one piece of memory wherever it is, while some of its pages may have given way to others.

Source: the pages of Angel-PTM (Nie et al. 2023, VLDB 16(12), arXiv:2303.02868, section 4); frames stand for its merging of pages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.program import I32
from memtune.residency import Residency, Units, order_of_use


class Span(NamedTuple):
    """The part of a parameter that lies on one page."""

    page: int
    offset: int
    """Byte of the page at which it begins."""
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Pages:
    """Where each parameter lies; parameters are in the order of use. Equal arguments of `paged` give one object."""

    page_bytes: int
    frames: int
    n_bytes: Units
    """(parameters,) bytes of each one."""
    block: Units
    """(parameters,) whose each one is, ascending."""
    first: Units
    """(parameters,) page on which each one begins, ascending."""
    offset: Units
    """(parameters,) byte of that page at which it begins."""
    frame: Units
    """(pages,) where on the device each page comes to."""
    filled: Units
    """(pages,) bytes of each page that parameters lie in, from its beginning."""
    of_block: tuple[Units, ...]
    """The pages that each block's parameters lie on."""
    gathered: bool = False
    """They hold a rank's rows, used as `residency.order_of_use` says."""

    @property
    def count(self) -> int:
        """Number of pages."""
        return len(self.frame)

    @property
    def frame_bytes(self) -> int:
        """Bytes of all frames."""
        return self.frames * self.page_bytes

    def spans(self, parameter: int) -> tuple[Span, ...]:
        """The parts of a parameter, page by page."""
        page, at, left = self.first[parameter], self.offset[parameter], self.n_bytes[parameter]
        found = []
        while left:
            found.append(Span(page, at, min(left, self.page_bytes - at)))
            left -= found[-1].n_bytes
            page, at = page + 1, 0
        return tuple(found)

    def uses(self) -> tuple[Units, ...]:
        """The pages of each moment of a step."""
        of_block = (*self.of_block, ())  # the last serves -1
        return tuple(of_block[block] for block in order_of_use(len(self.of_block), gathered=self.gathered))


@functools.lru_cache(maxsize=256)
def paged(n_bytes: Units, block: Units, page_bytes: int, frames: int, gathered: bool = False) -> Pages:
    """Parameters into pages, and pages to frames.

    Args:
        n_bytes: What each parameter takes, in the order of use; more than nothing.
        block: The block of each parameter, ascending from 0.
        page_bytes: Of a page.
        frames: Pages that the device holds.
        gathered: They are a rank's rows.

    Raises:
        ValueError: Two pages of one block would come to one frame.
    """
    first: list[int] = []
    offset: list[int] = []
    frame: list[int] = []
    filled: list[int] = []
    at, lodgers, place = page_bytes, 0, -1  # on the last page: where it is free, whose it is, its frame in a ring without end
    of_block: list[list[int]] = [[] for _ in range(block[-1] + 1)]
    for size, of in zip(n_bytes, block, strict=True):
        shared = min(size, page_bytes - at) if lodgers == 1 else 0
        begins, count = place if shared else place + 1, -(-(size - shared) // page_bytes)
        if begins // frames != (place + count) // frames:  # one piece of memory does not go round the ring
            shared, begins, count = 0, (begins // frames + 1) * frames, -(-size // page_bytes)
        first.append(len(frame) - 1 if shared else len(frame))
        offset.append(at if shared else 0)
        if shared:
            at, lodgers = at + shared, 2
            filled[-1] = at
        if count:
            start = place + 1 if shared else begins
            frame += [each % frames for each in range(start, start + count)]
            place, at, lodgers = start + count - 1, size - shared - (count - 1) * page_bytes, 1
            filled += [page_bytes] * (count - 1) + [at]
        mine = of_block[of]
        mine += range(max(first[-1], mine[-1] + 1 if mine else 0), len(frame))
    if any(len({frame[page] for page in pages}) < len(pages) for pages in of_block):
        raise ValueError(f"{frames} frames of {page_bytes} bytes do not hold a block")
    ends = tuple(map(tuple, of_block))
    places = (tuple(each) for each in (first, offset, frame, filled))
    return Pages(page_bytes, frames, n_bytes, block, *places, ends, gathered)


class Loads(NamedTuple):
    """Pages that come in, once each, in the order of need; all columns but `page` ascend."""

    page: I32
    opens: I32
    """The first moment in which it may: all uses of the page that was in its frame are over."""
    needed: I32
    """The moment that uses it."""


@functools.lru_cache(maxsize=64)
def loads_of(pages: Pages) -> Loads:
    """All of a step: a page comes in when another one has been in its frame since its last use.

    None is said to open before one that is needed earlier, so that pages can come in in this order.
    """
    frame = np.asarray(pages.frame, np.int32)
    there, last = np.full(pages.frames, -1, np.int32), np.full(pages.frames, -1, np.int32)
    found: list[tuple[I32, I32, I32]] = []
    for moment, used in enumerate(pages.uses()):
        page = np.asarray(used if moment < len(pages.of_block) else used[::-1], np.int32)
        place = frame[page]
        comes = there[place] != page
        opens = last[place[comes]] + 1
        found.append((page[comes], opens.astype(np.int32), np.full(len(opens), moment, np.int32)))
        there[place], last[place] = page, moment
    page, opens, needed = (np.concatenate(column) for column in zip(*found, strict=True))
    return Loads(page, np.maximum.accumulate(opens), needed)


@functools.lru_cache(maxsize=64)
def timeline(pages: Pages, ahead: Units) -> Residency:
    """Which page comes in when each moment begins, first those that it uses; what was in its frame goes for it.

    Args:
        pages: What comes and goes.
        ahead: (moments,) pages that may come in beside each moment's computation; those whose need is nearest do, as soon as
            their frames are free. What is not there by the moment that needs it comes in when that begins.

    Raises:
        ValueError: `ahead` is for another number of moments.
    """
    moments = 2 * len(pages.of_block)
    if len(ahead) != moments:
        raise ValueError(f"a schedule of {len(ahead)} moments for {moments}")
    loads, row = loads_of(pages), 0
    order, comes = loads.page.tolist(), []
    for (late, open_), most in zip(until(loads, moments), ahead, strict=True):
        first, row = row, max(row, late)
        waited, row = row, max(row, min(row + max(most, 0), open_))
        comes.append((*sorted(order[first:waited]), *sorted(order[waited:row])))
    return Residency(((),) * moments + (tuple(range(pages.count)),), (*comes, ()))


def until(loads: Loads, moments: int) -> list[tuple[int, int]]:
    """Of each moment, how many loads are needed up to it, and how many may have come in."""
    each = np.arange(moments)
    needed, opens = (np.searchsorted(column, each, side="right").tolist() for column in (loads.needed, loads.opens))
    return list(zip(needed, opens, strict=True))


@functools.lru_cache(maxsize=64)
def _joined(pages: Pages) -> npt.NDArray[np.bool_]:
    """(pages,) whether each lies side by side with the next one in host memory and in frames."""
    frame, filled = np.asarray(pages.frame), np.asarray(pages.filled)
    found: npt.NDArray[np.bool_] = np.append((frame[1:] == frame[:-1] + 1) & (filled[:-1] == pages.page_bytes), False)
    return found


def runs(pages: Pages, wanted: I32) -> tuple[I32, I32]:
    """First and last page of each run of `wanted` pages, ascending, that lie side by side in host memory and in frames."""
    ends = np.append((wanted[1:] != wanted[:-1] + 1) | ~_joined(pages)[wanted[:-1]], True)[: len(wanted)]
    starts = np.append(True, ends[:-1])[: len(wanted)]
    return wanted[starts], wanted[ends]
