"""The C library's heap, where tensors on a CPU live.

glibc returns freed memory to the system: blocks above a threshold that it moves while the process runs, and
the end of the heap. A step frees and allocates the same tensors again and again, and each time the system
hands out zeroed pages, one fault per 4 KiB. How many depends on where the heap happens to end, so that steps
of one setting differ from process to process. A caching allocator, as torch has for accelerators, keeps them
instead.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

# <malloc.h> of glibc; `mallopt` takes an int, so that -1 is the largest size.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4
_NEVER: Final = -1
_GROWTH_BYTES: Final = 16 * 2**20


@functools.cache
def keep_freed_pages() -> bool:
    """Keep freed host memory in this process for its next tensors, from now on; return False if the C library
    cannot.

    The process then holds its peak until it ends. Without glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _GROWTH_BYTES))
    # A list: each is set, also if the one before cannot be.
    return [mallopt(name, value) for name, value in settings] == [1, 1, 1]
