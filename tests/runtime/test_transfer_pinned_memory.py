"""A system that pins no host memory: the GPU's copies use pageable memory, with one warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.device import accelerator
from memtune.runtime import transfer, transfer as page_locked


@pytest.fixture(autouse=True)
def refuses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record requests; pinned memory is refused as the driver does (without a GPU torch refuses with another
    message).
    """
    asked: list[bool] = []
    real = torch.empty_strided

    def empty_strided(*args: Any, pin_memory: bool = False, **rest: Any) -> Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise torch.AcceleratorError(
                "CUDA error: out of memory\nCUDA kernel errors might be reported later"
            )
        return real(*args, **rest)

    monkeypatch.setattr(torch, "empty_strided", empty_strided)
    monkeypatch.setattr(accelerator, "is_present", lambda: True)
    monkeypatch.setattr(page_locked, "_reported", False)
    return asked


@pytest.mark.usefixtures("ssd")
def test_pageable_fallback_reads_from_ssd_and_warns_once(refuses: list[bool]) -> None:
    values = torch.randn(7, 3).t()
    ssd = torch.ops.memtune.to_ssd(values, "weights")
    with pytest.warns(UserWarning, match=r"pins no more host memory .*\(CUDA error: out of memory\)"):
        assert torch.equal(read(ssd), values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(read(ssd), values)
    assert refuses.count(True) == 2  # it is asked for again: memory may have been given back


def read(ssd: Tensor) -> Tensor:
    host: Tensor = torch.ops.memtune.from_ssd(ssd)
    transfer.finish(host)
    return host


def test_pinned_memory_is_not_requested_without_a_gpu(refuses: list[bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transfer.finish(transfer.to_host(torch.arange(float(1 << 15))))
    assert refuses == [False]


def test_page_locked_falls_back_to_pageable_memory() -> None:
    if accelerator.is_started():
        pytest.skip("torch may lock memory here")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            made = page_locked.page_locked(lambda locked: torch.zeros(3, pin_memory=locked), wanted=True)
            assert not made.any()
    (warning,) = warned
    assert "pins no more host memory" in str(warning.message)
