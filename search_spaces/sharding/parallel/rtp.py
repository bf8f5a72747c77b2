"""Weight shards that rotate past every rank's own samples (rotated tensor parallelism)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.parallel.model import rotate
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import DividedPlan, PartitionedWeights
from memtune.technique import Plan, Target
from memtune.units import format_bytes, format_ranks


class Rtp(PartitionedWeights):
    """Trades the all-gather of full units for one hop per shard and layer, and many small products for each
    large one.

    A rank holds 1/degree of the weights of linear layers, convolutions, embeddings and experts, of their
    gradients and their optimizer state. In a layer's forward the shards rotate over the ring, and each rank
    computes its own samples' outputs with the current shard; in backward they rotate again together with the
    sums of their gradients, which end on the owner. Weights of experts pass every rank, also one without
    tokens for them; tokens are sent nowhere. Experts are modules of a list, or stacked in the weights of one
    module, whose code then runs again in backward. No layer is ever unsharded on a rank: 2/degree of one are
    allocated besides the own shard (1/degree in place), and as much of its gradient.

    Reordered: an output is the plain product's, some columns at a time; that of a transposed convolution is a
    sum of `degree` partial sums, by input channels. The gradient of a layer's input is a sum of as many, that
    of a weight the ranks' sums added in the order of the ring, within
    (degree + 1)·eps·Σ|gᵣ|/degree of the plain mean.
    """

    kind: Literal["rtp"] = "rtp"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (DividedPlan,)
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

    def sharding_kind(self, target: Target) -> str:
        """Return the rotation, into a second buffer or in place."""
        return "rotated in place" if self.in_place else "rotated"

    def apply(self, context: Context, plan: DividedPlan) -> None:
        """Shard the weights that the plan names."""
        rotate(context, plan.layers, self.checked_degree(context, plan), in_place=self.in_place)

    def explain(self, plan: DividedPlan) -> tuple[str, ...]:
        n_bytes = format_bytes(plan.divided_bytes)
        return (
            f"the weights of {len(plan.layers)} layers rotate over {plan.degree} ranks, {n_bytes} in all",
            "every rank has its own samples",
        )

    def record(self, target: Target) -> dict[str, Any]:
        return {"parallel.rotated": {"degree": self.degree or target.ranks, "in_place": self.in_place}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"in_place": (False, True)}
