"""Dynamic tensor rematerialization (DTR): when memory is short, evict the tensor that is cheapest to
recompute per byte.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from memtune.activations.eviction import DTR, DTR_HEURISTICS, Policy, dtr_options
from memtune.search_spaces.recompute._schedule_planner.frozen_policy import DynamicPolicy
from memtune.technique import Exactness
from memtune.units import format_budget


class Dtr(DynamicPolicy):
    """Recomputes single ops, some several times, and so reaches budgets that recomputing whole blocks cannot.

    A tensor's score is the cost of itself and its evicted neighbours, divided by its bytes and the time since
    its last use; the tensor with the lowest score is evicted. Each published score is simulated on the
    recorded step with modelled costs; the decisions of the one that recomputes least become a schedule.
    """

    kind: Literal["dtr"] = "dtr"
    title: ClassVar[str] = "Evict and run again by cost, size and age (DTR)"
    source: ClassVar[str] = "Kirisame et al. 2021, Dynamic Tensor Rematerialization, ICLR, arXiv:2006.09616"
    paper: ClassVar[str] = "DTR"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    heuristic: Literal["best", "e_star", "classes", "local", "lru", "size", "msps", "random"] = "best"
    """Terms of the score: exact evicted neighbourhoods, their union-find classes, the tensor's own cost, its
    age alone, its size alone, cost with evicted ancestors per byte, or random; `best`: the one of all but
    the last that recomputes least within the budget, with recomputed tensors kept or not. Playing them
    adds a tenth of a second to planning, near the smallest budgets some seconds.
    """
    sample: bool = False
    """Consider only a random part of the candidates, about the square root of their number."""
    ignore_small: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Tensors below this fraction of the mean size are evicted last; 0.01 in the authors' prototype."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"recomputes cheap, large and old tensors, {format_budget(self.budget_bytes, self.ratio)}"

    def policy(self) -> Policy:
        """Return DTR with the chosen score; with the first to be played if several are."""
        if self.heuristic == "random":
            return replace(self._base(), random=True)
        heuristic = "e_star" if self.heuristic == "best" else self.heuristic
        return replace(self._base(), **DTR_HEURISTICS[heuristic])

    def options(self) -> tuple[Policy, ...]:
        """Return all published scores if the best is asked for."""
        return dtr_options(self._base()) if self.heuristic == "best" else (self.policy(),)

    def _base(self) -> Policy:
        return replace(DTR, sample=self.sample, ignore_small=self.ignore_small)
