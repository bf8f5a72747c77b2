from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from memtune.search_spaces.allocator.native import Native
from memtune.technique import Target

CPU = Target(SimpleNamespace(device="cpu"), budget_bytes=1)  # type: ignore[arg-type]  # it reads the device alone
CUDA = Target(SimpleNamespace(device="cuda"), budget_bytes=1)  # type: ignore[arg-type]
SEARCHED: dict[str, object] = {
    "max_split_size_mb": 128,
    "roundup_power2_divisions": 8,
    "garbage_collection_threshold": 0.8,
}
RARE: dict[str, object] = {
    "roundup_power2_divisions": "[256:1,512:2,>:8]",
    "large_segment_size_mb": 32,
    "max_non_split_rounding_mb": 64,
    "per_process_memory_fraction": 0.5,
    "throw_on_cudamalloc_oom": True,
    "release_lock_on_cudamalloc": False,
    "graph_capture_record_stream_reuse": True,
    "pinned_use_cuda_host_register": True,
    "pinned_num_register_threads": 8,
    "pinned_use_background_threads": True,
    "pinned_reserve_segment_size_mb": 512,
    "pinned_max_round_threshold_mb": 1024,
    "pinned_max_cached_size_mb": 2048,
    "pinned_free_catch_all": True,
}
ALL = Native(**SEARCHED)  # type: ignore[arg-type]


def parsed_by_torch(options: str) -> str:
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(options)
        return torch._C._accelerator_getAllocatorSettings()
    finally:  # torch remembers the size of a segment beyond the settings that it reports
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(before)


def test_knobs_of_torch_are_complete():
    """All options that torch has for CUDA alone, as its header lists them, except those that choose another
    allocator.
    """
    text = (Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h").read_text()
    listed = re.search(
        r"keys\{(.*?)\}", text.replace('cud"\n        "a', "cuda"), re.S
    )  # some are two adjacent texts there
    assert listed is not None
    found = {name for name in re.findall(r'"(\w+)"', listed[1]) if "hip" not in name}
    assert len(found) > 8
    assert found - set(Native.model_fields) == {"backend"}


@pytest.mark.parametrize(
    "knobs",
    [{name: value} for name, values in Native().choices().items() for value in values if value is not None]
    + [{name: value} for name, value in RARE.items()]
    + [
        {"max_split_size_mb": 20},
        {"roundup_power2_divisions": 1},
        {"roundup_power2_divisions": 64},
        {**SEARCHED, **RARE},
    ],
    ids=str,
)
def test_torch_reads_what_env_writes(knobs: dict[str, object]):
    env = Native(**knobs).env()  # type: ignore[arg-type]
    assert env["PYTORCH_ALLOC_CONF"] == env["PYTORCH_CUDA_ALLOC_CONF"]
    wanted = ",".join(f"{name}:{value}" for name, value in knobs.items())
    assert sorted(parsed_by_torch(env["PYTORCH_ALLOC_CONF"]).split(",")) == sorted(wanted.split(","))


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_split_size_mb": 10},
        {"roundup_power2_divisions": 3},
        {"garbage_collection_threshold": 1.0},
        {"roundup_power2_divisions": "[300:1]"},
        {"large_segment_size_mb": 10},
        {"max_split_size_mb": 24, "large_segment_size_mb": 32},
    ],
    ids=str,
)
def test_values_that_torch_refuses_are_refused(knobs: dict[str, object]):
    with pytest.raises(Exception, match=r"too small|power of 2|invalid|must be > 10"):
        parsed_by_torch(",".join(f"{name}:{value}" for name, value in knobs.items()))
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
