"""Dynamic tensor rematerialization (DTR): when memory is short, evict the tensor that is cheapest to
recompute per byte.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.activations.eviction import DTR, Policy
from memtune.search_spaces.recompute._schedule_planner import DynamicPolicy
from memtune.technique import Exactness

_HEURISTICS: dict[str, dict[str, Any]] = {
    "e_star": {"neighbours": "closure"},
    "classes": {"neighbours": "classes"},
    "local": {"neighbours": "own"},
    "lru": {"neighbours": "nothing", "by_size": False},
    "size": {"neighbours": "nothing", "by_staleness": False},
    "msps": {"neighbours": "ancestors", "by_staleness": False},
    "random": {"random": True},
}


class Dtr(DynamicPolicy):
    """Recomputes single ops, some several times, and so reaches budgets that recomputing whole blocks cannot.

    A tensor's score is the cost of itself and its evicted neighbours, divided by its bytes and the time since
    its last use; the tensor with the lowest score is evicted. The policy is simulated on the recorded step
    with modelled costs, and its decisions become a schedule.

    Distinguishing test: on the DTR artifact's logs its costs are the artifact's own.
    """

    kind: Literal["dtr"] = "dtr"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Evict and run again by cost, size and age (DTR)"
    source: ClassVar[str] = "Kirisame et al. 2021, Dynamic Tensor Rematerialization, ICLR, arXiv:2006.09616"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    heuristic: Literal["e_star", "classes", "local", "lru", "size", "msps", "random"] = "e_star"
    """Terms of the score: exact evicted neighbourhoods, their union-find classes, the tensor's own cost, its
    age alone, its size alone, cost with evicted ancestors per byte, or random.
    """
    sample: bool = False
    """Consider only a random part of the candidates, about the square root of their number."""
    ignore_small: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tensors below this fraction of the mean size are evicted last; 0.01 in the authors' prototype."""

    def policy(self) -> Policy:
        """Return DTR with the chosen score."""
        return replace(DTR, **_HEURISTICS[self.heuristic], sample=self.sample, ignore_small=self.ignore_small)
