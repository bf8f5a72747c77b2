"""Weight shards that rotate past every rank's own samples (rotated tensor parallelism)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.parallel.model import Sharing, average, rotate, sum_shards
from memtune.program import APART, Edit, Program, Resource, accumulate_gradients, columns_of, memoized
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import (
    PartitionedLayers,
    divides_states,
)
from memtune.technique import PassStage, Plan, Reason, Rewrite, ShardedRecording, Target
from memtune.units import format_bytes, format_ranks


class RtpPlan(Plan):
    """Layers whose weights rotate over the ranks."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a ring."""
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the modules."""
    parameters: tuple[str, ...]
    """Names of the sharded parameters."""
    rotated_bytes: Annotated[int, Field(ge=0)]
    """Unsharded bytes of these parameters."""


class Rtp(PartitionedLayers):
    """Trades the all-gather of full units for one hop per shard and layer, and many small products for each
    large one.

    A rank holds 1/degree of the weights of linear layers, convolutions, embeddings and experts, of their
    gradients and their optimizer state. In a layer's forward the shards rotate over the ring, and each rank
    computes its own samples' outputs with the current shard; in backward they rotate again together with the
    sums of their gradients, which end on the owner. Weights of experts pass every rank, also one without
    tokens for them; tokens are sent nowhere. No layer is ever unsharded on a rank: 2/degree of one are
    allocated besides the own shard (1/degree in place), and as much of its gradient.

    Reordered: an output is the plain product's, some columns at a time. The gradient of a layer's input is a
    sum of `degree` partial sums, that of a weight the ranks' sums added in the order of the ring, within
    (degree + 1)·eps·Σ|gᵣ|/degree of the plain mean.

    Distinguishing test: per micro-batch 3·(degree - 1)/degree of the rotated bytes cross the link in hops of
    one shard, and no collective of a full unit does.
    """

    kind: Literal["rtp"] = "rtp"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (RtpPlan,)
    title: ClassVar[str] = "Weights rotated over the ranks"
    source: ClassVar[str] = "Luo et al. 2023, RTP, arXiv:2311.01635"
    paper: ClassVar[str] = "RTP"

    in_place: bool = False
    """Write each shard over the own one: half the extra bytes, one hop more per rotation, and a copy."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return (
            f"divides every layer over {format_ranks(self.degree)}, between which parts of the weights rotate"
        )

    def asked(self, target: Target) -> str:
        """Return the rotation, into a second buffer or in place."""
        return "rotated in place" if self.in_place else "rotated"

    def rewrite(self, program: Program, plan: RtpPlan, target: Target) -> Program:
        """Return the recorded step with rotating weights, and averages of replicated parameters and copies
        after backward.

        Techniques of `sharding.states` average gradients between copies themselves; `_average_in_ring` then
        averages replicated parameters.
        """
        degree, ranks, node = (
            self.degree or target.ranks,
            target.ranks,
            target.hardware.local_ranks(target.ranks),
        )
        rotating = _rotating(program, self._recorded(target))
        if divides_states(target):
            return rotating
        step = rotating.step
        rotated = np.isin(columns_of(step.parameters).names, plan.parameters)
        edit = Edit(step)
        average(edit, step, ~rotated, ranks, _link(1, node), program.accumulate)
        if degree < ranks:
            average(
                edit,
                step,
                rotated,
                ranks // degree + APART * (degree - 1),
                _link(degree, node),
                program.accumulate,
            )
        return program.with_step(edit.done())

    def passes(self) -> Mapping[PassStage, Rewrite]:
        return {**super().passes(), PassStage.WHOLE_STEP: self._average_in_ring}

    def _average_in_ring(self, program: Program, plan: RtpPlan, target: Target) -> Program | Reason:
        """Average replicated parameters inside a ring after the states' own reductions."""
        if not divides_states(target):
            return program  # `rewrite` has averaged over all ranks
        rotated = plan.parameters
        replicated = frozenset(p.name for p in program.step.parameters if p.trainable) - frozenset(rotated)
        node = target.hardware.local_ranks(target.ranks)
        inside = Resource.INTER_LINK if node == 1 else Resource.INTRA_LINK
        how = Sharing(
            self.degree or target.ranks, 1, Resource.NOTHING, program.accumulate, replicated, inside
        )
        return program.with_step(sum_shards(program.step, how))

    def apply(self, context: Context, plan: RtpPlan) -> None:
        """Shard the weights that the plan names."""
        degree = self.degree or context.placement.world_size
        if plan.degree != degree:
            raise refusals.plan_of_other_model(
                "sharding.parallel: {kind: rtp}",
                f"It is for rings of {plan.degree}, the config has {degree}.",
            )
        rotate(context, plan.layers, degree, in_place=self.in_place)

    def explain(self, plan: RtpPlan) -> tuple[str, ...]:
        n_bytes = format_bytes(plan.rotated_bytes)
        return (
            f"the weights of {len(plan.layers)} layers rotate over {plan.degree} ranks, {n_bytes} in all",
            "every rank has its own samples",
        )

    def record(self, target: Target) -> dict[str, Any]:
        return {"parallel.rotated": {"degree": self.degree or target.ranks, "in_place": self.in_place}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"in_place": (False, True)}


@memoized
def _rotating(program: Program, recorded: ShardedRecording) -> Program:
    """Return one object for all sharding of states, so that results of other passes are shared as well."""
    step = recorded.recording.at(program.micro_batch)
    return program.with_step(step if program.accumulate == 1 else accumulate_gradients(step))


def _link(stride: int, node: int) -> Resource:
    """Return the link of a group of every `stride`-th rank."""
    return Resource.INTER_LINK if stride % node == 0 and node > 1 else Resource.INTRA_LINK
