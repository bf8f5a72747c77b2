"""Optimizer state divided over the ranks; gradients and parameters whole (ZeRO stage 1)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.parallel.sharding import Factors, divide, partition_states
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.states._zero import partitioning, settings, unfit
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Zero1(Technique):
    """Trades DDP's all-reduce for a reduce-scatter before the step and an all-gather after it: 1/N of the
    optimizer state.

    Gradients are summed whole over the micro-batches. In the last one they are packed into buckets as they
    arrive, every rank gets its rows of the mean, and the whole ones are let go. The link carries as many
    bytes as under DDP, but the second half of them only after the optimizer's step, where nothing hides them.

    Reordered: the gradient of the union batch is the mean over N ranks of the means over their samples. Each
    rank rounds its own sum and the ring adds N of them, so an element differs from the plain one by at most
    (N + 1)·eps·Σ|gᵣ|/N beside the rounding of the per-sample sums themselves, which both have. Parameters are
    whole, so forward is bitwise.

    Distinguishing test: a rank holds all parameters and 1/N of the state (rounded up along the first dim),
    and per step the gradients cross the link once and the weights once, (N - 1)/N of each.
    """

    kind: Literal["zero1"] = "zero1"
    slot: ClassVar[str] = "sharding.states"
    title: ClassVar[str] = "Optimizer state divided over the ranks"
    source: ClassVar[str] = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(among_copies=True, shards="optimizer", reduces="ready")

    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """MiB of gradients reduced, and of weights gathered, at once; large buckets pay latency less often, small
    ones hold less.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs two ranks and parameters that have rows."""
        return unfit(program, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Gradients into buckets as they arrive, state at the size of a shard, weights gathered after the
        step.
        """
        how = partitioning(program, target, self.bucket_cap_mb, every_micro_batch=False)
        return program.with_step(partition_states(program.step, how))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to this rank's rows of every parameter."""
        divide(
            context,
            Factors(1, 1, context.placement.data_parallel_size),
            kind=self.kind,
            bucket_cap_mb=self.bucket_cap_mb,
        )

    def record(self, target: Target) -> dict[str, Any]:
        """Ranks over which each state is divided, and the buckets."""
        return settings(target, self.bucket_cap_mb, every_micro_batch=False)
