"""Whether an error says that the device had no memory left, whoever raised it."""

from __future__ import annotations

import torch

_SAID_BY = ("CUDA out of memory", "CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
"""Beginnings of what others than torch's own allocator say, in a plain RuntimeError: memtune's allocator, which knows nothing of
torch and cannot raise its class; the driver, of a kernel or a context that finds no room beside the allocator; cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """`error` is the device's, of a request that it had no memory for."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).lstrip().startswith(_SAID_BY)
