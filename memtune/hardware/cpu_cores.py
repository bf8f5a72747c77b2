"""CPU cores: their number, the threads of each rank, and torch's thread count. Imports torch only on use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the CPU threads for each of `ranks` that share `cores`; more would contend."""
    return max(1, cores // ranks)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Run torch on `count` CPU threads inside the context; None changes nothing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
