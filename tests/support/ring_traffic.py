"""Bytes that rings send, counted by hand: what runtime counters and passes are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memtune.parallel.model.balanced_attention import BalanceRound, balance_rounds
from memtune.parallel.sharding.factors import Hop, Schedule


@dataclass(frozen=True)
class Rotation:
    """Weights that rotate in rings of `degree` ranks (`parallel.model.weight_rotation`), in bytes of all
    shards, and the unsharded rest.

    A weight shared by several layers rotates once for each. Luo et al. 2023 (RTP, arXiv:2311.01635, section
    3): if all of Ψ is rotated, 3·Ψ·(p - 1)/p per micro-batch in rings of p; in place, weights make the full
    round, 2·Ψ + Ψ·(p - 1)/p.
    """

    degree: int
    in_place: bool
    forward: float
    """Weights of all layers."""
    backward: float
    """Weights of layers whose input needs a gradient."""
    sums: float
    """Gradients, for each layer."""
    gradients: float
    """Gradients, once where layers share a weight."""
    whole: float
    """Gradients of all parameters that are not rotated."""

    def hops(self, schedule: Schedule) -> Iterator[Hop]:
        """Yield all hops of a step."""
        p, n, a = self.degree, schedule.ranks, schedule.micro_batches
        found = [
            Hop("weights", a * (self.forward + self.backward) * (1 if self.in_place else (p - 1) / p), p, 1),
            Hop("sums", a * self.sums * (p - 1) / p, p, 1),
            Hop("copies", 2 * self.gradients / p * (1 - p / n), n // p, p),
            Hop("whole", 2 * self.whole * (1 - 1 / n), n, 1),
        ]
        return (hop for hop in found if hop.size > 1)


@dataclass(frozen=True)
class Contexts:
    """Sequences over `heads` × `contexts` ranks (`parallel.model.context_parallel`), in bytes of one rank's
    own positions.

    Gu et al. 2024 (LoongTrain, arXiv:2406.18485, section 4.1), forward and backward: per attention 4·(Q +
    K)·(h - 1)/h in all-to-alls and (4·K + 2·S)·(c - 1) in rings. With load balancing
    (`memtune.parallel.model.balanced_attention`), bytes are those of one context.
    """

    heads: int
    contexts: int
    inner: int
    """Contexts of an inner ring."""
    context_first: bool
    query: float
    """Q: queries of all attentions, as many as outputs."""
    key: float
    """K: keys, as many as values."""
    sums: float
    """S: gradients of keys while they pass round the ring."""
    hidden: float
    """Input of the first block; the output of the last block has the same size."""
    blocks: float
    """Gradients of the blocks."""
    whole: float
    """All gradients."""
    helped: int | None = None
    """The context to which the bytes belong, if attention is load-balanced."""
    lse: float = 0.0
    """L: log-sum-exps of its queries."""

    def hops(self, schedule: Schedule) -> Iterator[Hop]:
        """Yield all hops of a step in which a group runs `schedule.micro_batches`, one after another."""
        h, c, a = self.heads, self.contexts, schedule.micro_batches
        n, size, first = h * c, schedule.ranks, self.context_first
        found = [
            Hop("heads", a * 4 * (self.query + self.key) * (h - 1) / h, h, c if first else 1),
            *self._rings(a),
            Hop("ends", a * 2 * self.hidden * (n - 1), n, 1),
            Hop("blocks", 2 * self.blocks * (1 - 1 / n), n, 1),
            Hop("copies", 2 * self.whole * (1 - n / size), size // n, n),
        ]
        return (hop for hop in found if hop.size > 1)

    def _rings(self, micro_batches: int) -> list[Hop]:
        c, w, first = self.contexts, self.inner, self.context_first
        if self.helped is not None:
            n_bytes = sum(map(self._round, balance_rounds(c, self.helped)))
            return [Hop("helpers", micro_batches * n_bytes, c, 1 if first else self.heads)]
        block = micro_batches * (4 * self.key + 2 * self.sums)
        return [
            Hop("inner rings", block * (c // w) * (w - 1), w, 1 if first else self.heads),
            Hop("outer ring", block * (c // w - 1), c // w, w if first else w * self.heads),
        ]

    def _round(self, round_: BalanceRound) -> float:
        """Return bytes of a round, forward and backward: keys and values for own queries, or a helper's
        inputs; outputs of helpers and to helped ranks.
        """
        comes = 4 * self.key * round_.attends + (4 * self.query + self.lse) * round_.helps
        return comes + (2 * self.query + self.lse) * round_.is_helped + 2 * self.key * round_.sends_keys
