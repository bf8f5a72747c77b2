"""Byte quota: tensors in full as they are saved, and part of one at the end of the call."""

from __future__ import annotations

from hypothesis import given, strategies as st

from memtune.activations.offload.selection_plan import ByteShare


@given(sizes=st.lists(st.integers(1, 10**11), max_size=30), fraction=st.floats(0, 1))
def test_share_is_met_to_the_byte_by_cutting_one_tensor(sizes: list[int], fraction: float) -> None:
    share, gone, stayed = ByteShare[int](fraction), 0, []
    for number, n_bytes in enumerate(sizes):
        if share.is_offloaded_whole(number, n_bytes):
            gone += n_bytes
        else:
            stayed.append(number)
        assert gone <= round(fraction * sum(sizes[: number + 1]))
    rest = share.partial_tensor()
    if rest is not None:
        cut, n_bytes = rest
        assert cut == stayed[-1]
        assert 0 < n_bytes < sizes[cut]
        gone += n_bytes
    assert gone == round(fraction * sum(sizes))


def test_shares_zero_and_one_cut_no_tensor() -> None:
    for fraction, leaves in ((1.0, True), (0.0, False)):
        share = ByteShare[str](fraction)
        assert share.is_offloaded_whole("x", 3) is leaves
        assert share.partial_tensor() is None
