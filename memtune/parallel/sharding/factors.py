"""Communication and memory of sharding, with a factor of its own for each model state.

N ranks, k of them per node, a micro-batches per step; Ψ is the bytes of all parameters, gradients or
optimizer state. Groups nest: a group of p ranks is p neighbours; to shard a state further, from s ranks to t,
the t/s ranks that hold the same shard form a group, with stride s. Bytes per step and rank, hop by hop:

- gather, every micro-batch: Ψ·(p - 1)/p in groups of p, twice if parameters are freed between forward and
  backward;
- reduce, every micro-batch: Ψ·(p - 1)/p in groups of p, then Ψ/p·(1 - p/g) from p to g;
- boundary, once: from g to o Ψ/g·(1 - g/o), and 2·Ψ/o·(1 - o/N) between the N/o replicas;
- after the update, once: from o to g Ψ/g·(1 - g/o), from g to p Ψ/p·(1 - p/g).

With unsharded gradients (g = 1) and sharded parameters, nothing is reduced until the boundary, which then
starts with Ψ·(p - 1)/p. Rajbhandari et al. 2020 (ZeRO, section 7), Zhang et al. 2022 (MiCS, section 3.4), Wu
et al. 2023 (PaRO, section 3) and Chen et al. 2023 (AMSP, section 4) are special cases: (1, 1, N), (1, N, N),
(N, N, N); (p, p, p); {1, m, N}³; any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from memtune.hardware import Hardware


@dataclass(frozen=True, order=True)
class Factors:
    """Number of ranks over which each state is sharded; 1 is unsharded."""

    parameters: int
    gradients: int
    optimizer: int

    def problem(self, ranks: int) -> str:
        """Return the reason why `ranks` cannot be sharded by these factors, '' if they can."""
        p, g, o = self.parameters, self.gradients, self.optimizer
        if not 0 < o <= ranks or ranks % o:
            return f"the {ranks} ranks are no multiple of optimizer={o}"
        if o % g:
            return f"optimizer={o} is no multiple of gradients={g}"
        if o % p:
            return f"optimizer={o} is no multiple of parameters={p}"
        # FSDP2 reduces gradients to the division of parameters first; a coarser one than that cannot follow.
        if g != 1 and g % p:
            return f"gradients={g} is neither 1 nor a multiple of parameters={p}"
        return ""

    @property
    def summed_over(self) -> int:
        """Factor at which a micro-batch's gradients are sharded when the boundary shards them further."""
        return max(self.gradients, self.parameters)

    def document(self) -> dict[str, int]:
        """Return the factors as plain data."""
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}


@dataclass(frozen=True)
class Bytes:
    """Bytes of the full model state, or of a rank's shard of it."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Schedule:
    """The other settings on which communication depends."""

    ranks: int
    ranks_per_node: int
    micro_batches: int = 1
    gathers: int = 2
    """All-gathers of sharded parameters per micro-batch: 2, or 1 if they stay gathered for backward."""


@dataclass(frozen=True)
class Hop:
    """Bytes that every rank receives per step, in groups of `size` ranks with a stride of `stride`."""

    name: str
    n_bytes: float
    size: int
    stride: int

    def crosses_nodes(self, ranks_per_node: int) -> bool:
        """Return True if members of a group are on several nodes."""
        return self.size * self.stride > ranks_per_node


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives per step: in groups inside a node, and in groups over several nodes."""

    intra_bytes: float
    inter_bytes: float

    @property
    def total(self) -> float:
        """Sum of the two."""
        return self.intra_bytes + self.inter_bytes


def held_bytes(factors: Factors, whole: Bytes) -> Bytes:
    """Return the bytes that a rank holds throughout the step, without temporarily gathered ones."""
    return Bytes(
        whole.parameters / factors.parameters,
        whole.gradients / factors.gradients,
        whole.optimizer / factors.optimizer,
    )


def hops(factors: Factors, whole: Bytes, schedule: Schedule) -> Iterator[Hop]:
    """Yield all hops of a step; see the top of this file."""
    p = factors.parameters
    g = factors.gradients
    o = factors.optimizer
    n = schedule.ranks
    a = schedule.micro_batches
    weights, gradients = whole.parameters, whole.gradients
    s = factors.summed_over
    found = [
        Hop("gather", a * schedule.gathers * weights * (p - 1) / p, p, 1),
        # With g = 1 each rank sums its own gradients until the boundary, which reduces them once.
        Hop("reduce", (a if g > 1 else 1) * gradients * (p - 1) / p, p, 1),
        Hop("reduce further", a * gradients / p * (1 - p / s), s // p, p),
        Hop("boundary", gradients / s * (1 - s / o), o // s, s),
        # An all-reduce: a reduce-scatter and an all-gather, so twice the bytes.
        Hop("copies", 2 * gradients / o * (1 - o / n), n // o, o),
        Hop("rebuild gradients' part", weights / s * (1 - s / o), o // s, s),
        Hop("rebuild parameters' part", weights / p * (1 - p / s), s // p, p),
    ]
    # Groups of one rank send nothing.
    return (hop for hop in found if hop.size > 1)


def traffic(factors: Factors, whole: Bytes, schedule: Schedule) -> Traffic:
    """Return the bytes that a rank receives per step, by class of link."""
    return by_link(hops(factors, whole, schedule), schedule.ranks_per_node)


def by_link(sent: Iterable[Hop], ranks_per_node: int) -> Traffic:
    """Return the bytes of `sent` inside nodes and between them."""
    inter = intra = 0.0
    for hop in sent:
        if hop.crosses_nodes(ranks_per_node):
            inter += hop.n_bytes
        else:
            intra += hop.n_bytes
    return Traffic(intra, inter)


def seconds(factors: Factors, whole: Bytes, schedule: Schedule, hardware: Hardware) -> float:
    """Return the time on the links per step without other delays; orders candidates."""
    return sum(
        hop.n_bytes / _rate(hop, schedule.ranks_per_node, hardware) for hop in hops(factors, whole, schedule)
    )


def _rate(hop: Hop, ranks_per_node: int, hardware: Hardware) -> float:
    """Return bytes per second of a ring."""
    # Between nodes, members on one node share the network cards with the parallel groups.
    if not hop.crosses_nodes(ranks_per_node):
        return hardware.intra_link_bytes_per_s
    # That many members of the ring are on this node; with a stride other rings use its cards at the same
    # time.
    here = max(1, ranks_per_node // hop.stride)
    return min(hardware.intra_link_bytes_per_s, hardware.inter_link_bytes_per_s * here)


@lru_cache(maxsize=16)
def all_factors(ranks: int) -> tuple[Factors, ...]:
    """Return all factors that divide `ranks` and can be built."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    nested = (
        Factors(p, g, o)
        for o in divisors
        for p in divisors
        if o % p == 0
        # 1 is always possible: gradients then stay unsharded until the last micro-batch.
        for g in {1, *(g for g in divisors if o % g == 0 and g % p == 0)}
    )
    return tuple(sorted(nested))


def cheapest(
    whole: Bytes,
    schedule: Schedule,
    hardware: Hardware,
    *,
    limit_bytes: float,
    among: Iterable[Factors] | None = None,
) -> Factors | None:
    """Return the factors of least link time whose shards fit into `limit_bytes`; None if none fits."""
    # Ties are resolved by the bytes held, then by how little is sharded. A larger limit only adds
    # alternatives, so it never raises the time.
    fitting = (
        each for each in among or all_factors(schedule.ranks) if held_bytes(each, whole).total <= limit_bytes
    )
    return min(
        fitting,
        key=lambda each: (seconds(each, whole, schedule, hardware), held_bytes(each, whole).total, each),
        default=None,
    )
