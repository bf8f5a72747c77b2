"""How many frames the device has for pages, and beside which moment each page comes in: decided for Angel-PTM."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from memtune.pages import Pages, loads_of, paged, timeline, until
from memtune.residency import Units


@dataclass(frozen=True)
class PagePlan:
    """Pages in frames, and the pages that come in beside each moment's computation."""

    pages: Pages
    ahead: Units
    cached: int = 0
    """So many parameters of blocks, the first ones in the order of use, are on no page: they stay with their optimizer state."""


def in_frames(n_bytes: Units, block: Units, page_bytes: int, room_bytes: int | None, gathered: bool = False) -> Pages:
    """The most frames that `room_bytes` holds; None: as many as two neighbouring blocks need, so that one comes in ahead.

    Args:
        n_bytes: What each parameter takes, in the order of use.
        block: The block of each, ascending from 0.
        page_bytes: Of a page.
        room_bytes: Of the device that frames may take.
        gathered: As in `paged`.

    Returns:
        Never more frames than pages. Where no number of frames in the room holds every block, the fewest that do.
    """
    sizes = [0] * (block[-1] + 1)
    for size, index in zip(n_bytes, block, strict=True):
        sizes[index] += size
    least, like = -(-max(sizes) // page_bytes), (n_bytes, block, page_bytes, gathered)
    all_pages = count_pages(n_bytes, block, page_bytes)
    if room_bytes is None:
        both = max((a + b for a, b in itertools.pairwise(sizes)), default=sizes[0])
        return _first_that_holds(*like, range(min(-(-both // page_bytes) + 1, all_pages), all_pages + 1))
    most = min(room_bytes // page_bytes, all_pages)
    try:
        return _first_that_holds(*like, range(most, least - 1, -1))
    except ValueError:
        return _first_that_holds(*like, range(max(most + 1, least), all_pages + 1))


def count_pages(n_bytes: Units, block: Units, page_bytes: int) -> int:
    """Pages where each has a frame of its own."""
    return paged(n_bytes, block, page_bytes, 2 * len(n_bytes) + sum(n_bytes) // page_bytes).count


def _first_that_holds(n_bytes: Units, block: Units, page_bytes: int, gathered: bool, frames: range) -> Pages:
    for each in frames:
        try:
            return paged(n_bytes, block, page_bytes, each, gathered)
        except ValueError:
            continue
    raise ValueError(f"no number of frames from {frames.start} on holds every block")


def schedule(pages: Pages, compute_s: Sequence[float], load_s: float) -> Units:
    """(moments,) pages that come in beside each moment's computation, so that least is waited for.

    Args:
        pages: What comes in; `loads_of` says when it may and when it must.
        compute_s: (moments,) seconds of each moment's computation.
        load_s: Seconds that a page takes to come in.

    A moment lasts until its computation and what comes in beside it are over, and then waits for what the next one needs. So a
    moment has room for as many pages as its computation hides; one more costs less than waiting for it later, further ones cost
    the same. Room is taken in the order of that cost, as long as one more page comes in so (pages that can come in so are the
    independent sets of a transversal matroid, in which that is optimal). Which pages these are, the one whose need is nearest
    first, follows in `timeline`.

    Source: the unified scheduler of Angel-PTM (arXiv:2303.02868, section 5), which takes page-ins in the order of need and pulls
    each one as early as memory allows; here time is taken into account as well.
    """
    loads = loads_of(pages)
    bounds = until(loads, len(compute_s))
    parts = [divmod(each, load_s) for each in compute_s]
    room = [int(whole) for whole, _ in parts]
    placed = sum(_come_in_ahead(bounds, room))
    for _, moment in sorted((-rest, moment) for moment, (_, rest) in enumerate(parts) if rest > 0):
        if placed == len(loads.page):
            break
        room[moment] += 1
        more = sum(_come_in_ahead(bounds, room))
        if more == placed:
            room[moment] -= 1
        placed = more
    return tuple(_come_in_ahead(bounds, room))


def _come_in_ahead(bounds: Sequence[tuple[int, int]], room: Sequence[int]) -> list[int]:
    """(moments,) loads in each between their opening and their need, the most that have `room`; `bounds` as of `until`."""
    found, row = [], 0
    for (late, open_), free in zip(bounds, room, strict=True):
        row = max(row, late)
        found.append(max(min(free, open_ - row), 0))
        row += found[-1]
    return found


def lasts_s(pages: Pages, ahead: Units, compute_s: Sequence[float], load_s: float) -> float:
    """Seconds from the first moment's beginning to the last one's end, with `ahead` pages beside each moment.

    Args:
        pages: What comes in.
        ahead: As `schedule` gives it; all zeros: just in time.
        compute_s: (moments,) seconds of each moment's computation.
        load_s: Seconds that a page takes to come in.
    """
    uses, total = pages.uses(), 0.0
    for used, comes, seconds in zip(uses, timeline(pages, ahead).loads, compute_s, strict=False):
        late = sum(page in used for page in comes)
        total += late * load_s + max(seconds, (len(comes) - late) * load_s)
    return total
