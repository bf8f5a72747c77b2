"""Optimizer state sharded over ranks; gradients and parameters replicated (ZeRO stage 1)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.parallel.sharding import Factors, divide, partition_states
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.states._zero import cannot_partition, partitioning, settings
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Zero1(Technique):
    """Trades DDP's all-reduce for a reduce-scatter before the step and an all-gather after it: 1/N of the
    optimizer state.

    Gradients are summed unsharded over the micro-batches. In the last one they are packed into buckets when
    they are ready, every rank receives its rows of the mean, and the unsharded ones are freed. The link
    carries as many bytes as under DDP, but the second half of them only after the optimizer's step, where no
    compute hides them.

    Reordered: the gradient of the union batch is the mean over N ranks of the means over their samples. Each
    rank rounds its own sum and the ring adds N of them, so an element differs from the plain one by at most
    (N + 1)·eps·Σ|gᵣ|/N in addition to the rounding of the per-sample sums, which both have. Parameters are
    replicated, so forward is bitwise.
    """

    kind: Literal["zero1"] = "zero1"
    title: ClassVar[str] = "Optimizer state divided over the ranks"
    clause: ClassVar[str] = "divides optimizer state over all ranks"
    source: ClassVar[str] = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.1"
    paper: ClassVar[str] = "ZeRO-1"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(among_copies=True, shards="optimizer", reduces="ready")

    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """MiB of gradients reduced, and of weights gathered, at once; large buckets pay latency less often, small
    ones hold less.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks and parameters that have rows."""
        return cannot_partition(program, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Pack ready gradients into buckets, shrink state to a shard, all-gather weights after the step."""
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
        return settings(target, self.bucket_cap_mb, every_micro_batch=False)
