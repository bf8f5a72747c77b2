"""memtune's own allocator in the simulator: the code that trains, over books instead of memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.zoo_paths import ZOO

from memtune.autotune.predict.caching_allocator import (
    Action,
    AllocatorEvents,
    AllocatorSettings,
    event_stream,
    replay,
)
from memtune.memory.arena_settings import VARIABLE, ArenaSettings
from memtune.testing.drift_check import plain_program
from memtune.units import MIB

GMLAKE = AllocatorSettings(arena=ArenaSettings(kind="gmlake"))
POOLS = AllocatorSettings(arena=ArenaSettings(kind="lifetime_pools", pools=True))
PLANNED = AllocatorSettings(arena=ArenaSettings(kind="planned_layout", planned=True))


def events_of(rows: list[tuple[Action, int, int]]) -> AllocatorEvents:
    action, storage, n_bytes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    n = np.arange(len(rows))
    return AllocatorEvents.from_columns(
        np.stack([action, storage, n_bytes, 0 * n, n, n * 0 - 1]), np.array([0])
    )


def test_arena_settings_round_trip_through_environment() -> None:
    made = ArenaSettings(kind="gmlake", defragment=False, stitch_from_mb=256, reuse_limit=3)
    assert ArenaSettings.parse(made.text()) == made
    assert (
        AllocatorSettings.from_env({VARIABLE: made.text(), "PYTORCH_ALLOC_CONF": "backend:native"}).arena
        == made
    )
    with pytest.raises(ValueError, match="has no option 'colour'"):
        ArenaSettings.parse("kind:gmlake,colour:3")


def test_stitching_arena_reserves_less_than_caching_allocator() -> None:
    """Every second of 16 blocks is freed; then one as large as all the holes is asked for."""
    rows = [(Action.ALLOC, i, 32 * MIB) for i in range(16)] + [(Action.FREE, i, 0) for i in range(0, 16, 2)]
    events = events_of([*rows, (Action.ALLOC, 16, 256 * MIB)])
    assert replay(events, GMLAKE, None).peak_reserved_bytes == 512 * MIB
    assert replay(events, AllocatorSettings(), None).peak_reserved_bytes == 768 * MIB
    lazy = AllocatorSettings(arena=ArenaSettings(kind="gmlake", stitch_from_mb=512))
    assert replay(events, lazy, None).peak_reserved_bytes == 768 * MIB
    assert not replay(events, lazy, 512 * MIB).native.ooms  # memory has run out: stitched all the same
    assert replay(events, GMLAKE, 511 * MIB).native.ooms == 1


@pytest.mark.parametrize("arena", [GMLAKE, PLANNED, POOLS], ids=["gmlake", "planned", "pools"])
def test_arena_makes_no_driver_call_in_steady_state(arena: AllocatorSettings) -> None:
    result = replay(event_stream(plain_program(ZOO["gpt"], 8).step, 8), arena, None)
    assert result.native.step_device_calls[5:].tolist() == [0, 0, 0]
    assert result.native.step_device_calls[0] > 0
    assert result.native.deviations == 0


def test_planned_layout_reserves_little_more_than_live_bytes() -> None:
    result = replay(event_stream(plain_program(ZOO["gpt"], 64).step, 6), PLANNED, None)
    assert result.native.plan_bytes <= 1.01 * result.native.plan_bound_bytes
    steady = result.step_reserved_bytes[-1]
    assert steady <= 1.05 * result.step_allocated_bytes[-1] + 4 * MIB  # pages of 2 MiB of a small model


def test_lifetime_pools_reserve_no_more_than_one_arena() -> None:
    result = replay(event_stream(plain_program(ZOO["gpt"], 64).step, 6), POOLS, None)
    assert result.native.deviations == 0
    assert (
        result.step_reserved_bytes[-1] <= 1.1 * result.step_allocated_bytes[-1] + 8 * MIB
    )  # a page a pool of a small model


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB)), min_size=1, max_size=60),
    st.sampled_from((GMLAKE, PLANNED, POOLS)),
)
def test_arena_never_uses_more_than_reserved(asked: list[tuple[bool, int]], arena: AllocatorSettings) -> None:
    rows, alive = [], []
    for number, (free, n_bytes) in enumerate(asked):
        if free and alive:
            rows.append((Action.FREE, alive.pop(n_bytes % len(alive)), 0))
        rows.append((Action.ALLOC, number, n_bytes))
        alive.append(number)
    result = replay(events_of(rows), arena, None, timeline=True)
    assert (result.native.reserved_bytes >= result.native.allocated_bytes).all()
    assert result.native.ooms == 0
