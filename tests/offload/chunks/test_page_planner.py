"""The schedule of page moves, against every placement of every move; frames against the room there is."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import example, given, settings, strategies as st
from support.chunk_packings import Sizes, models
from support.page_time import duration_s

from memtune.offload.chunks.page_planner import in_frames, schedule
from memtune.offload.core.parameter_layout import Pages, loads_of, paged


def windows(pages: Pages) -> list[range]:
    """Return the moments in which each page may be loaded."""
    loads = loads_of(pages)
    return [
        range(min(opens, needed), needed + 1)
        for opens, needed in zip(loads.opens.tolist(), loads.needed.tolist(), strict=True)
    ]


def fewest_s(pages: Pages, compute_s: list[int], load_s: int) -> float:
    """Return the shortest duration over all placements of page loads."""
    best = float("inf")
    for moments in product(*windows(pages)):
        overlapped, waited = [0] * len(compute_s), 0
        for needed, moment in zip(loads_of(pages).needed.tolist(), moments, strict=True):
            if moment == needed:
                waited += load_s
            else:
                overlapped[moment] += load_s
        best = min(best, waited + sum(map(max, compute_s, overlapped)))
    return best


@given(
    models(),
    st.integers(2, 6),
    st.none() | st.integers(0, 60),
    st.integers(1, 4),
    st.lists(st.integers(0, 7), min_size=8),
)
@example(((2, 2, 4), (0, 1, 2)), 4, None, 4, [1, 3, 0, 0, 0, 0])  # where one more than is hidden costs least
@settings(deadline=None, max_examples=120)
def test_schedule_of_page_loads_is_optimal(
    sizes: Sizes, page_bytes: int, room: int | None, load_s: int, seconds: list[int]
) -> None:
    pages = in_frames(*sizes, page_bytes, room)
    compute_s = seconds[: len(pages.uses())]
    ahead = schedule(pages, compute_s, load_s)
    found, just_in_time = (duration_s(pages, each, compute_s, load_s) for each in (ahead, (0,) * len(ahead)))
    assert found <= just_in_time == sum(compute_s) + load_s * len(loads_of(pages).page)
    if prod(map(len, windows(pages))) < 3000:
        assert found == fewest_s(pages, compute_s, load_s)


@given(models(), st.integers(2, 6), st.integers(0, 80))
@settings(deadline=None, max_examples=120)
def test_in_frames_uses_all_frames_that_the_room_holds(sizes: Sizes, page_bytes: int, room: int) -> None:
    pages = in_frames(*sizes, page_bytes, room)
    holding = []
    for frames in range(1, 2 * sum(sizes[0])):
        try:
            holding.append(paged(*sizes, page_bytes, frames))
        except ValueError:
            continue
    whole = holding[-1].count
    fitting = [each.frames for each in holding if each.frame_bytes <= room and each.frames <= whole]
    assert pages.frames == (max(fitting) if fitting else min(each.frames for each in holding))
