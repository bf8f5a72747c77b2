"""Ranks that attend for others: what one rank computes, the work that each really does, and the bytes that
each receives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference.attention import HEAD, HEADS, LENGTH, SAMPLES, made, one_rank
from support.attention_work import attention_work
from support.gloo import run_ranks
from support.ring_traffic import Contexts

from memtune.parallel.model import balanced_attention
from memtune.parallel.model.context_groups import Split, grid_of
from memtune.parallel.model.context_parallel import divided_attention
from memtune.parallel.sharding.factors import Schedule, by_link
from memtune.runtime.transfer import COUNTERS

Found = tuple[int, float, list[float]]
"""Bytes received, how far output and gradients are off, scores computed in forward and backward over those of
a block.
"""


def helped(splits: list[Split]) -> list[Found]:
    whole = one_rank(causal=True)
    scores = [0.0, 0.0]
    plain = balanced_attention.attend, balanced_attention.attend_backward

    def counted(which: int, query: torch.Tensor, key: torch.Tensor, causal: bool) -> None:
        scores[which] += query.shape[2] * key.shape[2] * (0.5 if causal else 1)

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, **how: Any
    ) -> object:
        counted(0, query, key, causal)
        return plain[0](query, key, value, causal=causal, **how)

    def backward(
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        *more: Any,
        causal: bool,
        **how: Any,
    ) -> object:
        counted(1, query, key, causal)
        return plain[1](gradient, query, key, *more, causal=causal, **how)

    group, rank = dist.distributed_c10d._get_default_group().group_name, dist.get_rank()
    found: list[Found] = []
    balanced_attention.attend, balanced_attention.attend_backward = attend, backward  # type: ignore[assignment]
    try:
        for split in splits:
            grid = grid_of(split, "cpu", group, 1, rank)
            *given, gradient = (grid.layout.shard(each, 2) for each in made())
            given = [each.requires_grad_() for each in given]
            COUNTERS.take()
            scores[:] = [0.0, 0.0]
            out = divided_attention(grid)(*given, is_causal=True, enable_gqa=True)
            out.backward(gradient)
            mine = [out.detach(), *(each.grad for each in given)]
            off = max(
                float((one - grid.layout.shard(all_, 2)).abs().max())
                for one, all_ in zip(mine, whole, strict=True)
            )
            block = (LENGTH // split.contexts) ** 2
            found.append((COUNTERS.take().get("collective", 0), off, [each / block for each in scores]))
    finally:
        balanced_attention.attend, balanced_attention.attend_backward = plain
    return found


def assert_helped(ranks: int, splits: list[Split]) -> None:
    query = SAMPLES * HEADS * LENGTH // ranks * HEAD * 4
    for rank, mine in enumerate(run_ranks(helped, ranks, splits)):
        for split, (n_bytes, off, scores) in zip(splits, mine, strict=True):
            assert off < 1e-5, (split, off)
            context = split.place(rank)[0]
            assert scores == [attention_work(split.contexts, context)] * 2, (split, rank)
            key = query * max(2, split.heads) // HEADS
            shape = split.heads, split.contexts, split.inner, split.context_first
            wanted = Contexts(*shape, query, key, key, 0, 0, 0, context, query / HEAD).hops(
                Schedule(ranks, ranks, 1)
            )
            assert n_bytes == by_link(wanted, ranks).total, (split, rank)


def test_balanced_attention_on_four_ranks_equals_one_rank() -> None:
    assert_helped(4, [Split(1, 4, 4, False, zigzag=False, work_sharing=True)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
def test_balanced_attention_with_more_ranks_and_heads(ranks: int) -> None:
    shapes = [(h, ranks // h, first) for h in (1, 2, 4) if h <= ranks for first in (False, True)]
    assert_helped(ranks, [Split(h, c, c, first, zigzag=False, work_sharing=True) for h, c, first in shapes])


@pytest.mark.parametrize("contexts", range(1, 18))
def test_balance_rounds_cover_each_pair_of_contexts_once(contexts: int) -> None:
    pieces = []
    for rank in range(contexts):
        pieces.append((rank, rank))
        for turn in balanced_attention.balance_rounds(contexts, rank):
            if turn.attends:
                pieces.append((rank, rank - turn.distance))
            if turn.helps:
                pieces.append((rank - turn.distance + contexts, rank))
    assert sorted(pieces) == [(query, key) for query in range(contexts) for key in range(query + 1)]


@pytest.mark.parametrize("contexts", range(2, 18))
def test_balance_work_differs_by_at_most_one_piece(contexts: int) -> None:
    each = [attention_work(contexts, rank) for rank in range(contexts)]
    assert sum(each) == contexts**2 / 2
    half = contexts // 2
    assert each == [contexts / 2] * contexts if contexts % 2 else [half - 0.5] * half + [half + 0.5] * half


@pytest.mark.parametrize("contexts", range(2, 18))
def test_balance_rounds_match_sends_and_receives(contexts: int) -> None:
    steps = [list(balanced_attention.balance_rounds(contexts, rank)) for rank in range(contexts)]
    for rank, mine in enumerate(steps):
        for at, turn in enumerate(mine):
            other = steps[(rank + turn.distance) % contexts][at]
            assert (turn.sends_keys, turn.is_helped) == (other.attends, other.helps)
            assert not (turn.attends and turn.helps)
    assert all(
        turn.attends or turn.sends_keys or turn.helps for turn in (mine[0] for mine in steps)
    )  # NCCL wants all at first
