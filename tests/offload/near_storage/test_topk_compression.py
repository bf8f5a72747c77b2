"""Top-k compression: sent gradients plus the residual equal all gradients, to the bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

import memtune.offload.near_storage.topk_compression  # noqa: F401  (defines torch.ops.memtune.largest_)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.floats(0.01, 1.0), st.integers(0, 99))
def test_largest_keeps_the_sum_of_residual_and_gradient(numel: int, share: float, seed: int) -> None:
    """Without error feedback (unsent gradients dropped) the first comparison fails."""
    torch.manual_seed(seed)
    kept, count = torch.zeros(numel), max(1, int(share * numel))
    for _ in range(4):
        gradient = torch.randn(numel)
        whole = kept + gradient
        values, places = torch.ops.memtune.largest_(kept, gradient, count)
        assert places.dtype is torch.int32
        assert len(places.unique()) == count
        sent = torch.zeros(numel).index_copy(0, places.long(), values)
        assert torch.equal(kept + sent, whole)
        assert not (kept[places.long()]).any()
        assert count == numel or values.abs().min() >= kept.abs().max()


def test_largest_loses_no_gradient_over_many_steps() -> None:
    """Integers, so that sums are exact in any order."""
    kept, all_of_it, all_sent = torch.zeros(50), torch.zeros(50), torch.zeros(50)
    for step in range(20):
        gradient = torch.randint(-9, 10, (50,), generator=torch.Generator().manual_seed(step)).float()
        values, places = torch.ops.memtune.largest_(kept, gradient, 3)
        all_of_it += gradient
        all_sent[places.long()] += values
    assert torch.equal(all_sent + kept, all_of_it)
