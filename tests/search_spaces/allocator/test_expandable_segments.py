from __future__ import annotations

from types import SimpleNamespace

import torch

from memtune.search_spaces.allocator.expandable_segments import ExpandableSegments
from memtune.technique import Target


def test_torch_reads_what_env_writes():
    env = ExpandableSegments().env()
    assert set(env) == {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        for value in env.values():
            torch._C._accelerator_setAllocatorSettings(value)
            assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_has_no_effect_on_cpu():
    cpu = Target(SimpleNamespace(device="cpu"))  # type: ignore[arg-type]  # it reads the device alone
    cuda = Target(SimpleNamespace(device="cuda"))  # type: ignore[arg-type]
    assert "no effect on CPU" in str(ExpandableSegments().fits(None, cpu))  # type: ignore[arg-type]
    assert ExpandableSegments().record(cpu) == {}
    assert ExpandableSegments().fits(None, cuda) is None  # type: ignore[arg-type]
    assert ExpandableSegments().record(cuda) == {"allocator": {"expandable_segments": True}}
