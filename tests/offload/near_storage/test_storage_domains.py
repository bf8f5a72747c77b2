"""Division of parameters over storage domains, and the order of a step's actions."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from memtune.offload.near_storage.storage_domains import (
    ALIGN,
    OFFLOAD,
    READ,
    RELOAD,
    SLOTS,
    UPDATE,
    WRITE_MOMENTS,
    WRITE_WEIGHTS,
    divide,
    step_actions,
    topk_layout,
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([2, 4]), st.integers(0, 2)), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.integers(1, 30),
)
def test_divide_puts_every_element_in_one_place_and_makes_equal_parts(
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
            count, places = topk_layout(segment, itemsize[segment.parameter], 0.25)
            assert (
                places + 4 * count <= ends[2] - segment.slot
            )  # values and indices fit into the gradient's slot
        assert ends == [group.numel, group.moments, group.slot_bytes]
    assert found == [(parameter, i) for parameter, count in enumerate(numel) for i in range(count)]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(2, 4))
def test_step_actions_reuse_buffers_and_slots_only_when_free(counts: list[int], buffers: int) -> None:
    order = step_actions(counts, buffers)
    at = {action: i for i, action in enumerate(order)}
    wanted = {
        (kind, domain, i) for domain, count in enumerate(counts) for i in range(count) for kind in range(6)
    }
    assert len(order) == len(at)
    assert set(at) == wanted
    for domain, count in enumerate(counts):
        for i in range(count):
            acts = [at[kind, domain, i] for kind in (READ, UPDATE, WRITE_WEIGHTS, WRITE_MOMENTS)]
            assert acts == sorted(acts)
            assert at[OFFLOAD, domain, i] < at[UPDATE, domain, i] < at[RELOAD, domain, i]
            if i >= buffers:
                assert at[WRITE_MOMENTS, domain, i - buffers] < at[READ, domain, i]
            if i >= SLOTS:
                assert at[RELOAD, domain, i - SLOTS] < at[OFFLOAD, domain, i]
            if i + 1 < count:  # weights are copied while the next sub-group is updated, which has been read
                assert at[UPDATE, domain, i + 1] < at[RELOAD, domain, i]
                assert buffers < 3 or at[READ, domain, i + 1] < at[UPDATE, domain, i]
