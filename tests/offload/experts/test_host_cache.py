"""The cache of experts in host memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from memtune.offload.experts.host_cache import expert_traffic, experts_to_read, moments_of


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(0, 3), st.integers(1, 3))
def test_cache_evicts_before_load_and_writes_back_dirty_experts(
    blocks: int, each: int, slots: int, read_ahead: int, on_device: int
) -> None:
    block_of = [block for block in range(blocks) for _ in range(each)]
    total = len(block_of)
    reads = {}
    for rule in ("lfu", "lru", "belady"):
        moved = expert_traffic(block_of, blocks, slots, rule, read_ahead, on_device)  # type: ignore[arg-type]
        assert len(moved) == 2 * blocks + 1
        reads[rule] = sum(len(moment.read) for moment in moved)
        written = [expert for moment in moved for expert in moment.written]
        if slots >= total:
            assert reads[rule] == len(written) == 0
        else:
            assert reads[rule] > 0
            assert max(written.count(expert) for expert in range(total)) <= 1  # each is updated once a step
    if read_ahead == 0:
        assert reads["belady"] <= min(reads["lru"], reads["lfu"])


def test_moments_of_covers_loads_and_update() -> None:
    assert moments_of(3, 1) == ((0, 5, 6), (1, 4, 5), (2, 4))
    assert [len(each) for each in moments_of(3, 3)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("read_ahead", "slots", "found"), [(0, 9, []), (1, 9, [2]), (2, 9, [2, 4, 5]), (2, 4, [2, 4]), (2, 2, [])]
)
def test_experts_to_read_excludes_those_of_the_moment(read_ahead: int, slots: int, found: list[int]) -> None:
    assert experts_to_read(0, read_ahead, slots, [[0, 1], [2], [4, 5]], [[], [], []]) == found
