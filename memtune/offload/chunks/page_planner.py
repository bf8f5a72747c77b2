"""Plan the frames of Angel-PTM's pages, and the moment that each page's prefetch overlaps with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from memtune.offload.core import Pages, loads_of, paged, until
from memtune.program import Units


@dataclass(frozen=True)
class PagePlan:
    """Pages in frames, and the number of pages prefetched during each moment's computation."""

    pages: Pages
    prefetch: Units
    cached: int = 0
    """Number of block parameters on no page: the first in use, resident with their optimizer state."""


def in_frames(
    n_bytes: Units, block: Units, page_bytes: int, room_bytes: int | None, gathered: bool = False
) -> Pages:
    """Return a layout with the most frames that `room_bytes` holds.

    None: as many frames as two neighbouring blocks need, so that one can be prefetched.

    Args:
        n_bytes: Bytes of each parameter, in the order of use.
        block: The block of each, ascending from 0.
        page_bytes: Bytes of a page.
        room_bytes: Bytes of the device that frames may take.
        gathered: As in `paged`.

    Returns:
        Never more frames than pages. If no number of frames within `room_bytes` holds every block, the fewest
        that do.
    """
    sizes = [0] * (block[-1] + 1)
    for size, index in zip(n_bytes, block, strict=True):
        sizes[index] += size
    least, like = -(-max(sizes) // page_bytes), (n_bytes, block, page_bytes, gathered)
    all_pages = count_pages(n_bytes, block, page_bytes)
    if room_bytes is None:
        # One more than the bytes need: a block may begin and end in the middle of a page.
        both = max((a + b for a, b in itertools.pairwise(sizes)), default=sizes[0])
        return _first_that_holds(*like, range(min(-(-both // page_bytes) + 1, all_pages), all_pages + 1))
    most = min(room_bytes // page_bytes, all_pages)
    try:
        # Most first. Only if none of them holds every block, frames exceed the room.
        return _first_that_holds(*like, range(most, least - 1, -1))
    except ValueError:
        return _first_that_holds(*like, range(max(most + 1, least), all_pages + 1))


def count_pages(n_bytes: Units, block: Units, page_bytes: int) -> int:
    """Return the number of pages if each has a frame of its own."""
    return paged(n_bytes, block, page_bytes, 2 * len(n_bytes) + sum(n_bytes) // page_bytes).count


@functools.lru_cache(maxsize=64)  # `paged` keeps no refusal
def _first_that_holds(n_bytes: Units, block: Units, page_bytes: int, gathered: bool, frames: range) -> Pages:
    for each in frames:
        try:
            return paged(n_bytes, block, page_bytes, each, gathered)
        except ValueError:
            continue
    raise ValueError(f"no number of frames from {frames.start} on holds every block")


def schedule(pages: Pages, compute_s: Sequence[float], load_s: float) -> Units:
    """Return (moments,) pages to prefetch during each moment's computation, for the shortest step.

    Args:
        pages: Layout; `loads_of` bounds the time of each load.
        compute_s: (moments,) seconds of each moment's computation.
        load_s: Seconds that the load of a page takes.

    Source: the unified scheduler of Angel-PTM (arXiv:2303.02868, section 5), which takes page-ins in the
    order of need and pulls each one as early as memory allows; here time is taken into account as well.
    """
    # A moment lasts until its computation and its prefetches are over, and then waits for the pages
    # that the next one needs. So a moment hides as many loads as its computation covers; one more costs
    # less than waiting for it later, further ones cost the same. Loads are assigned in the order of
    # that cost as long as one more page can be prefetched (sets of such pages are the independent sets
    # of a transversal matroid, in which greedy is optimal). `timeline` then chooses the pages: the one
    # whose use is nearest first.
    loads = loads_of(pages)
    bounds = until(loads, len(compute_s))
    parts = [divmod(each, load_s) for each in compute_s]
    room = [int(whole) for whole, _ in parts]
    placed = sum(_prefetched(bounds, room))
    for _, moment in sorted((-rest, moment) for moment, (_, rest) in enumerate(parts) if rest > 0):
        if placed == len(loads.page):
            break
        room[moment] += 1
        more = sum(_prefetched(bounds, room))
        if more == placed:
            room[moment] -= 1
        placed = more
    return tuple(_prefetched(bounds, room))


def _prefetched(bounds: Sequence[tuple[int, int]], room: Sequence[int]) -> list[int]:
    """Return (moments,) the most loads between opening and need, with at most `room` in each moment."""
    # `bounds` is a result of `until`.
    found, row = [], 0
    for (latest, open_), free in zip(bounds, room, strict=True):
        row = max(row, latest)
        found.append(max(min(free, open_ - row), 0))
        row += found[-1]
    return found
