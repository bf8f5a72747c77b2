"""Weights divided over the ranks, their shards passed round past every rank's own samples (rotated tensor parallelism)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from memtune.edit import Edit, accumulate_gradients
from memtune.parameters import columns_of
from memtune.passes.tensor import Sharing, average, sum_shards
from memtune.program import APART, Program, Resource
from memtune.remembered import remembered
from memtune.runtime.context import Context
from memtune.runtime.rotate import rotate
from memtune.search_spaces.sharding.parallel._layers import InParts, divides_states, needs_plan, of_another
from memtune.technique import CutRecording, Plan, Reason, Target
from memtune.units import format_bytes


class Rtp(InParts):
    """Trades the all-gather of whole units for one hop per shard and layer, and many small products for each large one.

    A rank holds 1/degree of the weights of linear layers and embeddings, of their gradients and their optimizer state. In a
    layer's forward the shards go round the ring, and each rank computes its own samples' outputs with the shard at hand; in
    backward they go round again beside the sums of their gradients, which end at home. No layer is ever whole on a rank:
    2/degree of one are beside the own shard (1/degree in place), and as much of its gradient.

    Reordered: an output is the plain product's, some columns at a time. The gradient of a layer's input is a sum of `degree`
    partial sums, that of a weight the ranks' sums added in the order of the ring, within (degree + 1)·eps·Σ|gᵣ|/degree of the
    plain mean.

    Distinguishing test: per micro-batch 3·(degree - 1)/degree of the rotated bytes cross the link in hops of one shard, and no
    collective of a whole unit does.
    """

    kind: Literal["rtp"] = "rtp"
    title: ClassVar[str] = "Weights passed round the ranks"
    source: ClassVar[str] = "Luo et al. 2023, RTP, arXiv:2311.01635"

    in_place: bool = False
    """Write each shard over the own one: half the bytes beside it, one hop more a round, and a copy."""

    def asked(self, target: Target) -> str:
        """Weights, beside the own shard or over it."""
        return "rotated in place" if self.in_place else "rotated"

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """The step as recorded with the weights going round; what stays whole, and copies, averaged after backward.

        What divides or replicates states averages gradients between copies itself; what is whole is left to `finish`.
        """
        degree, ranks, node = self.degree or target.ranks, target.ranks, target.hardware.local_ranks(target.ranks)
        going_round = _going_round(program, self._recorded(target))
        if divides_states(target):
            return going_round
        step = going_round.step
        rotated = np.isin(columns_of(step.parameters).names, plan.decisions["parameters"])
        edit = Edit(step)
        average(edit, step, ~rotated, ranks, _link(1, node), program.accumulate)
        if degree < ranks:
            average(edit, step, rotated, ranks // degree + APART * (degree - 1), _link(degree, node), program.accumulate)
        return program.with_step(edit.done())

    def finish(self, program: Program, plan: Plan, target: Target) -> Program | Reason:
        """What every rank has whole, averaged inside a ring after the states' own reductions."""
        if not divides_states(target):
            return program
        rotated = plan.decisions["parameters"]
        whole = frozenset(p.name for p in program.step.parameters if p.trainable) - frozenset(rotated)
        node = target.hardware.local_ranks(target.ranks)
        inside = Resource.INTER_LINK if node == 1 else Resource.INTRA_LINK
        how = Sharing(self.degree or target.ranks, 1, Resource.NOTHING, program.accumulate, whole, inside)
        return program.with_step(sum_shards(program.step, how))

    def apply(self, context: Context, plan: Plan) -> None:
        """Divide the weights that the plan names."""
        degree = self.degree or context.ranks
        rotate(context, _layers(plan, degree), degree, in_place=self.in_place)

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """How many layers' weights go round how many ranks, and the bytes that a micro-batch sends."""
        layers, degree = plan.decisions.get("layers"), plan.decisions.get("degree")
        if not layers or not degree:
            return ()
        n_bytes = format_bytes(plan.decisions.get("rotated_bytes", 0))
        return (
            f"the weights of {len(layers)} layers go round {degree} ranks, {n_bytes} in all",
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


def _layers(plan: Plan, degree: int) -> list[str]:
    """The layers that `plan` names.

    Raises:
        ApplyError: There is no plan, or it was made for another degree.
    """
    layers, wanted = plan.decisions.get("layers"), plan.decisions.get("degree")
    if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
        raise needs_plan("rtp", "Whether anything else uses the weights is seen by recording a step.")
    if wanted != degree:
        raise of_another("rtp", f"It is for rings of {wanted}, here of {degree}.")
    return layers
