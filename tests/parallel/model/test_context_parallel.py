"""Attention over heads and contexts: every way to divide eight ranks gives what one rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference.attention import HEAD, HEADS, LENGTH, SAMPLES, SHARED, made, one_rank
from support.gloo import run_ranks

from memtune.errors import ApplyError
from memtune.parallel.model.context_groups import Split, grid_of
from memtune.parallel.model.context_parallel import AttentionCall, divided_attention, require_heads
from memtune.runtime.transfer import COUNTERS

EIGHT = [
    Split(heads, 8 // heads, inner, first, zigzag)
    for heads in (1, 2, 4, 8)
    for inner in (1, 2, 4, 8)
    for first in (False, True)
    for zigzag in (False, True)
    if 8 // heads % inner == 0
]


def shares(splits: list[Split], dropout_p: float = 0.0) -> list[tuple[dict[str, int], dict[bool, float]]]:
    """Per split: bytes counted, and how far this rank's output and gradients are off, where later positions
    are masked or not.
    """
    wanted, drawn = dict[bool, list[torch.Tensor]](), dict[bool, torch.Tensor]()
    for causal in (False, True):
        wanted[causal], drawn[causal] = one_rank(causal, dropout_p), torch.get_rng_state()
    group, rank = dist.distributed_c10d._get_default_group().group_name, dist.get_rank()
    found = []
    for split in splits:
        grid, off = grid_of(split, "cpu", group, 1, rank), {}
        for causal, whole in wanted.items():
            *given, gradient = (grid.layout.shard(each, 2) for each in made())
            given = [each.requires_grad_() for each in given]
            COUNTERS.take()
            torch.manual_seed(1)
            out = divided_attention(grid)(*given, dropout_p=dropout_p, is_causal=causal, enable_gqa=True)
            assert torch.equal(torch.get_rng_state(), drawn[causal])
            out.backward(gradient)
            counted = COUNTERS.take()
            mine = [out.detach(), *(each.grad for each in given)]
            off[causal] = max(
                float((one - grid.layout.shard(all_, 2)).abs().max())
                for one, all_ in zip(mine, whole, strict=True)
            )
        found.append((counted, off))
    return found


FOUR = [
    Split(1, 4, 4, False, zigzag=True),
    Split(1, 4, 2, False, zigzag=False),
    Split(2, 2, 2, True, zigzag=True),
    Split(4, 1, 1, False, zigzag=False),
    Split(1, 4, 4, False, zigzag=False, work_sharing=True),
    Split(2, 2, 2, False, zigzag=False, work_sharing=True),
]


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout_of_divided_attention_is_that_of_one_rank(dropout_p: float) -> None:
    for rank in run_ranks(shares, 4, FOUR, dropout_p):
        for split, (_, off) in zip(FOUR, rank, strict=True):
            assert max(off.values()) < 1e-5, (split, off)


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_context_parallel_splits_of_eight_ranks(dropout_p: float) -> None:
    query = SAMPLES * HEADS * LENGTH // 8 * HEAD * 4
    for rank in run_ranks(shares, 8, EIGHT, dropout_p, deadline_s=280):
        for split, (counted, off) in zip(EIGHT, rank, strict=True):
            assert max(off.values()) < 1e-5, (split, off)
            key = query * max(SHARED, split.heads) // HEADS  # repeated until every rank has one
            ring, all_to_all = (
                6 * key * (split.contexts - 1),
                4 * (query + key) * (split.heads - 1) // split.heads,
            )
            assert counted.get("collective", 0) == ring + all_to_all, split


def test_context_parallel_refuses_unsupported_attention() -> None:
    query, key, value, _ = made()
    square: Any = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    for arguments, said in (
        ((query, key, value, square, 0.0, True), "a mask"),
        ((query, key, value, None, 0.0, False), "have shapes"),
        ((query, key[:, :, 1:], value[:, :, 1:], None, 0.0, True), "have shapes"),
        ((query[0], key[0], value[0], None, 0.0, True), "have shapes"),
    ):
        with pytest.raises(ApplyError, match=said):
            AttentionCall(*arguments[:5], enable_gqa=arguments[5]).require_plain()
    with pytest.raises(ApplyError, match="3 ranks do not divide the 8 heads of attention"):
        require_heads(query, key, value, 3)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_require_heads_repeats_keys_for_all_ranks(ranks: int, heads: int) -> None:
    query, key, value, _ = made()
    more, values = require_heads(query, key, value, ranks)
    assert more.shape[1] == heads
    wanted = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, more, values, enable_gqa=True), wanted)
