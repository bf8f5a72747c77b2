"""One copy of the model state per group of ranks, with copies averaged once a step (MiCS)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.program import Program
from memtune.search_spaces.sharding.states._fsdp_technique import GroupPlan, _FsdpUnits
from memtune.technique import Plan, Reason, Target


class Mics(_FsdpUnits):
    """Trades N/p times the bytes of model state for gathers and reductions inside groups of p ranks.

    The frequent messages, gathers and reduce-scatters in every micro-batch, use the fast links; the slow ones
    between groups carry one all-reduce of 1/p of the gradients at the end of a step. `fsdp` with `degree: p`
    sends that in every micro-batch, which with one micro-batch a step is the same. Gathers of groups larger
    than a node are the choice of `sharding.communication`.

    Reordered: gradients are averaged over p ranks in each of a micro-batches, summed, and averaged over the
    N/p groups: an element differs from the plain one by at most (N + a + 1)·eps·Σ|gᵣ|/N in addition to the
    rounding of the per-sample sums. Weights are gathered, so forward is bitwise.
    """

    kind: Literal["mics"] = "mics"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (GroupPlan,)
    title: ClassVar[str] = "One copy of the model state per group of ranks"
    source: ClassVar[str] = (
        "Zhang et al. 2022, MiCS, VLDB 16(1), arXiv:2205.00119, sections 3.2 (groups) and 3.4 (two hops)"
    )
    paper: ClassVar[str] = "MiCS"
    effects: ClassVar[Effects] = replace(_FsdpUnits.effects, reduces="step")

    group: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share one copy. Default: those of a node; fewer hold more bytes and gather on shorter rings.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        group = "node" if self.group is None else f"group of {self.group} ranks"
        return f"divides weights, gradients and optimizer state inside each {group}"

    def _degree(self, ranks: int, plan: GroupPlan) -> int:
        group = self.group or plan.group
        if not group:
            raise ApplyError(
                "mics has no number of ranks that share a copy of the model.", fix="group: 8", code="MT340"
            )
        return group

    def _averages_once(self) -> bool:
        # The 2-hop synchronization of the paper: inside the group in each micro-batch, between groups once.
        return True

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two groups or more, several micro-batches a step, and units that FSDP2 can gather."""
        group, ranks = self._group(target), target.ranks
        if ranks < 2:
            return super().fits(program, target)
        if group == ranks:
            return Reason(f"all {group} ranks in one group are fsdp", "sharding.states: fsdp")
        if ranks % group == 0 and program.accumulate == 1:
            return Reason(
                "with one micro-batch a step it is fsdp", f"sharding.states: {{kind: fsdp, degree: {group}}}"
            )
        return refusals.uneven_groups("group", group, ranks) or super().fits(program, target)

    def _group(self, target: Target) -> int:
        return self.group or target.hardware.local_ranks(target.ranks)

    def plan(self, program: Program, target: Target) -> GroupPlan:
        return GroupPlan(group=None if self.group else self._group(target))

    def record(self, target: Target) -> dict[str, Any]:
        return self._settings(self._group(target), target.ranks)

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return parts of a node, a node, and several of them."""
        return {"group": (None, *target.group_sizes()), **self.choices()}
