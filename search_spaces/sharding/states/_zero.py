"""Parts of techniques with replicated parameters and sharded states."""

from __future__ import annotations

from typing import Any

from memtune import refusals
from memtune.parallel.sharding import Partitioning
from memtune.program import Program
from memtune.technique import Reason, Target


def cannot_partition(program: Program, target: Target) -> Reason | None:
    """Return why states cannot be sharded by the rows of their parameters over all ranks, or None."""
    if target.ranks < 2:
        return refusals.one_rank(" to divide over")
    scalar = next((p.name for p in program.step.parameters if p.trainable and not p.shape), None)
    return None if scalar is None else refusals.no_dimension(scalar)


def partitioning(
    program: Program, target: Target, bucket_cap_mb: int, *, every_micro_batch: bool
) -> Partitioning:
    """Return the settings of the pass."""
    return Partitioning(
        ranks=program.ranks,
        bucket_bytes=bucket_cap_mb << 20,
        accumulate=program.accumulate,
        every_micro_batch=every_micro_batch,
        stages_messages=target.device == "cpu",
        # In a pipeline one step has all micro-batches, so gradients are final only after its last backward.
        at_end=program.unrolled > 1,
        after_schedule=program.unrolled > 1,
    )


def settings(target: Target, bucket_cap_mb: int, *, every_micro_batch: bool) -> dict[str, Any]:
    """Return the mechanism's settings: the number of ranks that shard each state, and the buckets."""
    factors = {
        "parameters": 1,
        "gradients": target.ranks if every_micro_batch else 1,
        "optimizer": target.ranks,
    }
    return {"states.shard": factors, "states.buckets": {"bytes": bucket_cap_mb << 20}}
