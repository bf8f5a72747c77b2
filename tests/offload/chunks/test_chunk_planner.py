"""Searches over chunk sizes, against every size there is."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st
from support.chunk_packings import Sizes, models, size_packings

from memtune.offload.chunks.chunk_planner import as_few_as_used, fewest_bytes_moved, least_waste, slots_in
from memtune.offload.core.parameter_layout import pack
from memtune.program.residency import cache_residency


@given(models(), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_packed_parameters_are_adjacent_and_in_one_chunk_each(sizes: Sizes, spare: int) -> None:
    n_bytes, block = sizes
    chunks = pack(n_bytes, block, max(n_bytes) + spare)
    places = list(zip(chunks.chunk, chunks.offset, n_bytes, strict=True))
    assert all(at + size <= chunks.chunk_bytes for _, at, size in places)
    ends = {(chunk, at + size) for chunk, at, size in places}
    assert all(at == 0 or (chunk, at) in ends for chunk, at, _ in places)
    assert list(chunks.chunk) == sorted(chunks.chunk)
    for of, chunk in zip(block, chunks.chunk, strict=True):
        assert chunk in chunks.of_block[of]


def test_parameter_larger_than_a_chunk_raises() -> None:
    with pytest.raises(ValueError, match="9 bytes has no place"):
        pack((3, 9), (0, 1), 8)


@given(models(), st.none() | st.integers(0, 60), st.data())
@settings(deadline=None, max_examples=80)
def test_least_waste_is_optimal_within_the_room(sizes: Sizes, base: int | None, data: st.DataObject) -> None:
    n_moments = 2 * (sizes[1][-1] + 1)
    room = None if base is None else tuple(base + data.draw(st.integers(0, 9)) for _ in range(n_moments))
    found = least_waste(*sizes, room)
    fitting = [each for each in size_packings(sizes) if room is None or slots_in(each, room) is not None]
    if fitting:
        assert found.chunks.n_bytes == min(each.n_bytes for each in fitting)
        assert all(len(use) <= n for use, n in zip(found.chunks.uses(), found.slots, strict=True))
        assert room is None or all(
            n * found.chunks.chunk_bytes <= n_bytes for n, n_bytes in zip(found.slots, room, strict=True)
        )
    else:
        assert found.slots == as_few_as_used(found.chunks)


@given(models(), st.none() | st.integers(0, 90), st.integers(0, 1))
@example(((7, 5, 9, 3, 4, 3, 8), (0, 0, 1, 1, 1, 2, 2)), 39, 0)  # the best chunk is above the largest block
@settings(deadline=None, max_examples=80)
def test_fewest_bytes_moved_is_optimal(sizes: Sizes, capacity: int | None, prefetch: int) -> None:
    found = fewest_bytes_moved(*sizes, capacity, prefetch)
    prices = []
    for chunks in size_packings(sizes, above=capacity is not None):
        uses, least = chunks.uses(prefetch), as_few_as_used(chunks, prefetch)[0]
        for slots in range(least, least + 1 if capacity is None else chunks.count + 1):
            if capacity is None or slots * chunks.chunk_bytes <= capacity:
                moves = cache_residency(uses, (slots,) * len(uses), "lru").moves
                prices.append((moves * chunks.chunk_bytes, slots * chunks.chunk_bytes, chunks.chunk_bytes))
    size, slots = found.chunks.chunk_bytes, found.slots[0]
    uses = found.chunks.uses(prefetch)
    price = cache_residency(uses, found.slots, "lru").moves * size, slots * size, size
    assert price == min(prices) if prices else slots == as_few_as_used(found.chunks, prefetch)[0]
