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
        return tuple(self.of_block[block] for block in order_of_use(len(self.of_block)))


@functools.lru_cache(maxsize=256)
def paged(n_bytes: Units, block: Units, page_bytes: int, frames: int) -> Pages:
    """Parameters into pages, and pages to frames.

    Args:
        n_bytes: What each parameter takes, in the order of use; more than nothing.
        block: The block of each parameter, ascending from 0.
        page_bytes: Of a page.
        frames: Pages that the device holds.

    Raises:
        ValueError: Two pages of one block would come to one frame.
    """
    first: list[int] = []
    offset: list[int] = []
    frame: list[int] = []
    filled: list[int] = []
    at, lodgers, place = page_bytes, 0, -1  # on the last page: where it is free, whose it is, its frame in a ring without end
    pages_of: list[set[int]] = [set() for _ in range(block[-1] + 1)]
    for size, of in zip(n_bytes, block, strict=True):
        shares = lodgers == 1 and at < page_bytes
        begins = place if shares else place + 1
        rest = size - (page_bytes - at) if shares else size
        last = place + -(-max(rest, 0) // page_bytes)
        if begins // frames != last // frames:  # a parameter is one piece of memory, so it does not go round the ring
            shares, begins, rest = False, (begins // frames + 1) * frames, size
        if not shares:
            at = 0
            frame.append(begins % frames)
            filled.append(0)
            place = begins
        lodgers = lodgers + 1 if shares else 1
        first.append(len(frame) - 1)
        offset.append(at)
        while size:
            if at == page_bytes:
                at, lodgers, place = 0, 1, place + 1
                frame.append(place % frames)
                filled.append(0)
            part = min(size, page_bytes - at)
            at, size = at + part, size - part
            filled[-1] = at
        pages_of[of].update(range(first[-1], len(frame)))
    of_block = tuple(tuple(sorted(pages)) for pages in pages_of)
    if any(len({frame[page] for page in pages}) < len(pages) for pages in of_block):
        raise ValueError(f"{frames} frames of {page_bytes} bytes do not hold a block")
    return Pages(page_bytes, frames, n_bytes, tuple(first), tuple(offset), tuple(frame), tuple(filled), of_block)


class Load(NamedTuple):
    """A page that comes in once."""

    page: int
    opens: int
    """The first moment in which it may: all uses of the page that was in its frame are over."""
    needed: int
    """The moment that uses it."""


@functools.lru_cache(maxsize=64)
def loads_of(pages: Pages) -> tuple[Load, ...]:
    """All of a step, in the order of need: a page comes in when another one has been in its frame since its last use.

    Both `opens` and `needed` ascend, so pages can come in in this order.
    """
    there: dict[int, int] = {}
    last: dict[int, int] = {}
    found: list[Load] = []
    opens = 0
    for moment, used in enumerate(pages.uses()):
        for page in used if moment < len(pages.of_block) else reversed(used):
            frame = pages.frame[page]
            if there.get(frame) != page:
                opens = max(opens, last.get(frame, -1) + 1)
                found.append(Load(page, opens, moment))
                there[frame] = page
            last[frame] = moment
    return tuple(found)


@functools.lru_cache(maxsize=64)
def timeline(pages: Pages, ahead: Units) -> Residency:
    """Which page comes in when each moment begins, and which goes for it.

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
    there: dict[int, int] = {}
    drops: list[Units] = []
    comes: list[Units] = []
    for moment, most in enumerate(ahead):
        first = row
        while row < len(loads) and loads[row].needed == moment:
            row += 1
        until = min(row + max(most, 0), len(loads))
        while row < until and loads[row].opens <= moment:
            row += 1
        now = [load.page for load in loads[first:row]]
        drops.append(tuple(there[pages.frame[page]] for page in now if pages.frame[page] in there))
        there.update((pages.frame[page], page) for page in now)
        comes.append(tuple(now))
    return Residency((*drops, tuple(sorted(there.values()))), (*comes, ()))
