"""Choose the chunks that are resident and updated on the device (PatrickStar, Elixir).

Those that are used first are chosen: their gradients are ready last, when most activations are freed, and
their loads are waited for most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memtune.offload.chunks.chunk_planner import ChunkPlan, size_packings
from memtune.offload.core import Chunks, pack
from memtune.program import F64, I64, Units


@dataclass(frozen=True)
class OnDevice:
    """Device bytes of block parameters that are updated there, in the order of use."""

    always_bytes: Units
    """Weight and optimizer state, and a sum of gradients of earlier micro-batches."""
    gradient_bytes: Units
    """The gradient, from its block's backward to the update."""
    block: Units

    def bytes_at(self, moments: int) -> I64:
        """Return (parameters + 1, moments) bytes of the first 0, 1, ... parameters."""
        return _taken(self, moments)


@functools.lru_cache(maxsize=64)
def _taken(there: OnDevice, moments: int) -> I64:
    # Backward has the last moments, in the reverse order of the blocks.
    ready_in = moments - 1 - np.asarray(there.block, np.int64)
    gradient = np.where(
        np.arange(moments) >= ready_in[:, None], np.asarray(there.gradient_bytes, np.int64)[:, None], 0
    )
    each = np.asarray(there.always_bytes, np.int64)[:, None] + gradient
    # Row k is the first k parameters, since a plan always keeps those that are used first.
    return np.vstack([np.zeros((1, moments), np.int64), np.cumsum(each, 0)])


@dataclass(frozen=True)
class Seconds:
    """Costs of a step's parameters, in the order of use."""

    up_bytes_per_s: float
    """Rate of H2D copies of chunks."""
    host: tuple[float, ...]
    """Seconds of each parameter that is updated on the host: D2H of its gradient, and the update."""
    device: tuple[float, ...]
    """Seconds of each resident parameter's update."""


@functools.lru_cache(maxsize=256)
def resident_counts(chunks: Chunks) -> I64:
    """Return (chunks,) number of parameters in the first 0, 1, ... of `chunks`; never all of them."""
    found: I64 = np.searchsorted(chunks.chunk, np.arange(chunks.count)).astype(np.int64)
    return found


def without_first(n_bytes: Units, block: Units, plan: ChunkPlan, n_resident: int) -> Chunks:
    """Return the offloaded chunks of `plan` without its first `n_resident` parameters, which fill chunks."""
    return pack(n_bytes[n_resident:], block[n_resident:], plan.chunks.chunk_bytes, plan.chunks.gathered)


def with_resident_first(n_bytes: Units, block: Units, plan: ChunkPlan, kept: int) -> ChunkPlan:
    """Return `plan` with its first `kept` chunks resident, and slots for all others in every moment."""
    n_resident = int(resident_counts(plan.chunks)[kept])
    rest = without_first(n_bytes, block, plan, n_resident)
    return replace(plan, chunks=rest, slots=(rest.count,) * len(plan.slots), resident_parameters=n_resident)


def most_in_margin(chunks: Chunks, room: Sequence[int], taken: I64) -> int:
    """Return the most chunks that fit on the device with their state and slots for all others (margin space).

    Args:
        chunks: Of all parameters.
        room: (moments,) bytes of the device that weights, state and gradients of blocks may take.
        taken: A result of `OnDevice.taken`.

    Returns:
        -1 if not even all chunks of weights fit.

    Source: Fang et al. 2021, PatrickStar (arXiv:2108.05818), device-aware operator placement.
    """
    kept = np.arange(chunks.count)
    left = np.asarray(room, np.int64) - taken[resident_counts(chunks)]
    fits = (left >= ((chunks.count - kept) * chunks.chunk_bytes)[:, None]).all(1)
    return chunks.count - 1 if fits.all() else int(fits.argmin()) - 1


@functools.lru_cache(maxsize=256)
def cheapest_split(
    n_bytes: Units,
    block: Units,
    room: Units,
    prefetch: int,
    there: OnDevice,
    seconds: Seconds,
    *,
    most: int | None = None,
    gathered: bool = False,
    chunk_bytes: int | None = None,
) -> ChunkPlan | None:
    """Return the chunk size, resident chunks and cache slots with the least time of loads and updates.

    Args:
        n_bytes: Bytes of each parameter in a chunk, in the order of use.
        block: The block of each, ascending from 0.
        room: (moments,) as in `most_in_margin`; the cache has one size for all.
        prefetch: Number of moments by which a chunk is prefetched.
        there: Device bytes of resident parameters.
        seconds: Costs.
        most: Bound of resident parameters; None: any number.
        gathered: Parameters are a rank's rows.
        chunk_bytes: Bytes of a chunk; None: searched for.

    Returns:
        Among equals the one with the fewest device bytes, then the smaller chunk. None if no size fits.

    Source: Huang et al. 2022, Elixir (arXiv:2212.05339): the rest of the device is split between blocks of
    the rCache and chunks that are resident with their optimizer state, by seconds saved per byte. There the
    chunk size is searched first.
    """
    # A chunk holds whole parameters.
    if min(room) < max(n_bytes):
        return None
    taken = there.bytes_at(len(room))
    # The cache keeps its size for the whole step.
    left = (np.asarray(room, np.int64) - taken).min(1)
    host_s, device_s = (np.concatenate([[0.0], np.cumsum(each)]) for each in (seconds.host, seconds.device))
    # By number of resident parameters: the rest is updated on the host.
    update_s = (host_s[-1] - host_s) + device_s
    sizes = (
        size_packings(n_bytes, block, gathered, above=True)
        if chunk_bytes is None
        else (pack(n_bytes, block, chunk_bytes, gathered),)
    )
    tried = [_Size(chunks, left, taken[:, -1], update_s, seconds.up_bytes_per_s, most) for chunks in sizes]
    best: tuple[tuple[float, int, int], Chunks, int, int] | None = None
    # Cheapest lower bound first: once one is above the best price, all that follow are.
    for size in sorted(tried, key=lambda each: each.least_s):
        if best is not None and size.least_s > best[0][0]:
            break
        found = size.best(prefetch)
        if found is not None and (best is None or found[0] < best[0]):
            best = found[0], size.chunks, *found[1:]
    if best is None:
        return None
    _, chunks, n_resident, slots = best
    rest = without_first(n_bytes, block, ChunkPlan(chunks, ()), n_resident)
    return ChunkPlan(rest, (slots,) * len(room), n_resident)


class _Size:
    """One packing, with the device bytes left and the update seconds by number of resident parameters."""

    def __init__(
        self, chunks: Chunks, left: I64, taken: I64, update_s: F64, up_bytes_per_s: float, most: int | None
    ) -> None:
        self.chunks, self._load_s = chunks, chunks.chunk_bytes / up_bytes_per_s
        n_resident, kept = resident_counts(chunks), np.arange(chunks.count)
        slots = np.minimum(left[n_resident] // chunks.chunk_bytes, chunks.count - kept)
        fits = (slots > 0) & (n_resident <= (most if most is not None else len(left)))
        self._kept, self._n_resident, self._slots = kept[fits], n_resident[fits], slots[fits]
        self._update_s, self._taken = update_s[self._n_resident], taken[self._n_resident]
        comes = chunks.count - self._kept
        # Backward finds in the cache what forward used last; under FSDP2 the last block is not gathered
        # again.
        again = comes - self._slots - (len(chunks.of_block[-1]) if chunks.gathered else 0)
        loaded_s = (comes + np.maximum(again, 0)) * self._load_s + self._update_s
        self.least_s = float(loaded_s.min()) if len(loaded_s) else float("inf")
        """Lower bound of all splits: each offloaded chunk is loaded once, and again if backward uses it after
        its eviction.
        """

    def best(self, prefetch: int) -> tuple[tuple[float, int, int], int, int] | None:
        """Return the price of the best split, the number of resident parameters, and slots.

        None if the cache cannot hold the chunks that a moment uses.
        """
        moves, enough, least = _moves_by_kept(self.chunks, prefetch)
        fits = self._slots >= least[self._kept]
        if not fits.any():
            return None
        kept, slots = self._kept[fits], self._slots[fits]
        slots_s = moves[kept, slots] * self._load_s + self._update_s[fits]
        slots = np.maximum(enough[kept, slots], least[kept])
        n_bytes = slots * self.chunks.chunk_bytes + self._taken[fits]
        at = int(np.lexsort((n_bytes, slots_s))[0])
        price = float(slots_s[at]), int(n_bytes[at]), self.chunks.chunk_bytes
        return price, int(self._n_resident[fits][at]), int(slots[at])


@functools.lru_cache(maxsize=256)
def _moves_by_kept(chunks: Chunks, prefetch: int) -> tuple[I64, I64, I64]:
    """Return the loads of an LRU cache of the other chunks, by number of resident chunks.

    Returns:
        (chunks, chunks + 1) by slots, the number of loads, and the fewest slots with no more loads; (chunks,)
        the largest number of chunks that a moment uses.
    """
    # `residency.lru_moves` without the first chunks, for all numbers of them in one walk: a chunk's
    # stack distance is the number of offloaded chunks used since.
    count, uses = chunks.count, chunks.uses(prefetch)
    kept, latest = np.arange(count), np.full(count, -1, np.int64)
    missed, least = np.zeros(count * (count + 1), np.int64), np.zeros(count, np.int64)
    for moment, units in enumerate(uses):
        if not units:
            continue
        mine = np.sort(np.asarray(units, np.int64))
        # Chunks that were used after the last use of each of `mine`: its stack distance, if all were
        # offloaded.
        since = latest > latest[mine][:, None]
        distance = np.cumsum(since[:, ::-1], 1)[:, ::-1]
        distance[latest[mine] < 0] = count
        asked = kept <= mine[:, None]
        # Not `bincount`, which makes a table of this size for each moment.
        np.add.at(missed, (kept * (count + 1) + distance)[asked], 1)
        least = np.maximum(least, asked.sum(0))
        # Within a moment, larger numbers are used later.
        latest[mine] = moment * count + np.arange(len(mine))
    moves = np.cumsum(missed.reshape(count, count + 1)[:, ::-1], 1)[:, ::-1]
    falls = np.diff(moves, axis=1, prepend=moves[:, :1] + 1) < 0
    enough = np.maximum.accumulate(np.where(falls, np.arange(count + 1), 0), 1)
    return moves, enough, least
