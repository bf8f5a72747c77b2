"""The blocks whose updates are deferred to the next step."""

from __future__ import annotations

from itertools import combinations

import pytest

from memtune.offload.core.deferred_updates_plan import BlockTimes, deferred_blocks, period_s


def times(
    blocks: int, update_s: float, *, load_s: float = 0.1, down_s: float = 0.1, outside_s: float = 0.5
) -> BlockTimes:
    """Return the times of equal blocks: 1 s forward, 2 s backward."""
    return BlockTimes(
        [1.0] * blocks, [2.0] * blocks, [load_s] * blocks, [down_s] * blocks, [update_s] * blocks, outside_s
    )


def test_blocks_are_not_deferred_if_the_host_keeps_up() -> None:
    assert deferred_blocks(times(8, 1.9)) == frozenset()
    assert period_s(times(8, 1.9), frozenset()) == pytest.approx(0.1 + 8 * 3 + 1.9 + 1.9 + 0.5)


@pytest.mark.parametrize("update_s", [2.0, 2.5, 3.0, 4.0, 6.0, 10.0])
@pytest.mark.parametrize("down_s", [0.1, 2.5])
def test_deferred_blocks_are_nearly_optimal(update_s: float, down_s: float) -> None:
    """Compared with all sets of seven blocks; never worse than no deferral."""
    each = times(7, update_s, down_s=down_s)
    found = period_s(each, deferred_blocks(each))
    every = (frozenset(late) for count in range(8) for late in combinations(range(7), count))
    best = min(period_s(each, late) for late in every)
    assert best <= found <= min(1.12 * best, period_s(each, frozenset()))


def test_period_equals_update_time_if_the_host_is_always_busy() -> None:
    """The period is all updates and the waits before the first and after the last one: it overlaps with the
    next step.
    """
    slow = times(12, 3.5)
    late = deferred_blocks(slow)
    assert len(late) > 3
    assert 12 * 3.5 < period_s(slow, late) < 1.25 * 12 * 3.5 < period_s(slow, frozenset())


@pytest.mark.parametrize("update_s", [1.9, 2.5, 3.0, 4.0])
def test_evenly_spread_blocks_are_deferred_if_better(update_s: float) -> None:
    """With half of the blocks: every other one and the last, which forward uses last."""
    each = times(12, update_s)
    alone, among = deferred_blocks(each), deferred_blocks(each, (0.25, 0.5))
    assert period_s(each, among) <= period_s(each, alone)
    assert among in (alone, frozenset(range(1, 12, 2)), frozenset({3, 7, 11}))
    assert deferred_blocks(times(12, 1.9), (0.25, 0.5)) != deferred_blocks(times(12, 1.9)) == frozenset()
