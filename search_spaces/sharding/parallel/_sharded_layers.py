"""Bases of techniques that divide layers over ranks: recorded steps, groups, plans that name layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.parallel.model import Sharing, average, share, sum_shards
from memtune.parallel.replicas import BUCKET_CAP_MB, Replication, replicate
from memtune.program import (
    APART,
    Edit,
    Program,
    RankClass,
    Resource,
    accumulate_gradients,
    columns_of,
    is_differentiated_again,
    memoized,
)
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.search_spaces._support import conflict
from memtune.technique import Exactness, PassStage, Plan, Reason, Rewrite, ShardedRecording, Target, Technique
from memtune.workload import Pair, find_pairs


def divides_states(target: Target) -> bool:
    """Return True if `sharding.states` shards or replicates model states and averages gradients."""
    return active(target, "sharding.states") is not None


class PairsPlan(Plan):
    """Layers that a group of ranks shares."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a group."""
    pairs: Annotated[tuple[Pair, ...], Field(min_length=1)]
    """Pairs of linear layers, each with columns and row, and whether it belongs to attention."""


class SharedLayers(Technique):
    """Layers that a group of ranks computes together, as a recording with divided layers confirmed."""

    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(layers="shared", eager_only="graphs are made of whole layers")

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share layers, a divisor of the ranks and of the divided size. Default: all."""

    @abstractmethod
    def sharding_kind(self, target: Target) -> str:
        """Return the division, by its name in `autotune.record_parallel.sharded_recording`."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require ranks, a degree that divides ranks and layers, and no conflicting division of states."""
        degree = self.degree or target.ranks
        if target.ranks < 2:
            return refusals.one_rank(" to share layers with")
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        if is_differentiated_again(program.step):
            return refusals.differentiated_again("layers that ranks share have no second derivative")
        if (reason := refusals.uneven_groups("degree", degree, target.ranks)) is not None:
            return reason
        if target.sharded is None or not target.plans_parallel(self.kind):
            return Reason(
                "each degree must be recorded, which is done when the slot is searched",
                "--axes sharding.parallel,recompute",
            )
        if (reason := conflict(self, target, "offload.states")) is not None:
            return reason
        states = active(target, "sharding.states")
        if states is not None and (reason := self._refuse_states(states, target)) is not None:
            return reason
        found = target.sharded(degree, self.sharding_kind(target), target.ranks)
        return found if isinstance(found, Reason) else None

    def _refuse_states(self, states: Technique, target: Target) -> Reason | None:
        """Return why `states`, which shards or replicates, does not work with this technique."""
        text = f"sharding.states: {states.kind} does not work on layers that ranks share"
        return Reason(text, "sharding.states: {kind: none}")

    def plan(self, program: Program, target: Target) -> Plan:
        return self.plan_types[0](**self._recorded(target).fields)

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return all ranks and the sizes of a node, a part of it or several."""
        return {"degree": (None, *target.group_sizes()), **self.choices()}

    def _recorded(self, target: Target) -> ShardedRecording:
        found = (
            target.sharded(self.degree or target.ranks, self.sharding_kind(target), target.ranks)
            if target.sharded is not None
            else None
        )
        assert isinstance(found, ShardedRecording), "fits refuses what was not recorded"
        return found


class PartitionedLayers(SharedLayers):
    """Layers divided over a group's ranks; states are sharded among the ranks with the same part."""

    def ranks_of_a_copy(self, ranks: int) -> int:
        return self.degree or ranks

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        return True

    def _refuse_states(self, states: Technique, target: Target) -> Reason | None:
        degree = self.degree or target.ranks
        if degree == target.ranks:
            return refusals.no_copies(degree, f"sharding.states: {states.kind}")
        if not states.effects.among_copies:
            return super()._refuse_states(states, target)
        if not isinstance(getattr(states, "reshard_after_forward", True), bool):
            return refusals.reshard_among_sharers(states.kind)
        return None


class DividedPlan(Plan):
    """Layers of whose weights each rank of a group holds a part."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a group."""
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the modules."""
    parameters: tuple[str, ...]
    """Names of the divided parameters."""
    divided_bytes: Annotated[int, Field(ge=0)]
    """Their bytes on all ranks of a group."""


class PartitionedWeights(PartitionedLayers):
    """Layers of whose weights each rank of a group has a part, while every rank computes its own samples.

    Layers average the gradients of divided weights inside a group; those of all other parameters are averaged
    over all ranks in buckets, during backward, those of divided weights between groups after it.
    """

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """Return the recorded step, with averages of replicated parameters and copies."""
        # Techniques of `sharding.states` average gradients between copies themselves;
        # `_average_in_group` then averages replicated parameters.
        degree = self.degree or target.ranks
        ranks = target.ranks
        node = target.hardware.local_ranks(target.ranks)
        divided = _divided(program, self._recorded(target))
        if divides_states(target):
            return divided
        step = divided.step
        if degree < ranks:
            parts = np.isin(columns_of(step.parameters).names, plan.parameters)
            edit, group = Edit(step), ranks // degree + APART * (degree - 1)
            average(edit, step, parts, group, _link(degree, node), program.accumulate)
            step = edit.done()
        without = frozenset(plan.parameters)
        sharing = Replication(ranks, BUCKET_CAP_MB << 20, program.accumulate, without=without)
        return program.with_step(replicate(step, sharing))

    def passes(self) -> Mapping[PassStage, Rewrite]:
        return {**super().passes(), PassStage.WHOLE_STEP: self._average_in_group}

    def _average_in_group(self, program: Program, plan: Any, target: Target) -> Program | Reason:
        """Average replicated parameters inside a group after the states' own reductions."""
        if not divides_states(target):
            return program  # `rewrite` has averaged over all ranks
        trainable = (p.name for p in program.step.parameters if p.trainable)
        replicated = frozenset(trainable) - frozenset(plan.parameters)
        node = target.hardware.local_ranks(target.ranks)
        inside = Resource.INTER_LINK if node == 1 else Resource.INTRA_LINK
        sharing = Sharing(
            self.degree or target.ranks, 1, Resource.NOTHING, program.accumulate, replicated, inside
        )
        return program.with_step(sum_shards(program.step, sharing))

    def checked_degree(self, context: Context, plan: DividedPlan) -> int:
        """Return the ranks of a group.

        Raises:
            ApplyError: The plan was made for another degree.
        """
        degree = self.degree or context.placement.world_size
        if plan.degree != degree:
            raise refusals.plan_of_other_model(
                f"sharding.parallel: {{kind: {self.kind}}}",
                f"It is for groups of {plan.degree}, the config has {degree}.",
            )
        return degree


@memoized
def _divided(program: Program, recorded: ShardedRecording) -> Program:
    """Return one object for all sharding of states, so that results of other passes are shared as well."""
    step = recorded.recording.at(program.micro_batch)
    return program.with_step(step if program.accumulate == 1 else accumulate_gradients(step))


def _link(stride: int, node: int) -> Resource:
    """Return the link of a group of every `stride`-th rank."""
    return Resource.INTER_LINK if stride % node == 0 and node > 1 else Resource.INTRA_LINK


class MicroBatchRotation(SharedLayers):
    """Layers for which a group of ranks computes one micro-batch at a time, each rank's in order."""

    def summed(self, program: Program, plan: Any) -> frozenset[str]:
        """Return the parameters whose gradients a group sums; none if every rank computes all of them."""
        return frozenset()

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """Return the step with divided layers, batches sent to the group, and gradients averaged."""
        # Techniques of `sharding.states` average gradients themselves; `_sum_in_group` then sums
        # inside a group.
        degree, node = self.degree or target.ranks, target.hardware.local_ranks(target.ranks)
        accumulate = program.accumulate * degree
        between = Resource.INTER_LINK if degree % node == 0 else Resource.INTRA_LINK
        alone = not divides_states(target)
        copies, summed = (
            (target.ranks // degree, self.summed(program, plan)) if alone else (1, frozenset[str]())
        )
        return _rotated(
            program,
            self._recorded(target),
            Sharing(degree, copies, between, accumulate, summed, self._inside(target)),
        )

    def _inside(self, target: Target) -> Resource:
        """Return the link inside a group."""
        return Resource.INTER_LINK if target.hardware.local_ranks(target.ranks) == 1 else Resource.INTRA_LINK

    def passes(self) -> Mapping[PassStage, Rewrite]:
        return {**super().passes(), PassStage.WHOLE_STEP: self._sum_in_group}

    def _sum_in_group(self, program: Program, plan: Any, target: Target) -> Program | Reason:
        """Sum gradients inside a group, if each rank has a part of the sum, after reductions of states."""
        degree = self.ranks_of_a_copy(target.ranks)
        if degree == 1 or not divides_states(target):
            return program  # an average over all ranks includes the sum over the group
        summed = self.summed(program, plan)
        if not summed:
            return program
        sharing = Sharing(degree, 1, Resource.NOTHING, program.accumulate, summed, self._inside(target))
        return program.with_step(sum_shards(program.step, sharing))


@memoized
def _rotated(program: Program, recorded: ShardedRecording, sharing: Sharing) -> Program:
    """Return one object per number of copies, so that results of other passes are shared."""
    step = share(accumulate_gradients(recorded.recording.at(program.micro_batch)), sharing)
    ranks = (RankClass(program.ranks, step),)
    return Program(ranks, program.micro_batch, sharing.accumulate, program.notes, sharers=sharing.ranks)


class CutLayers(PartitionedLayers, MicroBatchRotation):
    """Layers of which each rank of a group has a part, for one micro-batch at a time."""

    plan_types: ClassVar[tuple[type[Plan], ...]] = (PairsPlan,)

    @abstractmethod
    def cut_live(self, context: Context, pairs: Sequence[Pair], degree: int) -> None:
        """Divide `pairs` of the live model."""

    def apply(self, context: Context, plan: PairsPlan) -> None:
        """Divide the layers that the plan names."""
        degree = self.degree or context.placement.world_size
        self.cut_live(context, checked_pairs(self.kind, context, plan, degree), degree)

    def explain(self, plan: PairsPlan) -> tuple[str, ...]:
        heads = sum(pair.attention for pair in plan.pairs)
        return (
            f"{plan.degree} ranks share {heads} attentions and {len(plan.pairs) - heads} MLPs",
            "each rank provides its own micro-batches, which the group computes one by one",
        )


def checked_pairs(kind: str, context: Context, plan: PairsPlan, degree: int) -> tuple[Pair, ...]:
    """Return the pairs of `plan` for a technique of this kind, checked against the model.

    Raises:
        ApplyError: The plan was made for another degree or model.
    """
    shapes = [(name, tuple(p.shape)) for name, p in context.model.named_parameters()]
    known = find_pairs(shapes, context.blocks).found
    unknown = [pair.row for pair in plan.pairs if pair not in known]
    if unknown or plan.degree != degree:
        raise refusals.plan_of_other_model(
            f"sharding.parallel: {{kind: {kind}}}",
            (
                f"{unknown[0]} is not a pair here."
                if unknown
                else f"It is for groups of {plan.degree}, the config has {degree}."
            ),
        )
    return plan.pairs
