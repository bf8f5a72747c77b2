from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from memtune.search_spaces.allocator.native import Native
from memtune.technique import Target

CPU = Target(SimpleNamespace(device="cpu"), budget_bytes=1)  # type: ignore[arg-type]  # it reads the device alone
CUDA = Target(SimpleNamespace(device="cuda"), budget_bytes=1)  # type: ignore[arg-type]
ALL = Native(max_split_size_mb=128, roundup_power2_divisions=8, garbage_collection_threshold=0.8)


def parsed_by_torch(options: str) -> str:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(options)
        return torch._C._accelerator_getAllocatorSettings()
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    "knobs",
    [{name: value} for name, values in Native().choices().items() for value in values if value is not None]
    + [dict(ALL.knobs()), {"max_split_size_mb": 20}, {"roundup_power2_divisions": 1}, {"roundup_power2_divisions": 64}],
    ids=str,
)
def test_torch_reads_what_env_writes(knobs: dict[str, object]):
    env = Native(**knobs).env()  # type: ignore[arg-type]
    assert env["PYTORCH_ALLOC_CONF"] == env["PYTORCH_CUDA_ALLOC_CONF"]
    assert parsed_by_torch(env["PYTORCH_ALLOC_CONF"]) == ",".join(f"{name}:{value}" for name, value in knobs.items())


@pytest.mark.parametrize(
    "knobs",
    [{"max_split_size_mb": 10}, {"roundup_power2_divisions": 3}, {"garbage_collection_threshold": 1.0}],
    ids=str,
)
def test_what_torch_refuses_is_refused_here(knobs: dict[str, object]):
    (option,) = knobs.items()
    with pytest.raises(Exception, match=r"too small|power of 2|invalid"):
        parsed_by_torch(f"{option[0]}:{option[1]}")
    with pytest.raises(ValidationError):
        Native(**knobs)  # type: ignore[arg-type]


def test_defaults_ask_for_nothing():
    assert Native().env() == {}
    assert Native().fits(None, CPU) is None  # type: ignore[arg-type]


def test_knobs_have_no_effect_on_cpu():
    reason = ALL.fits(None, CPU)  # type: ignore[arg-type]
    assert "no effect on CPU" in str(reason)
    assert ALL.record(CPU) == Native().record(CPU)
    assert ALL.fits(None, CUDA) is None  # type: ignore[arg-type]
    assert ALL.record(CUDA) != Native().record(CUDA)


def test_threshold_needs_a_limit():
    free = Target(CUDA.hardware)
    assert "limit" in str(Native(garbage_collection_threshold=0.8).fits(None, free))  # type: ignore[arg-type]
    assert Native(max_split_size_mb=128).fits(None, free) is None  # type: ignore[arg-type]
