"""Weights divided over the ranks, their shards passed round past every rank's own samples (rotated tensor
parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.parallel.model import Sharing, average, rotate, sum_shards
from memtune.program import APART, Edit, Program, Resource, accumulate_gradients, columns_of, remembered
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import InParts, divides_states, of_another
from memtune.technique import CutRecording, PassStage, Plan, Reason, Rewrite, Target
from memtune.units import format_bytes


class RtpPlan(Plan):
    """The layers whose weights go round the ranks."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a ring."""
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the modules."""
    parameters: tuple[str, ...]
    """Names of the parameters of which each rank has a shard."""
    rotated_bytes: Annotated[int, Field(ge=0)]
    """Bytes of these parameters, whole."""


class Rtp(InParts):
    """Trades the all-gather of whole units for one hop per shard and layer, and many small products for each
    large one.

    A rank holds 1/degree of the weights of linear layers and embeddings, of their gradients and their
    optimizer state. In a layer's forward the shards go round the ring, and each rank computes its own
    samples' outputs with the shard at hand; in backward they go round again beside the sums of their
    gradients, which end at home. No layer is ever whole on a rank: 2/degree of one are beside the own shard
    (1/degree in place), and as much of its gradient.

    Reordered: an output is the plain product's, some columns at a time. The gradient of a layer's input is a
    sum of `degree` partial sums, that of a weight the ranks' sums added in the order of the ring, within
    (degree + 1)·eps·Σ|gᵣ|/degree of the plain mean.

    Distinguishing test: per micro-batch 3·(degree - 1)/degree of the rotated bytes cross the link in hops of
    one shard, and no collective of a whole unit does.
    """

    kind: Literal["rtp"] = "rtp"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (RtpPlan,)
    title: ClassVar[str] = "Weights passed round the ranks"
    source: ClassVar[str] = "Luo et al. 2023, RTP, arXiv:2311.01635"

    in_place: bool = False
    """Write each shard over the own one: half the bytes beside it, one hop more a round, and a copy."""

    def asked(self, target: Target) -> str:
        """Weights, beside the own shard or over it."""
        return "rotated in place" if self.in_place else "rotated"

    def rewrite(self, program: Program, plan: RtpPlan, target: Target) -> Program:
        """The step as recorded with the weights going round; what stays whole, and copies, averaged after
        backward.

        What divides or replicates states averages gradients between copies itself; `_average_in_ring` what is
        whole after that.
        """
        degree, ranks, node = (
            self.degree or target.ranks,
            target.ranks,
            target.hardware.local_ranks(target.ranks),
        )
        going_round = _going_round(program, self._recorded(target))
        if divides_states(target):
            return going_round
        step = going_round.step
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
        """The rewrite, and averages inside a ring after the states' own reductions."""
        return {**super().passes(), PassStage.WHOLE_STEP: self._average_in_ring}

    def _average_in_ring(self, program: Program, plan: RtpPlan, target: Target) -> Program | Reason:
        """What every rank has whole, averaged inside a ring after the states' own reductions."""
        if not divides_states(target):
            return program
        rotated = plan.parameters
        whole = frozenset(p.name for p in program.step.parameters if p.trainable) - frozenset(rotated)
        node = target.hardware.local_ranks(target.ranks)
        inside = Resource.INTER_LINK if node == 1 else Resource.INTRA_LINK
        how = Sharing(self.degree or target.ranks, 1, Resource.NOTHING, program.accumulate, whole, inside)
        return program.with_step(sum_shards(program.step, how))

    def apply(self, context: Context, plan: RtpPlan) -> None:
        """Divide the weights that the plan names."""
        degree = self.degree or context.placement.world_size
        if plan.degree != degree:
            raise of_another("rtp", f"It is for rings of {plan.degree}, here of {degree}.")
        rotate(context, plan.layers, degree, in_place=self.in_place)

    def explain(self, plan: RtpPlan) -> tuple[str, ...]:
        """How many layers' weights go round how many ranks, and the bytes that a micro-batch sends."""
        n_bytes = format_bytes(plan.rotated_bytes)
        return (
            f"the weights of {len(plan.layers)} layers go round {plan.degree} ranks, {n_bytes} in all",
            "every rank has its own samples",
        )

    def record(self, target: Target) -> dict[str, Any]:
        """Over how many ranks, and where shards arrive."""
        return {"parallel.rotated": {"degree": self.degree or target.ranks, "in_place": self.in_place}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Beside the own shard, or over it."""
        return {"in_place": (False, True)}


@remembered
def _going_round(program: Program, recorded: CutRecording) -> Program:
    """One object for all states: what other passes make of it is shared as well."""
    step = recorded.recording.at(program.micro_batch)
    return program.with_step(step if program.accumulate == 1 else accumulate_gradients(step))


def _link(stride: int, node: int) -> Resource:
    """What a group of every `stride`-th rank talks over."""
    return Resource.INTER_LINK if stride % node == 0 and node > 1 else Resource.INTRA_LINK
