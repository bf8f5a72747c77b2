"""Parameters, gradients and optimizer state divided over the ranks, gathered block by block (PyTorch FSDP2, ZeRO-3)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.program import Program
from memtune.search_spaces.sharding.states._units import _Units, does_not_divide
from memtune.technique import Plan, Reason, Target


class Fsdp(_Units):
    """Trades an all-gather of every unit in forward and in backward and a reduce-scatter for 1/degree of the model state.

    A unit is one or more blocks; what is in no block is the root unit, gathered once per micro-batch. With a degree below
    the number of ranks each group of `degree` ranks holds one copy, and gradients are all-reduced between the copies.

    Reordered: the gradient of the union batch is the mean over N ranks of the means over their samples. Each rank rounds
    its own sum and the ring adds N of them, so an element differs from the plain one by at most (N + 1)·eps·Σ|gᵣ|/N
    beside the rounding of the per-sample sums themselves, which both have. Weights are gathered, so forward is bitwise.

    Distinguishing test: a rank holds 1/degree of parameters, gradients and state (rounded up along the first dim), and
    per micro-batch every unit crosses the link once per gather and once per reduction.
    """

    kind: Literal["fsdp"] = "fsdp"
    title: ClassVar[str] = "Model state sharded over ranks"
    source: ClassVar[str] = "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277; Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share one copy of the model state, all of them by default; fewer hold more bytes and gather on shorter rings."""

    def _degree(self, ranks: int, plan: Plan) -> int:
        return self.degree or ranks

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs two ranks, a degree that divides them, and units that FSDP2 can flatten and gather in one place."""
        wrong = does_not_divide("degree", self.degree, target.ranks) if self.degree and target.ranks > 1 else None
        return wrong or super().fits(program, target)

    def record(self, target: Target) -> dict[str, Any]:
        """Ranks over which each state is divided, and what is gathered when."""
        return self._settings(self.degree or target.ranks, target.ranks)

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """All ranks and the sizes of a node, a part of it or several."""
        return {"degree": (None, *target.group_sizes()), **self.choices()}
