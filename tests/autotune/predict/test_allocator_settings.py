"""Allocator settings are read as torch reads them: torch itself is asked for every text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memtune.autotune.predict.allocator_settings import AllocatorSettings
from memtune.errors import UsageError
from memtune.search_spaces.allocator.expandable_segments import ExpandableSegments
from memtune.search_spaces.allocator.native import Native

GOOD = (
    "",
    "max_split_size_mb:128",
    "max_split_size_mb:128,",
    " max_split_size_mb : 128 , expandable_segments:False",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "max_split_size_mb:40,large_segment_size_mb:40",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[256:8,]",
    "roundup_power2_divisions:[1048576:8]",
    "garbage_collection_threshold:0.6,expandable_segments:True",
    "pinned_use_background_threads:True",
)
BAD = (
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_split_size_mb=128",
    "max_split_size_mb:abc",
    "max_split_size_mb:19",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "max_non_split_rounding_mb:19",
    "large_segment_size_mb:10",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:nan",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[3:8]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[256:8",
    "expandable_segments:true",
    "max_split_size_mb:128 garbage_collection_threshold:0.5",
    "large_segment_size_mb:20,,",
)


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    yield
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")


@pytest.mark.parametrize("text", GOOD)
def test_parse_accepts_settings_of_torch(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(text)
    AllocatorSettings.parse(text)


@pytest.mark.parametrize("text", BAD)
def test_parse_refuses_settings_that_torch_refuses(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(
        "large_segment_size_mb:20"
    )  # it keeps this one from call to call
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(text)
    with pytest.raises(UsageError) as error:
        AllocatorSettings.parse(text)
    assert error.value.code == "MT140"
    assert text in error.value.what


def test_parse_returns_values() -> None:
    found = AllocatorSettings.parse(
        "max_split_size_mb:64,max_non_split_rounding_mb:30,large_segment_size_mb:24,garbage_collection_threshold:0.5,"
        "expandable_segments:True,per_process_memory_fraction:0.25,backend:cudaMallocAsync,roundup_power2_divisions:8"
    )
    assert found == AllocatorSettings(
        max_split_size_mb=64,
        max_non_split_rounding_mb=30,
        large_segment_size_mb=24,
        garbage_collection_threshold=0.5,
        expandable_segments=True,
        per_process_memory_fraction=0.25,
        backend="cudaMallocAsync",
        roundup_power2_divisions=(8,) * 16,
    )
    assert AllocatorSettings.parse("") == AllocatorSettings()


def test_parse_divisions_by_size() -> None:
    """The values that torch's own test of its configuration expects of this text, by power of two from 1 MiB
    on.
    """
    found = AllocatorSettings.parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    assert found.roundup_power2_divisions == (8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1)
    assert AllocatorSettings.parse("roundup_power2_divisions:[>:8]").roundup_power2_divisions == (
        0,
        *[8] * 15,
    )


def test_parse_names_unknown_setting_and_nearest_known() -> None:
    with pytest.raises(UsageError, match=r"'max_split_size'. Did you mean 'max_split_size_mb'\?"):
        AllocatorSettings.parse("max_split_size:128")


def test_allocator_technique_environment_parses_to_its_settings() -> None:
    assert AllocatorSettings.from_env(Native().env()) == AllocatorSettings()
    assert AllocatorSettings.from_env(ExpandableSegments().env()) == AllocatorSettings(
        expandable_segments=True
    )
    assert AllocatorSettings.from_env(
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    ).expandable_segments
    knobs = Native(max_split_size_mb=128, roundup_power2_divisions=8, garbage_collection_threshold=0.8)
    assert AllocatorSettings.from_env(knobs.env()) == AllocatorSettings(
        max_split_size_mb=128, roundup_power2_divisions=(8,) * 16, garbage_collection_threshold=0.8
    )


def test_limit_bytes_follow_memory_fraction() -> None:
    assert AllocatorSettings(per_process_memory_fraction=0.25).limit_bytes(1000) == 250
    assert AllocatorSettings(per_process_memory_fraction=1.0).limit_bytes(1000) is None
    assert AllocatorSettings().limit_bytes(1000) is None
