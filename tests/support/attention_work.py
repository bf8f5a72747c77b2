"""Pieces of attention that a rank computes."""

from __future__ import annotations

from memtune.parallel.model.balanced_attention import balance_rounds


def attention_work(contexts: int, context: int) -> float:
    """Return a rank's pieces of attention; one piece is all queries of one context with all keys of
    another.
    """
    return 0.5 + sum(turn.attends or turn.helps for turn in balance_rounds(contexts, context))
