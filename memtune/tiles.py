"""Rows of weights in tiles, the same for whoever brings them and whoever counts their bytes."""

from __future__ import annotations

import functools
from itertools import pairwise


@functools.lru_cache(maxsize=256)
def split_rows(count: int, parts: int) -> tuple[slice, ...]:
    """`count` rows in `parts` runs in order, whose lengths differ by one at most; fewer where there are fewer rows."""
    parts = min(parts, count)
    least, more = divmod(count, parts)
    starts = [i * least + min(i, more) for i in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(starts))
