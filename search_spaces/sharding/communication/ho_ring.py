"""Rings between nodes, overlapped with collectives inside them (PaRO's hierarchical overlapping ring)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.parallel.collectives import Communication, Gathering
from memtune.search_spaces.sharding.communication._custom_collectives import _GathersByNode
from memtune.technique import Exactness


class HoRing(_GathersByNode):
    """Trades a shard's buffer per node for links inside nodes and between them that work at the same time.

    Ranks with the same place on their nodes form a ring, k rings at a time. A received shard is sent on to
    the next node while the ranks of this one all-gather it, directly into the output buffer: of p/k steps of
    each kind only the first does not overlap with one of the other. `hierarchical` sends the same bytes and
    waits for all nodes before it gathers inside its own. On a GPU the rings have a stream of their own; on
    CPU, whose collectives are synchronous, nothing overlaps.

    With `reductions`, gradients take the same route backwards: each node sums its ranks' gradients for the
    ranks of one node after the other, adds the sums received from the ring, and sends them on; the
    destination node adds last.

    Bitwise: gathers copy bytes unchanged, by any route. With `reductions` reordered: sums over N ranks are
    sums over k nodes of sums over their N/k ranks; either rounds N - 1 times.
    """

    kind: Literal["ho_ring"] = "ho_ring"
    title: ClassVar[str] = "Rings between nodes, overlapped with gathers inside them"
    source: ClassVar[str] = "Wu et al. 2023, PaRO, arXiv:2310.06003, section 4 (HO-Ring)"
    paper: ClassVar[str] = "PaRO"
    _gather: ClassVar[Gathering] = "ho_ring"

    reductions: bool = False
    """Gradients are reduced by the same rings, backwards."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        what = "gathers weights and reduces gradients" if self.reductions else "gathers weights"
        return f"{what} on rings between nodes and inside them at the same time"

    def exactly(self) -> Exactness:
        # A gather only copies; a reduction on other rings adds in another order.
        return Exactness.REORDERED if self.reductions else Exactness.BITWISE

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"reductions": (False, True)}

    def _communication(self, ranks_per_node: int) -> Communication:
        return Communication(ranks_per_node, gather=self._gather, ring_reductions=self.reductions)
