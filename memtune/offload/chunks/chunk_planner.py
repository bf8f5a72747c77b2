"""Search the chunk size and number of chunks on the device before training, for PatrickStar and Elixir."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memtune.offload.core import Chunks, pack
from memtune.program import Units, lru_moves

_TRIED, _TRIED_ABOVE = 64, 16
"""Number of chunk sizes up to the largest block, and above it, that a search tries."""


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks, and the number of them that may be on the device in each moment."""

    chunks: Chunks
    """The offloaded chunks."""
    slots: Units
    resident_parameters: int = 0
    """Number of parameters in no chunk: those used first are resident, with their optimizer state."""
    in_place: bool = False
    """Gradients are offloaded from the places of their weights in the chunks."""


@functools.lru_cache(maxsize=64)
def chunk_sizes(n_bytes: Units, block: Units, *, above: bool = False) -> Units:
    """Return sizes worth trying, ascending: the largest parameter's to the largest block's, or more."""
    # Any packing has a fullest chunk, whose parameters are adjacent: a chunk of just their bytes packs
    # the same way with the least waste. So the best size is a sum of neighbours. One above the largest
    # block loads parameters of other blocks, which moves fewer bytes where they are used before the
    # chunk is evicted.
    of_block = [0] * (block[-1] + 1)
    for size, index in zip(n_bytes, block, strict=True):
        of_block[index] += size
    least, most = max(n_bytes), max(of_block)
    sums: set[int] = set()
    # Sums of neighbours, see above: O(n^2).
    ends = np.cumsum(np.asarray((0, *n_bytes), np.int64))
    for first in range(len(n_bytes)):
        totals = ends[first + 1 :] - ends[first]
        stop = len(totals) if above else int(np.searchsorted(totals, most, side="right"))
        sums.update(totals[int(np.searchsorted(totals, least)) : stop].tolist())
    found = sorted(sums)
    within = bisect.bisect_right(found, most)
    return *_spread(found[:within], _TRIED), *(_spread(found[within:], _TRIED_ABOVE) if above else ())


def _spread(sizes: Sequence[int], count: int) -> Units:
    """Return at most `count` of `sizes`, evenly spread, with the first and the last."""
    if len(sizes) <= count:
        return tuple(sizes)
    return tuple(sizes[i * (len(sizes) - 1) // (count - 1)] for i in range(count))


@functools.lru_cache(maxsize=64)
def size_packings(n_bytes: Units, block: Units, gathered: bool, *, above: bool = False) -> tuple[Chunks, ...]:
    """Return the parameters packed in chunks of each of the `chunk_sizes`."""
    return tuple(pack(n_bytes, block, size, gathered) for size in chunk_sizes(n_bytes, block, above=above))


def slots_in(chunks: Chunks, room: Sequence[int], prefetch: int = 0) -> Units | None:
    """Return the chunks that `room` holds in each moment; None if a moment needs more."""
    uses = chunks.uses(prefetch)
    slots = tuple(min(n_bytes // chunks.chunk_bytes, chunks.count) for n_bytes in room)
    return None if any(len(use) > n for use, n in zip(uses, slots, strict=True)) else slots


def as_few_as_used(chunks: Chunks, prefetch: int = 0) -> Units:
    """Return the largest number of chunks that a moment uses, for all moments."""
    uses = chunks.uses(prefetch)
    return (max(map(len, uses)),) * len(uses)


@functools.lru_cache(maxsize=256)
def least_waste(n_bytes: Units, block: Units, room: Units | None, gathered: bool = False) -> ChunkPlan:
    """Return the chunk size of least waste for which each moment has room for the chunks it uses.

    Args:
        n_bytes: Bytes of each parameter, in the order of use.
        block: The block of each, ascending from 0.
        room: (moments,) bytes of the device that chunks may take; None: as few as are used.
        gathered: Parameters are a rank's rows.

    Returns:
        Among equals the smallest chunk. If no size fits, the one that takes the fewest bytes.

    Source: Fang et al. 2021, PatrickStar (arXiv:2108.05818), chunk size search and the memory budget by
    moment.
    """
    # Chunks are equal in size, so `n_bytes` includes the unused ends: the waste.
    by_waste = sorted(
        size_packings(n_bytes, block, gathered), key=lambda chunks: (chunks.n_bytes, chunks.chunk_bytes)
    )
    if room is None:
        return ChunkPlan(by_waste[0], as_few_as_used(by_waste[0]))
    fitting = ((chunks, slots_in(chunks, room)) for chunks in by_waste)
    found = next((ChunkPlan(chunks, slots) for chunks, slots in fitting if slots is not None), None)
    return found or _smallest(by_waste, 0)


@functools.lru_cache(maxsize=256)
def fewest_bytes_moved(
    n_bytes: Units, block: Units, capacity: int | None, prefetch: int, gathered: bool = False
) -> ChunkPlan:
    """Return the one of `chunk_sizes`, and the number of cached chunks, that load the fewest bytes in a step
    under LRU.

    Args:
        n_bytes: Bytes of each parameter, in the order of use.
        block: The block of each, ascending from 0.
        capacity: Bytes of the device that the cache may take; None: as few chunks as are used.
        prefetch: Number of moments by which a chunk is prefetched.
        gathered: Parameters are a rank's rows.

    Returns:
        Among equals the cache of fewest bytes, then the smaller chunk. If no size fits, the one that takes
        the fewest bytes.

    Source: Huang et al. 2022, Elixir (arXiv:2212.05339), the pre-runtime search over chunk sizes with a cache
    of n chunks.
    """
    # Without a capacity the least cache is wanted, which chunks above the largest block only enlarge.
    tried = size_packings(n_bytes, block, gathered, above=capacity is not None)
    best: tuple[tuple[int, int, int], ChunkPlan] | None = None
    for chunks in tried:
        uses, least = chunks.uses(prefetch), as_few_as_used(chunks, prefetch)[0]
        most = least if capacity is None else min(capacity // chunks.chunk_bytes, chunks.count)
        # Each chunk is loaded at least once, so its bytes are a lower bound.
        if most < least or (best is not None and chunks.n_bytes > best[0][0]):
            continue
        by_slots = _moves(chunks, prefetch)
        moves = by_slots[most]
        # More slots that save no load are left to activations.
        low = next(slots for slots in range(least, most + 1) if by_slots[slots] == moves)
        found = (moves * chunks.chunk_bytes, low * chunks.chunk_bytes, chunks.chunk_bytes)
        if best is None or found < best[0]:
            best = found, ChunkPlan(chunks, (low,) * len(uses))
    return best[1] if best is not None else _smallest(tried, prefetch)


@functools.lru_cache(maxsize=1024)
def _moves(chunks: Chunks, prefetch: int) -> Units:
    return lru_moves(chunks.uses(prefetch))


def _smallest(tried: Sequence[Chunks], prefetch: int) -> ChunkPlan:
    plans = (ChunkPlan(chunks, as_few_as_used(chunks, prefetch)) for chunks in tried)
    return min(plans, key=lambda plan: (plan.slots[0] * plan.chunks.chunk_bytes, plan.chunks.chunk_bytes))
