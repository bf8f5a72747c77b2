"""Pages: the spans of parameters, and the loads of each frame."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.chunk_packings import Sizes, models

from memtune.offload.core.parameter_layout import Pages, loads_of, paged, runs, timeline


def paged_if_it_holds(sizes: Sizes, page_bytes: int, frames: int) -> Pages | None:
    try:
        return paged(*sizes, page_bytes, frames)
    except ValueError:
        return None


@given(models(), st.integers(2, 6), st.integers(1, 40))
@settings(deadline=None, max_examples=150)
def test_pages_hold_two_parameters_and_waste_less_than_a_page_each(
    sizes: Sizes, page_bytes: int, frames: int
) -> None:
    pages = paged_if_it_holds(sizes, page_bytes, frames)
    if pages is None:
        return
    on_page: dict[int, list[int]] = {page: [] for page in range(pages.count)}
    filled = [0] * pages.count
    for parameter, (size, block) in enumerate(zip(*sizes, strict=True)):
        spans = pages.spans(parameter)
        assert sum(span.n_bytes for span in spans) == size
        for span in spans:
            assert span.offset == filled[span.page]
            filled[span.page] += span.n_bytes
            on_page[span.page].append(parameter)
            assert span.page in pages.of_block[block]
        frames_of = [
            pages.frame[span.page] for span in spans
        ]  # one piece of memory, on the host and on the device
        assert frames_of == list(range(frames_of[0], frames_of[0] + len(spans)))
        assert all(span.offset + span.n_bytes == page_bytes for span in spans[:-1])
    assert tuple(filled) == pages.filled
    assert max(map(len, on_page.values())) <= 2
    assert pages.count * page_bytes - sum(sizes[0]) < page_bytes * len(sizes[0])


@given(models(), st.integers(2, 6), st.integers(1, 40), st.data())
@settings(deadline=None, max_examples=150)
def test_timeline_has_used_pages_resident_and_one_page_per_frame(
    sizes: Sizes, page_bytes: int, frames: int, data: st.DataObject
) -> None:
    pages = paged_if_it_holds(sizes, page_bytes, frames)
    if pages is None:
        return
    moments = 2 * len(pages.of_block)
    residency = timeline(pages, tuple(data.draw(st.integers(0, 4)) for _ in range(moments)))
    frames: dict[int, int] = {}
    for used, comes in zip(pages.uses(), residency.loads, strict=False):
        assert len({pages.frame[page] for page in comes}) == len(comes)
        frames |= {pages.frame[page]: page for page in comes}
        assert all(frames.get(pages.frame[page]) == page for page in used)
    assert residency.moves == len(loads_of(pages).page) == timeline(pages, (0,) * moments).moves


@given(models(), st.integers(2, 6), st.integers(1, 40), st.sets(st.integers(0, 40)))
@settings(deadline=None, max_examples=60)
def test_runs_join_adjacent_pages(sizes: Sizes, page_bytes: int, frames: int, wanted: set[int]) -> None:
    pages = paged_if_it_holds(sizes, page_bytes, frames)
    if pages is None:
        return
    wanted = {page for page in wanted if page < pages.count}
    found = list(
        zip(*(each.tolist() for each in runs(pages, np.asarray(sorted(wanted), np.int32))), strict=True)
    )
    assert [page for first, last in found for page in range(first, last + 1)] == sorted(wanted)
    for first, last in found:
        assert [pages.frame[page] - pages.frame[first] for page in range(first, last + 1)] == list(
            range(last - first + 1)
        )
        assert all(pages.filled[page] == page_bytes for page in range(first, last))


def test_ring_of_frames_loads_as_few_pages_as_any_cache() -> None:
    """Forward and backward over n pages with f frames load 2n - f pages: the last f stay resident."""
    pages = paged((4,) * 12, tuple(range(12)), 4, 5)
    assert residency_moves(pages) == 2 * 12 - 5


def residency_moves(pages: Pages) -> int:
    return timeline(pages, (0,) * 2 * len(pages.of_block)).moves


def test_paged_raises_for_too_few_frames_and_timeline_for_another_model() -> None:
    with pytest.raises(ValueError, match="do not hold a block"):
        paged((4, 4, 4), (0, 0, 1), 2, 3)
    with pytest.raises(ValueError, match="3 moments for 4"):
        timeline(paged((4, 4, 4), (0, 0, 1), 2, 6), (0, 0, 0))
