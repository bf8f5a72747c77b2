"""Which chunks stay on the device with their optimizer state and are updated there: for PatrickStar and Elixir.

Those that are used first do: their gradients land last, when most activations are gone, and their weights are waited for most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memtune.chunks import Chunks, pack
from memtune.planners.chunks import ChunkPlan, all_packings
from memtune.program import F64, I64
from memtune.residency import Units


@dataclass(frozen=True)
class OnDevice:
    """What parameters of blocks take on the device while they are updated there, in the order of use."""

    always_bytes: Units
    """Weight and optimizer state, and a sum of gradients of earlier micro-batches."""
    landed_bytes: Units
    """The gradient, from its block's backward to the update."""
    block: Units

    def taken(self, moments: int) -> I64:
        """(parameters + 1, moments) bytes of the first 0, 1, ... parameters."""
        lands = moments - 1 - np.asarray(self.block, np.int64)
        landed = np.where(np.arange(moments) >= lands[:, None], np.asarray(self.landed_bytes, np.int64)[:, None], 0)
        each = np.asarray(self.always_bytes, np.int64)[:, None] + landed
        return np.vstack([np.zeros((1, moments), np.int64), np.cumsum(each, 0)])


@dataclass(frozen=True)
class Seconds:
    """What a step pays for its parameters, in the order of use."""

    up_bytes_per_s: float
    """Of chunks that come in."""
    host: tuple[float, ...]
    """Of each parameter that is updated on the host: its gradient down, and the update."""
    device: tuple[float, ...]
    """Of each that stays: the update."""


def staying_of(chunks: Chunks) -> I64:
    """(chunks,) parameters in the first 0, 1, ... of `chunks`; all of them never stay."""
    found: I64 = np.searchsorted(chunks.chunk, np.arange(chunks.count)).astype(np.int64)
    return found


def without_first(n_bytes: Units, block: Units, plan: ChunkPlan, staying: int) -> Chunks:
    """The chunks of `plan` that still come and go when the first `staying` parameters stay, which fill chunks of their own."""
    return pack(n_bytes[staying:], block[staying:], plan.chunks.chunk_bytes, plan.chunks.gathered)


def all_there(n_bytes: Units, block: Units, plan: ChunkPlan, kept: int) -> ChunkPlan:
    """`plan` with its first `kept` chunks staying and slots for all others in every moment."""
    staying = int(staying_of(plan.chunks)[kept])
    rest = without_first(n_bytes, block, plan, staying)
    return ChunkPlan(rest, (rest.count,) * len(plan.slots), staying)


def most_in_margin(chunks: Chunks, room: Sequence[int], taken: I64) -> int:
    """How many of `chunks` can be updated on the device beside slots for all others: PatrickStar's margin space.

    Args:
        chunks: Of all parameters.
        room: (moments,) bytes of the device that weights, state and gradients of blocks may take.
        taken: As `OnDevice.taken` says.

    Returns:
        -1 where not even all chunks of weights have room.

    Source: Fang et al. 2021, PatrickStar (arXiv:2108.05818), device-aware operator placement.
    """
    kept = np.arange(chunks.count)
    left = np.asarray(room, np.int64) - taken[staying_of(chunks)]
    fits = (left >= ((chunks.count - kept) * chunks.chunk_bytes)[:, None]).all(1)
    return chunks.count - 1 if fits.all() else int(fits.argmin()) - 1


@functools.lru_cache(maxsize=256)
def cheapest_split(
    n_bytes: Units, block: Units, room: Units, ahead: int, there: OnDevice, seconds: Seconds, *, most: int | None = None,
    gathered: bool = False, chunk_bytes: int | None = None,
) -> ChunkPlan | None:  # fmt: skip
    """Chunk size, chunks that stay and slots of the cache with which links and updates take the least time together.

    Args:
        n_bytes: What each parameter takes in a chunk, in the order of use.
        block: The block of each, ascending from 0.
        room: (moments,) as in `most_in_margin`; the cache has one size for all.
        ahead: Moments that a chunk comes in before its use.
        there: What parameters take that stay.
        seconds: What is paid.
        most: Parameters that may stay; None: any number.
        gathered: Parameters are a rank's rows.
        chunk_bytes: Of a chunk; None: searched for.

    Returns:
        Among equals what takes the fewest bytes of the device, then the smaller chunk. None where no size fits.

    Source: Huang et al. 2022, Elixir (arXiv:2212.05339), what is left of the device is split between more blocks of the rCache
    and chunks that stay with their optimizer state, by seconds saved per byte. There the chunk size is searched for before.
    """
    taken, most = there.taken(len(room)), len(n_bytes) if most is None else most
    host_s, device_s = (np.concatenate([[0.0], np.cumsum(each)]) for each in (seconds.host, seconds.device))
    best: tuple[tuple[float, int, int], ChunkPlan] | None = None
    sizes = all_packings(n_bytes, block, gathered) if chunk_bytes is None else (pack(n_bytes, block, chunk_bytes, gathered),)
    for chunks in sizes:
        found = _best_of(chunks, room, ahead, taken, most, (host_s[-1] - host_s) + device_s, seconds.up_bytes_per_s)
        if found is None or (best is not None and found[0] >= best[0]):
            continue
        price, kept, slots = found
        plan = ChunkPlan(chunks, (slots,) * len(room))
        staying = int(staying_of(chunks)[kept])
        best = price, replace(plan, chunks=without_first(n_bytes, block, plan, staying), staying=staying)
    return None if best is None else best[1]


def _best_of(
    chunks: Chunks, room: Units, ahead: int, taken: I64, most: int, update_s: F64, up_bytes_per_s: float
) -> tuple[tuple[float, int, int], int, int] | None:
    """The price of the best split of `chunks`, how many of them stay, and slots for the others."""
    staying, kept = staying_of(chunks), np.arange(chunks.count)
    slots = np.minimum((np.asarray(room) - taken[staying]).min(1) // chunks.chunk_bytes, chunks.count - kept)
    moves, least = _moves_by_kept(chunks, ahead)
    fits = (slots >= least) & (staying <= most)
    if not fits.any():
        return None
    kept, slots, staying = kept[fits], slots[fits], staying[fits]
    found = moves[kept, slots]
    enough = (moves[kept] > found[:, None]).sum(1)  # moves fall with slots
    enough = np.maximum(enough, least[fits])
    paid_s = found * (chunks.chunk_bytes / up_bytes_per_s) + update_s[staying]
    n_bytes = enough * chunks.chunk_bytes + taken[staying].max(1)
    at = int(np.lexsort((n_bytes, paid_s))[0])
    return (float(paid_s[at]), int(n_bytes[at]), chunks.chunk_bytes), int(kept[at]), int(enough[at])


@functools.lru_cache(maxsize=256)
def _moves_by_kept(chunks: Chunks, ahead: int) -> tuple[I64, I64]:
    """(chunks, chunks + 1) by chunks that stay and slots, how many of the others come in under LRU; (chunks,) the fewest slots.

    `residency.lru_moves` of the uses without those of the first chunks, for all numbers of them in one walk: a chunk's stack
    distance is how many of those that do not stay have been used since.
    """
    count, uses = chunks.count, chunks.uses(ahead)
    kept, latest = np.arange(count), np.full(count, -1, np.int64)
    missed, least = np.zeros(count * (count + 1), np.int64), np.zeros(count, np.int64)
    for moment, units in enumerate(uses):
        if not units:
            continue
        mine = np.sort(np.asarray(units, np.int64))
        since = latest > latest[mine][:, None]
        distance = np.cumsum(since[:, ::-1], 1)[:, ::-1]
        distance[latest[mine] < 0] = count
        asked = kept <= mine[:, None]
        missed += np.bincount((kept * (count + 1) + distance)[asked], minlength=len(missed))
        least = np.maximum(least, asked.sum(0))
        latest[mine] = moment * count + np.arange(len(mine))  # of one moment's the larger numbers are the latest
    moves = np.cumsum(missed.reshape(count, count + 1)[:, ::-1], 1)[:, ::-1]
    return moves, least
