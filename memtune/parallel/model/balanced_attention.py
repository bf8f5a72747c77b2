"""Load-balanced causal attention over contiguous contexts: ranks that have seen all their keys attend for
others.

Li et al. 2023, DistFlashAttn (arXiv:2310.03294, section 3.1, load-balanced scheduling). P contexts follow one
another, and context p attends to contexts 0 to p: P(P + 1)/2 pieces of work, of which each rank has its own,
of half the size, at the start.

1. Round t = 1 … ⌊P/2⌋ shifts all messages by t ranks. A rank p >= t receives keys of context p - t; a rank p
  < t has seen all of its own keys, and helps context p - t + P: it receives that context's queries, attends
  with its own keys, and returns the result.
2. With P even, round P/2 would compute each piece twice: no rank helps in it. So each rank does ⌊P/2⌋ pieces
  besides its own; where P is even, ranks of the first half do one less.

Legend: B samples, H heads, G heads of key and value, P positions of a context, D head size. Four more rules:

3. A rank attends to its own keys while the first round's messages are in flight, and so on: messages are
  prefetched by one round.
4. Results return the way of the request: in forward a helper's output and log-sum-exp, in backward gradients
  of the received keys or queries.
5. A helper's backward needs the results of attention to all keys: it receives the query, the output's
  gradient, the output and the log-sum-exp.
6. All ranks exchange the same messages in the same order, each send together with a receive in one op: no
  deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from memtune.parallel.model.block_attention import (
    Attended,
    WeightMask,
    accumulation_dtype,
    attend,
    attend_backward,
    merge,
)
from memtune.parallel.ranks import Hop, Ring

Dropout = Callable[[int, int], WeightMask | None]
"""Returns the weights that are kept, by contexts of queries and keys, one of them this rank's."""


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


def forward(ring: Ring, query: Tensor, pair: Tensor, scale: float | None, kept: Dropout) -> Attended:
    """Return attention of queries (B, H, P, D) of this context to all earlier keys (2, B, G, P, D).

    Args:
        ring: The contexts, in their order.
        query: (B, H, P, D).
        pair: Keys and values, (2, B, G, P, D).
        scale: Scale of the scores; None: D ** -0.5.
        kept: The weights that are not dropped.
    """
    # Made before the own attention: its first messages overlap with that (rule 3).
    questions = _HelperQueries(ring, (query,), pair)
    own = attend(query, *pair, causal=True, scale=scale, kept=kept(ring.rank, ring.rank))
    # Results of all rounds are added in the wide type; rounding after each would add up.
    total = Attended(own.out.to(accumulation_dtype(query.dtype)), own.lse)
    del own
    for round_ in balance_rounds(ring.ranks, ring.rank):
        come, found = questions.next(), list[Tensor]()
        if round_.attends:
            drop = kept(ring.rank, ring.rank - round_.distance)
            merge(total, attend(query, *come[0], causal=False, scale=scale, kept=drop))
        elif round_.helps:
            drop = kept(ring.rank - round_.distance + ring.ranks, ring.rank)
            found += attend(come[0], *pair, causal=False, scale=scale, kept=drop)
        del come  # before `_exchange` allocates what arrives
        # A helper's result has the shapes of the query and of the log-sum-exp, which serve as templates for
        # the receives.
        answer = _exchange(ring, found, [query, total.lse] if round_.is_helped else [], -round_.distance)
        del found
        if round_.is_helped:
            merge(total, Attended(*_arrived(answer)))
        # The sends too: they read `found`, which no name holds any more.
        _finish(answer)
        del answer
    return Attended(total.out.to(query.dtype), total.lse)


def backward(
    ring: Ring,
    gradient: Tensor,
    query: Tensor,
    pair: Tensor,
    all_keys: Attended,
    scale: float | None,
    kept: Dropout,
) -> tuple[Tensor, Tensor]:
    """Return gradients of `query` and `pair`, of this rank's context."""
    # More than forward sends: softmax cannot be differentiated block by block without the statistics of all
    # keys (rule 5).
    questions = _HelperQueries(ring, (query, gradient, *all_keys), pair)
    to_query, to_pair = (
        torch.zeros_like(each, dtype=accumulation_dtype(each.dtype)) for each in (query, pair)
    )
    drop = kept(ring.rank, ring.rank)
    own = attend_backward(gradient, query, pair[0], pair[1], all_keys, causal=True, scale=scale, kept=drop)
    to_query.add_(own[0])
    _add_pair(to_pair, own[1:])
    del own
    for round_ in balance_rounds(ring.ranks, ring.rank):
        come, found = questions.next(), list[Tensor]()
        if round_.attends:
            key, value = come[0]
            drop = kept(ring.rank, ring.rank - round_.distance)
            mine = attend_backward(
                gradient, query, key, value, all_keys, causal=False, scale=scale, kept=drop
            )
            to_query.add_(mine[0])
            found += mine[1:]
            del mine, key, value
        elif round_.helps:
            drop = kept(ring.rank - round_.distance + ring.ranks, ring.rank)
            theirs = attend_backward(
                come[1], come[0], pair[0], pair[1], Attended(*come[2:]), causal=False, scale=scale, kept=drop
            )
            found.append(theirs[0])
            _add_pair(to_pair, theirs[1:])
            del theirs
        del come  # before `_exchange` allocates what arrives
        answer = _exchange(
            ring,
            found,
            [*pair] if round_.sends_keys else [query] if round_.is_helped else [],
            -round_.distance,
        )
        del found
        if round_.sends_keys:
            _add_pair(to_pair, _arrived(answer))
        elif round_.is_helped:
            to_query.add_(answer[0].arrived())
        _finish(answer)
        del answer
    return to_query.to(query.dtype), to_pair.to(pair.dtype)


def _add_pair(to_pair: Tensor, found: Sequence[Tensor]) -> None:
    for sums, more in zip(to_pair, found, strict=True):
        sums.add_(more)


class _HelperQueries:
    """The tensors that this rank receives to work on, prefetched by one round (rule 3).

    Args:
        ring: The contexts.
        asked: Tensors that a helper needs.
        pair: Keys and values, for a rank that attends itself.
    """

    def __init__(self, ring: Ring, asked: Sequence[Tensor], pair: Tensor) -> None:
        self._ring, self._asked, self._pair = ring, asked, pair
        self._left = list(balance_rounds(ring.ranks, ring.rank))
        self._hops = self._begin()

    def next(self) -> list[Tensor]:
        """Return the received pair, a request's tensors, or nothing."""
        hops, self._hops = self._hops, []
        come = _arrived(hops)
        _finish(hops)
        del hops
        self._hops = self._begin()
        return come

    def _begin(self) -> list[Hop]:
        if not self._left:
            return []
        round_ = self._left.pop(0)
        sent = [self._pair] if round_.sends_keys else self._asked if round_.is_helped else []
        received = [self._pair] if round_.attends else self._asked if round_.helps else []
        return _exchange(self._ring, sent, received, round_.distance)


def _exchange(ring: Ring, sent: Sequence[Tensor], received: Sequence[Tensor], distance: int) -> list[Hop]:
    """Start sending tensors and receiving ones like `received`, message by message (rule 6)."""
    hops = []
    for theirs, mine in zip_longest(sent, received):
        arriving = None if mine is None else torch.empty_like(mine, memory_format=torch.contiguous_format)
        hops.append(ring.exchange(None if theirs is None else theirs.contiguous(), arriving, distance))
    return hops


def _arrived(hops: Sequence[Hop]) -> list[Tensor]:
    return [hop.arrived() for hop in hops if hop.arriving is not None]


def _finish(hops: Sequence[Hop]) -> None:
    for hop in hops:
        hop.wait()
