"""Processor cores: how many there are, how ranks share them, and how many threads torch is given. Loads no
torch by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(cores: int, ranks: int) -> int:
    """CPU threads of each of `ranks` that share `cores`: more get in each other's way."""
    return max(1, cores // ranks)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Inside, torch computes on `count` CPU threads; None leaves them as they are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
