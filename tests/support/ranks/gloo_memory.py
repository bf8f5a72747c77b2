"""Bytes on gloo's ranks: its threads hold the message of a finished collective until they next run, on a busy
machine for milliseconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from statistics import median_high

from memtune.memory.ledger import Ledger


def freed_to(ledger: Ledger, most_bytes: int | None = None, limit_s: float = 10.0) -> int:
    """Free the models before, wait until live bytes no longer change, and return them.

    Args:
        ledger: Of this process.
        most_bytes: Wait until at most these are live.
        limit_s: Longest wait.
    """
    gc.collect()  # models are in cycles
    end, before_bytes = time.monotonic() + limit_s, -1
    while (live_bytes := ledger.live_bytes()) != before_bytes or (
        most_bytes is not None and live_bytes > most_bytes
    ):
        if time.monotonic() > end:
            break
        before_bytes = live_bytes
        time.sleep(0.05)
    return live_bytes


def are_within(peaks: Sequence[int], low: float, high: float) -> bool:
    """Return whether no peak is below `low`, and most are within `high`: a held message adds to one step."""
    return low <= min(peaks) and median_high(peaks) <= high
