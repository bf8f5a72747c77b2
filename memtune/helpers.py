"""Who attends for whom: the causal schedule in which ranks that have seen all their keys help others.

Li et al. 2023, DistFlashAttn (arXiv:2310.03294, section 3.1, load-balanced scheduling). P contexts follow one another, and
context p attends to contexts 0 to p: P(P + 1)/2 pieces of work, of which each rank has its own, of half the size, at the start.

1. Step t = 1 … ⌊P/2⌋ moves everything t ranks on. A rank p >= t gets keys of context p - t; one with p < t has seen all of its
   own, and helps context p - t + P: it gets queries of that, attends with its own keys, and sends back what it found.
2. With P even, step P/2 would do each piece twice: there nobody helps. So each rank does ⌊P/2⌋ pieces beside its own; where P is
   even, ranks of the first half do one less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A step of one rank."""

    distance: int
    """How many ranks on everything goes."""
    attends: bool
    """Own queries to keys that arrive (rule 1)."""
    helps: bool
    """Queries that arrive attend to own keys."""
    sends_keys: bool
    is_helped: bool
    """Sends queries, and gets an answer."""


def turns(contexts: int, context: int) -> Iterator[Turn]:
    """The steps of a context's rank after that in which it attends to its own keys."""
    for step in range(1, contexts // 2 + 1):
        helping = 2 * step != contexts
        yield Turn(
            step,
            attends=context >= step,
            helps=helping and context < step,
            sends_keys=context + step < contexts,
            is_helped=helping and context + step >= contexts,
        )


def work(contexts: int, context: int) -> float:
    """Pieces of attention that a rank does, in pieces of all of one context's queries and all of another's keys."""
    return 0.5 + sum(turn.attends or turn.helps for turn in turns(contexts, context))
