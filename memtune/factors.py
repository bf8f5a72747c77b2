"""Model state divided over ranks, each state over its own factor: what a rank holds, and what crosses each class of link.

N ranks, k of them on a node, a micro-batches per step; Ψ the bytes of all parameters, gradients or optimizer state. Groups
nest: a group of p ranks is p neighbours, and where a state is divided further, from s ranks over t, the t/s ranks that hold the
same s-th meet, every s-th rank. What is sent per step and rank, hop by hop:

- gather, every micro-batch: Ψ·(p - 1)/p in groups of p, twice if parameters are dropped between forward and backward;
- reduce, every micro-batch: Ψ·(p - 1)/p in groups of p, then Ψ/p·(1 - p/g) from p to g;
- boundary, once: from g to o Ψ/g·(1 - g/o), and 2·Ψ/o·(1 - o/N) between the N/o copies;
- after the update, once: from o to g Ψ/g·(1 - g/o), from g to p Ψ/p·(1 - p/g).

With whole gradients (g = 1) beside divided parameters nothing is reduced until the boundary, which begins with Ψ·(p - 1)/p.
Rajbhandari et al. 2020 (ZeRO, section 7), Zhang et al. 2022 (MiCS, section 3.4), Wu et al. 2023 (PaRO, section 3) and Chen et al.
2023 (AMSP, section 4) are special cases: (1, 1, N), (1, N, N), (N, N, N); (p, p, p); {1, m, N}³; any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from memtune.hardware import Hardware
from memtune.helpers import Turn, turns


@dataclass(frozen=True, order=True)
class Factors:
    """Over how many ranks each state is divided; 1 is whole."""

    parameters: int
    gradients: int
    optimizer: int

    def problem(self, ranks: int) -> str:
        """Why `ranks` cannot be divided so, '' where they can."""
        p, g, o = self.parameters, self.gradients, self.optimizer
        if not 0 < o <= ranks or ranks % o:
            return f"the {ranks} ranks are no multiple of optimizer={o}"
        if o % g:
            return f"optimizer={o} is no multiple of gradients={g}"
        if o % p:
            return f"optimizer={o} is no multiple of parameters={p}"
        if g != 1 and g % p:
            return f"gradients={g} is neither 1 nor a multiple of parameters={p}"
        return ""

    @property
    def summed_over(self) -> int:
        """Factor at which the gradients of a micro-batch are when the boundary begins to divide them further."""
        return max(self.gradients, self.parameters)

    def document(self) -> dict[str, int]:
        """As plain data."""
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}


@dataclass(frozen=True)
class Bytes:
    """Bytes of the whole model state, or of a rank's part of it."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Schedule:
    """What else decides what is sent."""

    ranks: int
    ranks_per_node: int
    micro_batches: int = 1
    gathers: int = 2
    """Times that divided parameters are gathered per micro-batch: 2, or 1 where they stay between forward and backward."""


@dataclass(frozen=True)
class Hop:
    """Bytes that every rank receives per step in groups of `size` ranks, every `stride`-th one."""

    name: str
    n_bytes: float
    size: int
    stride: int

    def crosses_nodes(self, ranks_per_node: int) -> bool:
        """Whether members of a group sit on several nodes."""
        return self.size * self.stride > ranks_per_node


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives per step: in groups inside a node, and in groups over several nodes."""

    intra_bytes: float
    inter_bytes: float

    @property
    def total(self) -> float:
        """Both."""
        return self.intra_bytes + self.inter_bytes


def held(factors: Factors, whole: Bytes) -> Bytes:
    """What a rank holds between two steps and through them, without what is gathered for a while."""
    return Bytes(whole.parameters / factors.parameters, whole.gradients / factors.gradients, whole.optimizer / factors.optimizer)


def hops(factors: Factors, whole: Bytes, schedule: Schedule) -> Iterator[Hop]:
    """Everything that is sent in a step; see the top of this file."""
    p, g, o, n, a = factors.parameters, factors.gradients, factors.optimizer, schedule.ranks, schedule.micro_batches
    weights, gradients = whole.parameters, whole.gradients
    s = factors.summed_over
    found = [
        Hop("gather", a * schedule.gathers * weights * (p - 1) / p, p, 1),
        Hop("reduce", (a if g > 1 else 1) * gradients * (p - 1) / p, p, 1),
        Hop("reduce further", a * gradients / p * (1 - p / s), s // p, p),
        Hop("boundary", gradients / s * (1 - s / o), o // s, s),
        Hop("copies", 2 * gradients / o * (1 - o / n), n // o, o),
        Hop("rebuild gradients' part", weights / s * (1 - s / o), o // s, s),
        Hop("rebuild parameters' part", weights / p * (1 - p / s), s // p, p),
    ]
    return (hop for hop in found if hop.size > 1)


@dataclass(frozen=True)
class Rotation:
    """Weights that go round rings of `degree` ranks (`runtime.rotate`), in bytes of all shards, and what is whole beside them.

    A weight that several layers share goes round once for each. Luo et al. 2023 (RTP, arXiv:2311.01635, section 3): where all of
    Ψ is rotated, 3·Ψ·(p - 1)/p per micro-batch in rings of p; in place weights go all the way, 2·Ψ + Ψ·(p - 1)/p.
    """

    degree: int
    in_place: bool
    forward: float
    """Weights of all layers."""
    backward: float
    """Those of layers whose input needs a gradient."""
    sums: float
    """Gradients, for each layer."""
    gradients: float
    """Gradients, once where layers share a weight."""
    whole: float
    """Gradients of everything that is not rotated."""

    def hops(self, schedule: Schedule) -> Iterator[Hop]:
        """Everything that is sent in a step."""
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
    """Sequences over `heads` × `contexts` ranks (`runtime.head_context`), in bytes of one rank's own positions.

    Gu et al. 2024 (LoongTrain, arXiv:2406.18485, section 4.1), forward and backward: per attention 4·(Q + K)·(h - 1)/h in
    all-to-alls and (4·K + 2·S)·(c - 1) in rings. Where ranks help each other (`memtune.helpers`), bytes are those of one context.
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
    """S: gradients of keys while they go round."""
    hidden: float
    """What enters the first block; what leaves the last one is as large."""
    blocks: float
    """Gradients of the blocks."""
    whole: float
    """All gradients."""
    helped: int | None = None
    """The context whose bytes these are, where ranks attend for others."""
    lse: float = 0.0
    """L: log-sum-exps of its queries."""

    def hops(self, schedule: Schedule) -> Iterator[Hop]:
        """Everything that is sent in a step of `schedule.micro_batches` that a group works on, one after another."""
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
            n_bytes = sum(map(self._turn, turns(c, self.helped)))
            return [Hop("helpers", micro_batches * n_bytes, c, 1 if first else self.heads)]
        block = micro_batches * (4 * self.key + 2 * self.sums)
        return [
            Hop("inner rings", block * (c // w) * (w - 1), w, 1 if first else self.heads),
            Hop("outer ring", block * (c // w - 1), c // w, w if first else w * self.heads),
        ]

    def _turn(self, turn: Turn) -> float:
        """Forward and backward: keys and values for own queries, or what a helper needs; answers of helpers and of the helped."""
        comes = 4 * self.key * turn.attends + (4 * self.query + self.lse) * turn.helps
        return comes + (2 * self.query + self.lse) * turn.is_helped + 2 * self.key * turn.sends_keys


def traffic(factors: Factors, whole: Bytes, schedule: Schedule) -> Traffic:
    """What a rank receives per step, by class of link."""
    return by_link(hops(factors, whole, schedule), schedule.ranks_per_node)


def by_link(sent: Iterable[Hop], ranks_per_node: int) -> Traffic:
    """The bytes of `sent` inside nodes and between them."""
    inter = intra = 0.0
    for hop in sent:
        if hop.crosses_nodes(ranks_per_node):
            inter += hop.n_bytes
        else:
            intra += hop.n_bytes
    return Traffic(intra, inter)


def seconds(factors: Factors, whole: Bytes, schedule: Schedule, hardware: Hardware) -> float:
    """Time on the links per step if nothing else slows them: the order in which candidates are worth looking at."""
    return sum(hop.n_bytes / _rate(hop, schedule.ranks_per_node, hardware) for hop in hops(factors, whole, schedule))


def _rate(hop: Hop, ranks_per_node: int, hardware: Hardware) -> float:
    """Bytes per second of a ring; over nodes all members on a node share the cards that the groups beside it leave them."""
    if not hop.crosses_nodes(ranks_per_node):
        return hardware.intra_link_bytes_per_s
    here = max(1, ranks_per_node // hop.stride)
    return min(hardware.intra_link_bytes_per_s, hardware.inter_link_bytes_per_s * here)


@lru_cache(maxsize=16)
def every(ranks: int) -> tuple[Factors, ...]:
    """All factors that divide `ranks` and can be built."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    nested = (
        Factors(p, g, o)
        for o in divisors
        for p in divisors if o % p == 0
        for g in {1, *(g for g in divisors if o % g == 0 and g % p == 0)}
    )  # fmt: skip
    return tuple(sorted(nested))


def dominating(factors: Factors, among: Iterable[Factors], whole: Bytes, schedule: Schedule) -> Factors | None:
    """Another way that holds no more bytes and sends no more on either class of link, and less in one of the three; or None."""
    ours = _costs(factors, whole, schedule)
    for other in among:
        theirs = _costs(other, whole, schedule)
        if other != factors and all(a <= b for a, b in zip(theirs, ours, strict=True)) and theirs != ours:
            return other
    return None


@lru_cache(maxsize=4096)
def _costs(factors: Factors, whole: Bytes, schedule: Schedule) -> tuple[float, float, float]:
    sent = traffic(factors, whole, schedule)
    return held(factors, whole).total, sent.intra_bytes, sent.inter_bytes


def cheapest(
    whole: Bytes, schedule: Schedule, hardware: Hardware, *, limit_bytes: float, among: Iterable[Factors] | None = None
) -> Factors | None:
    """The factors with the least time on the links among those whose parts fit into `limit_bytes`; None: none does.

    Equal ones are told apart by what they hold, then by how little is divided. More memory only adds to what is compared: it
    never raises the time.
    """
    fitting = (each for each in among or every(schedule.ranks) if held(each, whole).total <= limit_bytes)
    return min(
        fitting,
        key=lambda each: (seconds(each, whole, schedule, hardware), held(each, whole).total, each),
        default=None,
    )
