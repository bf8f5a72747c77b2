"""Gathers between nodes first and inside them afterwards (MiCS)."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.parallel.collectives import Gathering
from memtune.search_spaces.sharding.communication._custom_collectives import _GathersByNode


class Hierarchical(_GathersByNode):
    """Trades a buffer of 1/k of a unit for p - k instead of p - 1 of p shards on the link between nodes of k
    ranks.

    Ranks with the same place on their nodes all-gather first, in k concurrent rings; then the ranks of a node
    all-gather the received shards, node by node, directly into the output buffer. Reductions are unchanged.

    Bitwise: gathers copy bytes unchanged, by any route.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    title: ClassVar[str] = "Gathers between nodes, then inside them"
    clause: ClassVar[str] = "gathers weights between nodes first, then inside them"
    source: ClassVar[str] = "Zhang et al. 2022, MiCS, VLDB 16(1), arXiv:2205.00119, section 3.3"
    paper: ClassVar[str] = "MiCS"
    _gather: ClassVar[Gathering] = "hierarchical"
