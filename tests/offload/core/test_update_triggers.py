"""The bound of gradients that wait on the host for overlapped updates."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memtune.offload.core.update_triggers import PendingUpdates, room_bytes


@pytest.mark.parametrize(
    ("n_bytes", "block", "wanted"),
    [((3, 4, 5), (0, 0, 1), 7), ((3, 9, 5), (0, -1, 1), 9), ((3, 9, 5), (-1, -1, -1), 9), ((), (), 0)],
)
def test_room_bytes_is_the_largest_block_or_gradient_outside(
    n_bytes: tuple[int, ...], block: tuple[int, ...], wanted: int
) -> None:
    assert room_bytes(n_bytes, block) == wanted


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 20))
def test_pending_updates_end_in_order_and_stay_within_the_room(sizes: list[int], room: int) -> None:
    """Only the rounds that must end are ended; a round larger than the room is alone."""
    waiting, there, gone = PendingUpdates[int](room), list[int](), list[int]()
    for number, size in enumerate(sizes):
        for each in waiting.make_room(size):
            assert there.pop(0) == each
            assert sum(sizes[other] for other in [each, *there]) + size > room
            gone.append(each)
        waiting.add(number, size)
        there.append(number)
        held = sum(sizes[each] for each in there)
        assert held <= max(room, size) or size == 0
    assert gone + list(waiting.drain()) == list(range(len(sizes)))
    assert not list(waiting.drain())
