"""Reserved bytes over the limit: retries of the allocator, and settings that avoid them."""

from __future__ import annotations

from support.synthetic_steps import make_step

from memtune.autotune.predict.allocator_settings import AllocatorSettings
from memtune.autotune.predict.tight_memory import rank_settings
from memtune.program.step import Step

MIB = 2**20


def fragmented() -> Step:
    """Three storages of 60 MiB, then one of 100 MiB, in whose segment only one of them fits in the next
    step."""
    return make_step(
        3,
        4,
        storages_bytes=[60 * MIB] * 3 + [100 * MIB],
        storages_producer=[0, 0, 0, 2],
        storages_held_until=[1, 1, 1, 2],
    )


def test_settings_are_ranked_by_whether_allocations_succeed_then_by_reserved_bytes() -> None:
    limited = rank_settings(fragmented(), AllocatorSettings(), 200 * MIB)
    by_name = {each.settings: each for each in limited}
    assert limited[0].settings == "expandable_segments:True"
    assert limited[0].fits
    assert limited[0].retries == 0
    assert not by_name[""].fits
    free = rank_settings(fragmented(), AllocatorSettings(), 1000 * MIB)
    assert all(each.fits for each in free)
    assert free[0].peak_reserved_bytes == min(each.peak_reserved_bytes for each in free)


def test_configured_settings_are_ranked_too() -> None:
    own = AllocatorSettings.parse("max_split_size_mb:64")
    assert "as configured" in {each.settings for each in rank_settings(fragmented(), own, 1000 * MIB)}
