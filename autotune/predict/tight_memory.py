"""Reserved memory that exceeds a limit: the allocator's retries, their time, and settings that avoid them.

Where a segment cannot be allocated, PyTorch's caching allocator synchronizes, returns all unused cached
segments to the driver and asks again (`CUDACachingAllocator.cpp` `malloc`, `release_cached_blocks`); later
steps allocate these segments again. So a step whose allocated bytes fit runs although its reserved bytes
would not, and is slower.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memtune.autotune.predict.allocator_settings import AllocatorSettings
from memtune.autotune.predict.caching_allocator import event_stream, replay
from memtune.program import Step

DEVICE_CALL_S = 0.5e-3
"""Estimate for a cudaMalloc or cudaFree of a segment: both map or unmap memory and synchronize."""
_STEPS = 4
AS_CONFIGURED = "as configured"
"""Name of a config's own settings of the allocator, if they are none of those that are suggested."""
_SUGGESTED = ("", "expandable_segments:True", "max_split_size_mb:512", "max_split_size_mb:128")


@dataclass(frozen=True)
class TightSetting:
    """One setting of the allocator under a limit."""

    settings: str
    """As PYTORCH_ALLOC_CONF has it; empty for torch's defaults."""
    peak_reserved_bytes: int
    retries: int
    """Times per step, in the steady state, that cached memory is returned."""
    retry_s: float
    """Seconds per step of the calls to the driver that this takes."""
    fits: bool
    """Every allocation succeeded."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)


def rank_settings(step: Step, own: AllocatorSettings, limit_bytes: int) -> tuple[TightSetting, ...]:
    """Return `own` and the usual settings for one rank's `step` under a limit, best first."""
    # Settings are ranked by whether all allocations succeed, then by the time of retries, then by
    # reserved bytes.
    events, fewer = event_stream(step, _STEPS), event_stream(step, _STEPS - 1)
    asked = {text: AllocatorSettings.parse(text) for text in _SUGGESTED}
    if own not in asked.values():
        asked[AS_CONFIGURED] = own
    found = []
    for text, settings in asked.items():
        result = replay(events, settings, limit_bytes)
        calls = [int(each) for each in result.native.step_device_calls]
        last = calls[-1] if calls else 0
        steady = result.native.retries - replay(fewer, settings, limit_bytes).native.retries
        found.append(
            TightSetting(
                text,
                result.peak_reserved_bytes,
                steady,
                last * DEVICE_CALL_S if steady else 0.0,
                not result.native.ooms,
            )
        )
    return tuple(
        sorted(found, key=lambda each: (not each.fits, each.retry_s, each.peak_reserved_bytes, each.settings))
    )
