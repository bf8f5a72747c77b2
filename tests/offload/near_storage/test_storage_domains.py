"""Parameters divided evenly over storage domains, and the order of a step's acts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memtune.offload.near_storage.storage_domains import (
    ALIGN,
    DOWN,
    LATER,
    READ,
    SLOTS,
    UP,
    UPDATE,
    WRITE,
    divide,
    sent,
    turns,
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([2, 4]), st.integers(0, 2)), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.integers(1, 30),
)
def test_every_element_is_in_one_place_and_parts_are_equal(
    sizes: list[tuple[int, int, int]], domains: int, most: int
) -> None:
    numel, itemsize, moments = zip(*sizes, strict=True)
    layout = divide(numel, itemsize, moments, domains, most)
    parts = [sum(group.numel for group in groups) for groups in layout.domains]
    assert len(parts) == domains
    assert max(parts) - min(parts) <= 1
    found = []
    for group in (each for groups in layout.domains for each in groups):
        assert 0 < group.numel <= most
        ends = [0, 0, 0]
        for segment in group.segments:
            assert [segment.weight, segment.moment, segment.slot] == ends
            found += [(segment.parameter, i) for i in range(segment.start, segment.start + segment.numel)]
            bytes_ = segment.numel * itemsize[segment.parameter]
            ends[0] += segment.numel
            ends[1] += segment.numel * moments[segment.parameter]
            ends[2] += -(-bytes_ // ALIGN) * ALIGN
            count, places = sent(segment, itemsize[segment.parameter], 0.25)
            assert (
                places + 4 * count <= ends[2] - segment.slot
            )  # what is sent has room where the gradient has
        assert ends == [group.numel, group.moments, group.slot_bytes]
    assert found == [(parameter, i) for parameter, count in enumerate(numel) for i in range(count)]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(2, 4))
def test_buffers_and_slots_are_free_when_they_are_used_again(counts: list[int], buffers: int) -> None:
    order = turns(counts, buffers)
    at = {turn: i for i, turn in enumerate(order)}
    wanted = {
        (what, domain, i) for domain, count in enumerate(counts) for i in range(count) for what in range(6)
    }
    assert len(order) == len(at)
    assert set(at) == wanted
    for domain, count in enumerate(counts):
        for i in range(count):
            acts = [at[what, domain, i] for what in (READ, UPDATE, WRITE, LATER)]
            assert acts == sorted(acts)
            assert at[DOWN, domain, i] < at[UPDATE, domain, i] < at[UP, domain, i]
            if i >= buffers:
                assert at[LATER, domain, i - buffers] < at[READ, domain, i]
            if i >= SLOTS:
                assert at[UP, domain, i - SLOTS] < at[DOWN, domain, i]
            if i + 1 < count:  # weights go up while the next sub-group is updated, which has been read
                assert at[UPDATE, domain, i + 1] < at[UP, domain, i]
                assert buffers < 3 or at[READ, domain, i + 1] < at[UPDATE, domain, i]
