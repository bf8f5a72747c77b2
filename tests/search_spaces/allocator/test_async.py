"""The model of cudaMallocAsync; its option is tested together with that of expandable segments."""

from __future__ import annotations

from support.zoo_paths import ZOO

from memtune.autotune.predict.caching_allocator import AllocatorSettings, event_stream, replay
from memtune.search_spaces import find
from memtune.testing.drift_check import plain_program
from memtune.units import MIB

PAGE_BYTES = 32 * MIB


def test_predicted_peak_is_live_bytes_in_whole_pages() -> None:
    settings = AllocatorSettings.from_env(find("allocator", "async")(kind="async").env())
    result = replay(event_stream(plain_program(ZOO["gpt"], 64).step, 3), settings, None)
    assert result.peak_reserved_bytes == -(-result.peak_allocated_bytes // PAGE_BYTES) * PAGE_BYTES
    assert "approximately" in find("allocator", "async").title
