"""Python's garbage collector where it finds hardly anything; a full collection traverses torch's objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_COLLECT_AFTER = 50_000
"""Object count that triggers a collection while collections are rare."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Turn collections off, as for imports, whose objects stay."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make collections rare, and exclude objects that exist now (torch, the recording)."""
    # A collection takes a tenth of a second and more; recordings and candidates leave hardly any cycles.
    # Objects that the caller froze before remain frozen.
    is_ours, thresholds = gc.get_freeze_count() == 0, gc.get_threshold()
    gc.freeze()
    if thresholds[0]:  # 0: the caller has turned collections off
        gc.set_threshold(max(thresholds[0], _COLLECT_AFTER), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_ours:
            gc.unfreeze()
