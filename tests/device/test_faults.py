"""Every out-of-memory error of the device is recognized, whatever its source; no other error is."""

from __future__ import annotations

import pytest
import torch

from memtune.device import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no matter what"),
        RuntimeError(
            "CUDA out of memory: memtune's allocator was asked for 512 bytes on GPU 0; it has 0 bytes"
            " reserved"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "memtune", "driver", "cublas"],
)
def test_is_out_of_memory_recognizes_each_source(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("CUDA out of memory"), MemoryError()]
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
