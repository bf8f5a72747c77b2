"""Experts divided over ranks that have their own samples; tokens are sent to the owners of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.parallel.model import ReplicaRule, divide_experts
from memtune.program import Program, split_expert_name
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.search_spaces.sharding.parallel._sharded_layers import DividedPlan, PartitionedWeights
from memtune.technique import Plan, Reason, ShardedRecording, Target
from memtune.units import format_bytes, format_ranks


class ExpertPlan(DividedPlan):
    """Modules of experts of which each rank of a group owns some."""

    busiest: Annotated[float, Field(ge=0)]
    """Rows that the busiest rank receives over the mean, as recorded."""
    worth_rows: Annotated[int, Field(ge=0)] = 0
    """Rows that a replica must take from the busiest rank."""


class ExpertParallel(PartitionedWeights):
    """Trades four all-to-alls of the routed tokens per layer for 1/degree of the experts and their state.

    Each rank owns experts/degree of every module of experts. In forward a token's row is sent to the owner
    of each expert that it is routed to, and the output back; in backward the gradients take the same ways.
    Experts see the rows of all ranks of a group, so their gradients need no reduction inside it; all other
    parameters are replicated, and their gradients averaged in buckets during backward, as DDP does.

    With `inner_degree`, the ranks of a node, rows first go inside the node to the rank with the owner's
    place, then over the network between ranks of one place: as many bytes there, in fewer messages.

    With `replicas`, hot experts also run on ranks that get few rows. Their weights are sent there in every
    forward, their gradients back in backward; which experts is chosen from the rows of the steps before.

    Peak and time are those of a rank to which the recorded routing sends most rows, while a router whose
    choices are not known spreads them evenly. The optimizer keeps state for the one value that replaces
    each weight of an expert elsewhere, once tokens reach that expert: it is not counted, one block of 512
    bytes per moment and weight on an accelerator.

    Reordered: an output is the plain one, a sum of its experts' in the same order; the gradient of an
    expert's weight adds the rows of all ranks in one product, within (rows + degree)·eps·Σ|gᵣxᵣ|/degree of
    the plain mean.
    """

    kind: Literal["expert_parallel"] = "expert_parallel"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (ExpertPlan,)
    title: ClassVar[str] = "Experts divided over ranks"
    source: ClassVar[str] = (
        "Lepikhin et al. 2020, GShard, arXiv:2006.16668; hierarchical: Shen et al. 2022, arXiv:2205.10034"
    )
    paper: ClassVar[str] = "MoESys"

    inner_degree: Annotated[int, Field(ge=2)] | None = None
    """Consecutive ranks, of a node, inside which rows are sent first; less than `degree`. Default: none."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Experts of other ranks that a rank hosts at most in each layer; not for experts that are modules of a
    list.
    """
    worth_rows: Annotated[int, Field(ge=0)] | None = None
    """Rows of a call that a replica must take from the busiest rank. Default: as many as take the time of
    sending its weights and its gradient.
    """
    replica_steps: Annotated[int, Field(ge=1)] = 16
    """Optimizer steps between choices of replicas."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        way = "" if self.inner_degree is None else f", inside {self.inner_degree} ranks first"
        hot = f", with {self.replicas} replicas of hot ones on each" if self.replicas else ""
        return f"divides experts over {format_ranks(self.degree)}, to which tokens are sent{way}{hot}"

    def sharding_kind(self, target: Target) -> str:
        """Return the exchange of rows, at once or by node, and the replicas."""
        rule = self._rule(target)
        return f"experts{self.inner_degree or ''}" + (f"+{rule.most}:{rule.worth_rows}" if rule.most else "")

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require experts, and an `inner_degree` that divides the degree."""
        inner, degree = self.inner_degree, self.degree or target.ranks
        if inner is not None and (degree % inner or inner == degree):
            return Reason(
                f"inner_degree={inner} is no proper divisor of the {degree} ranks that divide experts",
                "inner_degree: null",
            )
        if self.replicas and self._divides_lists_alone(target):
            return Reason("experts that are modules of a list have no replicas", "replicas: 0")
        if (reason := super().fits(program, target)) is not None:
            return reason
        # The other slot is asked last: a refusal that reads none holds for all candidates.
        if not _divides_lists(self._recorded(target).fields):
            return None
        states = active(target, "sharding.states")
        if states is None or states.effects.shards == "replicas":
            return None
        text = f"each expert of a list is whole on its owner, which sharding.states: {states.kind} shards"
        return Reason(text, "sharding.states: {kind: ddp}")

    def apply(self, context: Context, plan: ExpertPlan) -> None:
        """Divide the modules of experts that the plan names."""
        rule = ReplicaRule(self.replicas, plan.worth_rows, self.replica_steps)
        divide_experts(context, plan.layers, self.checked_degree(context, plan), self.inner_degree, rule)

    def explain(self, plan: ExpertPlan) -> tuple[str, ...]:
        n_bytes = format_bytes(plan.divided_bytes)
        return (
            f"{len(plan.layers)} layers of experts, {n_bytes} in all, are divided over {plan.degree} ranks",
            f"the busiest rank gets {plan.busiest:.2f} times the mean of the rows: its activations grow with"
            " this factor, which follows the router",
        )

    def record(self, target: Target) -> dict[str, Any]:
        knobs = {"degree": self.degree or target.ranks, "inner_degree": self.inner_degree}
        return {"parallel.experts": {**knobs, "replicas": self.replicas}}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return all ranks and smaller groups, and rows by node if there are several."""
        node = target.hardware.local_ranks(target.ranks)
        ways = (None, node) if 1 < node < target.ranks else (None,)
        return {**super().choices_on(target), "inner_degree": ways, "replicas": (0, 1)}

    def _divides_lists_alone(self, target: Target) -> bool:
        """Return whether experts are modules of a list, by the recording without replicas."""
        plain = self.model_copy(update={"replicas": 0})
        if target.sharded is None:
            return False
        found = target.sharded(self.degree or target.ranks, plain.sharding_kind(target), target.ranks)
        return isinstance(found, ShardedRecording) and _divides_lists(found.fields)

    def _rule(self, target: Target) -> ReplicaRule:
        """Return the replicas, each for the rows that take as long as its transfers."""
        worth, hardware = self.worth_rows, target.hardware
        if worth is None:
            spans = (self.degree or target.ranks) > hardware.local_ranks(target.ranks)
            link = hardware.inter_link_bytes_per_s if spans else hardware.intra_link_bytes_per_s
            # A row takes six operations for each weight; two bytes of it and of its gradient are sent.
            worth = int(4 / link * hardware.bf16_flops_per_s / 6)
        return ReplicaRule(self.replicas, worth, self.replica_steps)


def _divides_lists(fields: Mapping[str, Any]) -> bool:
    return any(split_expert_name(name) is not None for name in fields["parameters"])
