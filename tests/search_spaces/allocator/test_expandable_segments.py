"""Allocators that are an option of torch's: torch reads the written option; on CPU they are refused
by name.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memtune.autotune.predict.allocator_settings import AllocatorSettings
from memtune.search_spaces import find
from memtune.technique import Target, Technique

OPTIONS = {"expandable_segments": ("expandable_segments", True), "async": ("backend", "cudaMallocAsync")}


@pytest.fixture(params=OPTIONS)
def technique(request: pytest.FixtureRequest) -> Technique:
    return find("allocator", request.param)(kind=request.param)


def test_torch_and_the_model_read_what_env_writes(technique: Technique) -> None:
    name, value = OPTIONS[technique.kind]
    env = technique.env()
    assert set(env) == {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    assert getattr(AllocatorSettings.from_env(env), name) == value
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        for text in env.values():
            torch._C._accelerator_setAllocatorSettings(text)
            assert torch._C._accelerator_getAllocatorSettings() == f"{name}:{value}"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_has_no_effect_on_cpu(technique: Technique) -> None:
    cpu = Target(SimpleNamespace(device="cpu"))  # type: ignore[arg-type]  # it reads the device alone
    cuda = Target(SimpleNamespace(device="cuda"))  # type: ignore[arg-type]
    assert "no effect on CPU" in str(technique.fits(None, cpu))  # type: ignore[arg-type]
    assert technique.record(cpu) == {}
    assert technique.fits(None, cuda) is None  # type: ignore[arg-type]
    assert technique.record(cuda) == {"allocator": dict([OPTIONS[technique.kind]])}


def test_refused_where_nccl_registers_segments(technique: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Target(SimpleNamespace(device="cuda"), ranks) for ranks in (1, 2))  # type: ignore[arg-type]
    assert technique.fits(None, two) is None  # type: ignore[arg-type]
    monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
    assert "NCCL registers" in str(technique.fits(None, two))  # type: ignore[arg-type]
    assert technique.fits(None, one) is None  # type: ignore[arg-type]
