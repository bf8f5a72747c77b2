"""Gradients and optimizer state sharded over ranks; parameters replicated (ZeRO stage 2)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.parallel.sharding import Factors, divide, partition_states
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.states._zero import cannot_partition, partitioning, settings
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Zero2(Technique):
    """Trades a reduce-scatter in every micro-batch, overlapped with backward, for 1/N of summed gradients and
    optimizer state.

    As `zero1`, but the sums over micro-batches are shards. With one micro-batch a step there are no sums and
    it equals `zero1`, so it requires two or more.

    Reordered: each micro-batch's gradient is the mean over N ranks, and these are added up, while the plain
    model adds first; an element differs from the plain one by at most (N + a + 1)·eps·Σ|gᵣ|/N for a
    micro-batches, in addition to the rounding of the per-sample sums, which both have. Parameters are
    replicated, so forward is bitwise.
    """

    kind: Literal["zero2"] = "zero2"
    title: ClassVar[str] = "Gradients and optimizer state divided over the ranks"
    clause: ClassVar[str] = "divides gradients and optimizer state over all ranks"
    source: ClassVar[str] = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.2"
    paper: ClassVar[str] = "ZeRO-2"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        among_copies=True, shards="gradients", reduces="ready", every_micro_batch=True
    )

    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """MiB of gradients reduced, and of weights gathered, at once; large buckets pay latency less often, small
    ones hold less.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks, parameters that have rows, and sums of gradients to shard."""
        if target.ranks > 1 and program.accumulate == 1:
            return Reason(
                "with one micro-batch a step there are no sums to shard: it equals zero1",
                "sharding.states: zero1",
            )
        return cannot_partition(program, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Pack ready gradients into buckets, shrink sums and state to shards, gather weights at the end."""
        how = partitioning(program, target, self.bucket_cap_mb, every_micro_batch=True)
        return program.with_step(partition_states(program.step, how))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to this rank's rows of every parameter."""
        divide(
            context,
            Factors(1, context.placement.data_parallel_size, context.placement.data_parallel_size),
            kind=self.kind,
            bucket_cap_mb=self.bucket_cap_mb,
        )

    def record(self, target: Target) -> dict[str, Any]:
        return settings(target, self.bucket_cap_mb, every_micro_batch=True)
