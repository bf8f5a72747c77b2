"""The schedule of ranks that help each other: every piece of causal attention once, balanced, and what is
sent is expected.
"""

from __future__ import annotations

import pytest
from support.attention_work import attention_work

from memtune.parallel.ranks.balance_schedule import balance_rounds


@pytest.mark.parametrize("contexts", range(1, 18))
def test_balance_rounds_cover_each_pair_of_contexts_once(contexts: int) -> None:
    pieces = []
    for rank in range(contexts):
        pieces.append((rank, rank))
        for turn in balance_rounds(contexts, rank):
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
    steps = [list(balance_rounds(contexts, rank)) for rank in range(contexts)]
    for rank, mine in enumerate(steps):
        for at, turn in enumerate(mine):
            other = steps[(rank + turn.distance) % contexts][at]
            assert (turn.sends_keys, turn.is_helped) == (other.attends, other.helps)
            assert not (turn.attends and turn.helps)
    assert all(
        turn.attends or turn.sends_keys or turn.helps for turn in (mine[0] for mine in steps)
    )  # NCCL wants all at first
