"""The choice of resident chunks, compared with every other choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.chunk_packings import Sizes, models, size_packings

from memtune.offload.chunks.chunk_planner import ChunkPlan
from memtune.offload.chunks.resident_chunks_planner import (
    OnDevice,
    Seconds,
    cheapest_split,
    most_in_margin,
    resident_counts,
    with_resident_first,
)
from memtune.offload.core.parameter_layout import Chunks, pack
from memtune.program.residency import cache_residency


def on_device(sizes: Sizes, state: int) -> OnDevice:
    n_bytes, block = sizes
    return OnDevice(tuple(n * (1 + state) for n in n_bytes), n_bytes, block)


def taken_in(sizes: Sizes, n_resident: int, state: int, moment: int, moments: int) -> int:
    """Return the bytes of the first `n_resident` parameters in a moment."""
    n_bytes, block = sizes
    landed = [n for n, b in zip(n_bytes[:n_resident], block, strict=False) if moment >= moments - 1 - b]
    return sum(n_bytes[:n_resident]) * (1 + state) + sum(landed)


@given(models(), st.integers(0, 2), st.lists(st.integers(0, 90), min_size=8, max_size=8))
@settings(deadline=None, max_examples=60)
def test_most_in_margin_is_the_largest_number_of_resident_chunks(
    sizes: Sizes, state: int, rooms: list[int]
) -> None:
    moments = 2 * (sizes[1][-1] + 1)
    room = tuple(rooms[:moments])
    for chunks in size_packings(sizes)[:3]:
        fitting = []
        for kept in range(chunks.count):
            n_resident = sum(each < kept for each in chunks.chunk)
            free = [room[t] - taken_in(sizes, n_resident, state, t, moments) for t in range(moments)]
            fitting.append(min(free) >= (chunks.count - kept) * chunks.chunk_bytes)
        wanted = fitting.index(False) - 1 if False in fitting else chunks.count - 1
        assert most_in_margin(chunks, room, on_device(sizes, state).bytes_at(moments)) == wanted


@given(models(), st.data())
@settings(deadline=None, max_examples=40)
def test_all_resident_keeps_the_places_of_offloaded_parameters(sizes: Sizes, data: st.DataObject) -> None:
    chunks = data.draw(st.sampled_from(size_packings(sizes)))
    kept = data.draw(st.integers(0, chunks.count - 1))
    slots = (chunks.count,) * 2 * (sizes[1][-1] + 1)
    found = with_resident_first(*sizes, ChunkPlan(chunks, slots), kept)
    assert found.resident_parameters == resident_counts(chunks)[kept]
    assert found.chunks.count == chunks.count - kept
    assert found.chunks.offset == chunks.offset[found.resident_parameters :]
    assert set(found.slots) == {chunks.count - kept}


def price(
    sizes: Sizes, chunks: Chunks, n_resident: int, slots: int, prefetch: int, seconds: Seconds
) -> float:
    rest: Chunks = pack(sizes[0][n_resident:], sizes[1][n_resident:], chunks.chunk_bytes)
    uses = rest.uses(prefetch)
    if slots < max(map(len, uses)):
        return np.inf
    moves = cache_residency(uses, (slots,) * len(uses), "lru").moves
    return (
        moves * chunks.chunk_bytes / seconds.up_bytes_per_s
        + sum(seconds.host[n_resident:])
        + sum(seconds.device[:n_resident])
    )


@given(
    models(),
    st.integers(0, 2),
    st.integers(0, 120),
    st.integers(0, 1),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_cheapest_split_is_optimal(
    sizes: Sizes, state: int, base: int, prefetch: int, up: float, limited: bool
) -> None:
    """Compared with all chunk sizes, numbers of resident chunks and slots."""
    n_bytes, block = sizes
    moments = 2 * (block[-1] + 1)
    room = tuple(base + t % 3 for t in range(moments))
    seconds = Seconds(up, tuple(2.0 * n for n in n_bytes), tuple(0.25 * n for n in n_bytes))
    most = len(n_bytes) // 2 if limited else None
    found = cheapest_split(*sizes, room, prefetch, on_device(sizes, state), seconds, most=most)
    prices = [np.inf]
    for chunks in size_packings(sizes, above=True):
        for kept in range(chunks.count):
            n_resident = sum(each < kept for each in chunks.chunk)
            free = min(room[t] - taken_in(sizes, n_resident, state, t, moments) for t in range(moments))
            if most is None or n_resident <= most:
                slots = min(free // chunks.chunk_bytes, chunks.count - kept)
                prices += [
                    price(sizes, chunks, n_resident, each, prefetch, seconds) for each in range(1, slots + 1)
                ]
    if found is None:
        assert min(prices) == np.inf
    else:
        assert price(
            sizes, found.chunks, found.resident_parameters, found.slots[0], prefetch, seconds
        ) == pytest.approx(min(prices))
        assert len(set(found.slots)) == 1


def test_cheapest_split_caches_on_a_fast_link_and_keeps_resident_on_a_slow_one() -> None:
    """The same room is used for the cache or for resident chunks, by the costs of copies and host updates."""
    sizes: Sizes = ((4,) * 8, (0, 0, 1, 1, 2, 2, 3, 3))
    update = tuple(0.1 for _ in range(8))
    room = (36,) * 8

    def split(host_s: float) -> ChunkPlan:
        found = cheapest_split(*sizes, room, 0, on_device(sizes, 2), Seconds(1.0, (host_s,) * 8, update))
        assert found is not None
        return found

    cheap, dear = split(0.1), split(100.0)
    assert cheap.resident_parameters == 0
    assert dear.resident_parameters > 0
    assert dear.slots[0] * dear.chunks.chunk_bytes < cheap.slots[0] * cheap.chunks.chunk_bytes
