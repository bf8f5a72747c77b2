"""Rings between nodes and gathers inside them at the same time (PaRO's hierarchical overlapping ring)."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.message import Gathering
from memtune.search_spaces.sharding.communication._own import _ByNode


class HoRing(_ByNode):
    """Trades a shard's buffer per node for links inside nodes and between them that work side by side, not one after the other.

    Ranks with the same place on their nodes are a ring, k of them side by side. What came last goes on to the next node while the
    ranks of this one gather it from each other, straight into place: of p/k steps of either sort only the first does not run
    beside one of the other. `hierarchical` sends the same bytes and waits for all nodes before it gathers inside its own. On a
    GPU the rings have a stream of their own; on CPU, where collectives are waited for, nothing runs beside anything. Reductions
    are as they were.

    Bitwise: bytes arrive as they were sent, wherever they went.

    Distinguishing test: of a unit of M bytes over p ranks, (p/k - 1)·M/p reach a rank between nodes and (k - 1)·M/k inside its
    own, and where both take as long, a gather takes little more than one of them.
    """

    kind: Literal["ho_ring"] = "ho_ring"
    title: ClassVar[str] = "Rings between nodes beside gathers inside them"
    source: ClassVar[str] = "Wu et al. 2023, PaRO, arXiv:2310.06003, section 4 (HO-Ring), all-gather"
    _gather: ClassVar[Gathering] = "ho_ring"
