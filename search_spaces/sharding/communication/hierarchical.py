"""Gathers between nodes first and inside them afterwards (MiCS)."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.parallel.collectives import Gathering
from memtune.search_spaces.sharding.communication._custom_collectives import _ByNode


class Hierarchical(_ByNode):
    """Trades a buffer of 1/k of a unit for p - k instead of p - 1 of p shards on the link between nodes of k
    ranks.

    Ranks with the same place on their nodes gather from each other first, k rings side by side; then the
    ranks of a node gather, node by node, what each of them has got, straight into place. Reductions are as
    they were.

    Bitwise: bytes arrive as they were sent, wherever they went.

    Distinguishing test: of a unit of M bytes over p ranks, (p/k - 1)·M/p reach a rank between nodes and (k -
    1)·M/k inside its own.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    title: ClassVar[str] = "Gathers between nodes, then inside them"
    source: ClassVar[str] = "Zhang et al. 2022, MiCS, VLDB 16(1), arXiv:2205.00119, section 3.3"
    _gather: ClassVar[Gathering] = "hierarchical"
