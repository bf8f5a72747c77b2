"""Parameters side by side in pieces of memory of one size, in the order in which they are used: shared by mechanism and pass.

A chunk moves as a whole, so a link carries few large copies, and pieces of one size never break a caching allocator's memory up.
No parameter lies in two chunks; what is left at the end of each is the waste.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from memtune.residency import Units, order_of_use

ALIGNMENT: Final = 256
"""Bytes of which each parameter's place is a multiple: kernels choose by alignment, and the bits must not depend on the place."""


def aligned(n_bytes: int) -> int:
    """The bytes that a parameter of `n_bytes` takes in a chunk."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Chunks:
    """Where each parameter lies; parameters are in the order of use. Equal arguments of `pack` give one object."""

    chunk_bytes: int
    chunk: Units
    """(parameters,) chunk of each one, ascending."""
    offset: Units
    """(parameters,) byte in its chunk at which each one begins."""
    of_block: tuple[Units, ...]
    """The chunks that each block's parameters lie in."""
    gathered: bool = False
    """They hold a rank's rows, used as `residency.order_of_use` says."""

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunk[-1] + 1

    @property
    def n_bytes(self) -> int:
        """Bytes of all chunks, what is wasted counted."""
        return self.count * self.chunk_bytes

    def uses(self, ahead: int = 0) -> tuple[Units, ...]:
        """The chunks of each moment of a step, and those of the `ahead` moments that follow it."""
        return _uses(self, ahead)


@functools.lru_cache(maxsize=1024)
def _uses(chunks: Chunks, ahead: int) -> tuple[Units, ...]:
    order, of_block = order_of_use(len(chunks.of_block), gathered=chunks.gathered), (*chunks.of_block, ())  # the last serves -1
    return tuple(
        tuple(dict.fromkeys(chunk for block in order[at : at + 1 + ahead] for chunk in of_block[block]))
        for at in range(len(order))
    )


@functools.lru_cache(maxsize=512)
def pack(n_bytes: Units, block: Units, chunk_bytes: int, gathered: bool = False) -> Chunks:
    """Parameters into chunks, one after the other; a new chunk begins where the one at hand has no room.

    Args:
        n_bytes: What each parameter takes, in the order of use.
        block: The block of each parameter, ascending from 0.
        chunk_bytes: At least the bytes of the largest parameter.
        gathered: They are a rank's rows.

    Raises:
        ValueError: A parameter is larger than a chunk.
    """
    if max(n_bytes) > chunk_bytes:
        raise ValueError(f"a parameter of {max(n_bytes)} bytes has no place in a chunk of {chunk_bytes}")
    at, filled, chunk, offset = 0, 0, [], []
    for size in n_bytes:
        if filled + size > chunk_bytes:
            at, filled = at + 1, 0
        chunk.append(at)
        offset.append(filled)
        filled += size
    of_block: list[list[int]] = [[] for _ in range(block[-1] + 1)]
    for index, each in zip(block, chunk, strict=True):
        if each not in of_block[index][-1:]:
            of_block[index].append(each)
    return Chunks(chunk_bytes, tuple(chunk), tuple(offset), tuple(map(tuple, of_block)), gathered)
