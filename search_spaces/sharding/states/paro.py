"""Each state replicated, sharded in a group, or sharded over all ranks: PaRO's strategies (N, I, G)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.errors import ApplyError
from memtune.parallel.sharding import Factors
from memtune.program import Program
from memtune.search_spaces.sharding.states._fsdp_technique import GroupPlan
from memtune.search_spaces.sharding.states._nested import BUCKETS_MB, _NestedSharding
from memtune.technique import Exactness, Plan, Reason, Target

_SEARCHED = ("IIG", "NNI", "NIG", "NII", "IGG", "ING")
"""The paper's strategies, and NNI, which holds less than NNN for the traffic of a step alone."""


class Paro(_NestedSharding):
    """Trades bytes for the place of traffic: messages of every micro-batch use links in a group, those of a
    step may cross it.

    Three letters give the sharding of parameters, gradients and optimizer state: N not at all, I inside a
    group of m ranks, G over all. IIG gathers and reduces inside groups as MiCS does, and holds 1/N of the
    optimizer state: the sums are sharded further in the last micro-batch, and updated weights are gathered
    between groups once. ING also sends no gradient before the last micro-batch. Of the 27 triples a search
    tries those of the paper; a config may name every one that can be built. Those without an I have names of
    their own (zero1, zero2, fsdp).

    Reordered: gradients are averaged over groups, summed over a micro-batches and averaged again; an element
    differs from the plain one by at most (N + a + 1)·eps·Σ|gᵣ|/N in addition to the rounding of the
    per-sample sums.
    """

    kind: Literal["paro"] = "paro"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (GroupPlan,)
    title: ClassVar[str] = "States divided in groups or over all ranks"
    source: ClassVar[str] = "Wu et al. 2023, PaRO, arXiv:2310.06003, section 3"
    paper: ClassVar[str] = "PaRO"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    strategy: Annotated[str, Field(pattern="^[NIG]{3}$")] = "IIG"
    """Sharding of parameters, gradients and optimizer state, a letter each."""
    group: Annotated[int, Field(ge=2)] | None = None
    """Ranks of a group. Default: those of a node."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        group = "node" if self.group is None else f"group of {self.group} ranks"
        places = {"N": "on every rank", "I": f"divided in each {group}", "G": "divided over all ranks"}
        states = zip(("weights", "gradients", "optimizer state"), self.strategy, strict=True)
        return f"keeps {', '.join(f'{state} {places[letter]}' for state, letter in states)}"

    def _factors(self, ranks: int, plan: GroupPlan) -> Factors:
        group = self.group or plan.group
        if not group:
            raise ApplyError("paro has no number of ranks in a group.", fix="group: 8", code="MT340")
        return self._over(group, ranks)

    def _over(self, group: int, ranks: int) -> Factors:
        return Factors(*({"N": 1, "I": group, "G": ranks}[letter] for letter in self.strategy))

    def _group(self, target: Target) -> int:
        return self.group or target.hardware.local_ranks(target.ranks)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two groups or more, and a strategy that can be built."""
        group, ranks = self._group(target), target.ranks
        if ranks < 2:
            return refusals.one_rank(" to divide over")
        if group == ranks or ranks % group:
            wrong = refusals.uneven_groups("group", group, ranks)
            return wrong or Reason(
                f"all {group} ranks are in one group, so that I is G", "fewer ranks in a group"
            )
        if "I" not in self.strategy:
            return Reason(f"{self.strategy} does not use the groups", "ddp, zero1, zero2, fsdp or amsp")
        factors = self._over(group, ranks)
        if problem := factors.problem(ranks):
            return Reason(f"{self.strategy} cannot be built: {problem}", "strategy: IIG")
        return self._why_not(factors, program, target)

    def plan(self, program: Program, target: Target) -> GroupPlan:
        return GroupPlan(group=None if self.group else self._group(target))

    def explain(self, plan: GroupPlan) -> tuple[str, ...]:
        return (f"groups of {plan.group} ranks",) if plan.group else ()

    def record(self, target: Target) -> dict[str, Any]:
        factors = self._over(self._group(target), target.ranks)
        return self._divided_settings(factors.document(), factors.parameters > 1)

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return the paper's strategies, in groups of a node or of another size that the ranks allow."""
        if target.ranks < 4:
            return {}
        groups = (None, *target.group_sizes()[:2])
        return {"strategy": _SEARCHED, "group": groups, "bucket_cap_mb": BUCKETS_MB}
