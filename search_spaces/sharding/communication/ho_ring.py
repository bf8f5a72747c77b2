"""Rings between nodes and collectives inside them at the same time (PaRO's hierarchical overlapping ring)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.parallel.collectives import Communication, Gathering
from memtune.search_spaces.sharding.communication._custom_collectives import _ByNode
from memtune.technique import Exactness


class HoRing(_ByNode):
    """Trades a shard's buffer per node for links inside nodes and between them that work side by side, not
    one after the other.

    Ranks with the same place on their nodes are a ring, k of them side by side. What came last goes on to the
    next node while the ranks of this one gather it from each other, straight into place: of p/k steps of
    either sort only the first does not run beside one of the other. `hierarchical` sends the same bytes and
    waits for all nodes before it gathers inside its own. On a GPU the rings have a stream of their own; on
    CPU, where collectives are waited for, nothing runs beside anything.

    With `reductions`, gradients go the same way backwards: each node adds up its ranks' gradients for the
    ranks of one node after the other, adds what came round, and passes the sums on; the last to add is the
    node that they are for.

    Bitwise: bytes arrive as they were sent, wherever they went. With `reductions` reordered: sums over N
    ranks are sums over k nodes of sums over their N/k ranks; either rounds N - 1 times.

    Distinguishing test: of a unit of M bytes over p ranks, (p/k - 1)·M/p reach a rank between nodes and (k -
    1)·M/k inside its own, and where both take as long, a gather takes little more than one of them; a
    reduction is the same.
    """

    kind: Literal["ho_ring"] = "ho_ring"
    title: ClassVar[str] = "Rings between nodes beside gathers inside them"
    source: ClassVar[str] = "Wu et al. 2023, PaRO, arXiv:2310.06003, section 4 (HO-Ring)"
    _gather: ClassVar[Gathering] = "ho_ring"

    reductions: bool = False
    """Gradients go apart in the same rings, backwards."""

    def exactly(self) -> Exactness:
        """Other sums where reductions go by node, too."""
        return Exactness.REORDERED if self.reductions else Exactness.BITWISE

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Gathers alone, or both."""
        return {"reductions": (False, True)}

    def _how(self, ranks_per_node: int) -> Communication:
        return Communication(ranks_per_node, gather=self._gather, ring_reductions=self.reductions)
