"""Every out-of-memory error of the device is recognized, whatever its source; no other error is."""

from __future__ import annotations

import pytest
import torch

from memtune.device import PLATFORMS, is_lost, is_out_of_memory, lost_error


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
        *(RuntimeError(text) for each in PLATFORMS.values() for text in each.out_of_memory),
    ],
)
def test_is_out_of_memory_recognizes_each_source(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("CUDA out of memory"), MemoryError()]
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_errors_of_the_driver_mean_a_lost_device() -> None:
    assert is_lost(torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore"))
    assert not is_lost(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_lost_device_is_one_message() -> None:
    error = lost_error(
        torch.AcceleratorError("CUDA error: unspecified launch failure\nhint"), torch.device("cpu")
    )
    assert error.code == "MT133"
    assert error.evidence == "torch: CUDA error: unspecified launch failure"
    assert "resume from the last checkpoint" in error.fix
