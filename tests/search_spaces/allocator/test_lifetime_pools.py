"""Training from pools by lifetime: the plain model's bits, lifetimes that are learned, steps of other
sizes.

Distinguishing test: kept and transient blocks in alternation, then one request as large as the transient
ones, need no more than is live.
"""

from __future__ import annotations

import pytest
import torch
from support.suites.arena_suite import ArenaSuite, trained

from memtune.memory import arena
from memtune.search_spaces.allocator.lifetime_pools import LifetimePools

pytestmark = pytest.mark.native_ledger


class TestLifetimePools(ArenaSuite):
    technique = LifetimePools

    def test_equal_steps_are_learned_once_and_ask_the_driver_for_nothing(self) -> None:
        trained([4] * 6, LifetimePools())
        before = arena.statistics()
        assert before.plans == 1
        assert before.deviations == 0
        _, messages = trained([4] * 6, LifetimePools())
        assert not messages

    def test_steps_of_other_sizes_are_served_bit_for_bit(self) -> None:
        sizes = [4, 4, 4, 6, 4, 3, 8, 2, 4]
        got, messages = trained(sizes, LifetimePools(transient_within=8, relearn_after=1))
        wanted, _ = trained(sizes, None)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert arena.statistics().plans >= 1
        assert not messages
