"""Load-balanced schedule of causal attention: ranks that have seen all their keys compute for others.

Li et al. 2023, DistFlashAttn (arXiv:2310.03294, section 3.1, load-balanced scheduling). P contexts follow one
another, and context p attends to contexts 0 to p: P(P + 1)/2 pieces of work, of which each rank has its own,
of half the size, at the start.

1. Round t = 1 … ⌊P/2⌋ shifts all messages by t ranks. A rank p >= t receives keys of context p - t; a rank p
  < t has seen all of its own keys, and helps context p - t + P: it receives that context's queries, attends
  with its own keys, and returns the result.
2. With P even, round P/2 would compute each piece twice: no rank helps in it. So each rank does ⌊P/2⌋ pieces
  besides its own; where P is even, ranks of the first half do one less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BalanceRound:
    """One round of one rank."""

    distance: int
    """Number of ranks by which messages are shifted."""
    attends: bool
    """Own queries attend to received keys (rule 1)."""
    helps: bool
    """Received queries attend to own keys."""
    sends_keys: bool
    is_helped: bool
    """Sends own queries, and receives their result."""


def balance_rounds(contexts: int, context: int) -> Iterator[BalanceRound]:
    """Yield the rounds of a context's rank after the one in which it attends to its own keys."""
    for step in range(1, contexts // 2 + 1):
        helping = 2 * step != contexts
        yield BalanceRound(
            step,
            attends=context >= step,
            helps=helping and context < step,
            sends_keys=context + step < contexts,
            is_helped=helping and context + step >= contexts,
        )
