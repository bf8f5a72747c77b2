"""Contiguous packs of blocks: filled greedily, or balanced so that the largest pack is as small as possible.

Source: Li et al. 2022, Harmony (VLDB 22), section 4: layers are packed greedily or balanced under a memory
cap.
"""

from __future__ import annotations

from collections.abc import Sequence

from memtune.offload.layer_major.packs import Span, spans


def greedy(n_bytes: Sequence[int], cap_bytes: int) -> tuple[Span, ...]:
    """Return packs of as many blocks as `cap_bytes` holds, filled from the last block on."""
    # A block larger than `cap_bytes` is a pack by itself.
    sizes = [0]
    filled = 0
    # From the end, so that a partial pack is the first one: the last one holds the turnaround and its loss.
    for each in reversed(n_bytes):
        if sizes[-1] and filled + each > cap_bytes:
            sizes.append(0)
            filled = 0
        sizes[-1] += 1
        filled += each
    return spans(sizes[::-1])


def balanced(n_bytes: Sequence[int], count: int) -> tuple[Span, ...]:
    """Return `count` packs whose largest is as small as possible; among equals, the last packs are largest.

    Raises:
        ValueError: There are fewer blocks than packs.
    """
    if not 1 <= count <= len(n_bytes):
        raise ValueError(f"{len(n_bytes)} blocks cannot form {count} packs")
    low, high = max(n_bytes), sum(n_bytes)
    while low < high:  # bisection over the cap: fewer packs need a larger one
        middle = (low + high) // 2
        if len(greedy(n_bytes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return split(greedy(n_bytes, low), count)


def split(packs: tuple[Span, ...], count: int) -> tuple[Span, ...]:
    """Split the largest packs in two until there are `count`; no pack becomes larger."""
    sizes = [last - first for first, last in packs]
    while len(sizes) < count:
        # The first of the largest: later packs stay large, as the turnaround is never recomputed.
        at = max(range(len(sizes)), key=lambda i: (sizes[i], -i))
        sizes[at : at + 1] = [sizes[at] // 2, sizes[at] - sizes[at] // 2]
    return spans(sizes)
