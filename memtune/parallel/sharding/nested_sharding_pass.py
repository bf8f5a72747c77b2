"""The pass of `parallel.sharding.nested_sharding`: FSDP2's pass for sharded parameters, and nested divisions
for the other states.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtune.parallel.sharding.factors import Factors
from memtune.parallel.sharding.fsdp_pass import Sharding, Sums, shard_states
from memtune.parallel.sharding.zero_partition_pass import Partitioning, partition_states
from memtune.program import Resource, Step


@dataclass(frozen=True)
class Division:
    """Settings of the sharding of each state over `ranks`, and of its communication."""

    factors: Factors
    ranks: int
    ranks_per_node: int
    micro_batches: int
    bucket_bytes: int
    reshard_after_forward: bool = True
    blocks_per_unit: int = 1
    stages_messages: bool = False
    """As with gloo on CPU, see `fsdp_pass.Sharding`."""
    param_itemsize: int | None = None
    reduce_itemsize: int | None = None
    """As in `fsdp_pass.Sharding`, both."""

    def link(self, size: int, stride: int) -> Resource:
        """Return the link in a group of `size` with `stride`; neighbours share a node's (INTRA_LINK)."""
        return (
            Resource.INTER_LINK if stride > 1 and size * stride > self.ranks_per_node else Resource.INTRA_LINK
        )

    @property
    def sums(self) -> Sums:
        """Sums that FSDP2's micro-batches accumulate."""
        p, g = self.factors.parameters, self.factors.gradients
        return "whole" if g == 1 else "further" if g > p else "shards"


def divide_states(step: Step, how: Division) -> Step:
    """Return `step` as one rank runs it."""
    p, o, s = how.factors.parameters, how.factors.optimizer, how.factors.summed_over
    if p > 1:
        step = shard_states(step, _sharding(how))
    if s > p:
        step = partition_states(step, _partitioning(how, p, s, every_micro_batch=True))
    if o > s:
        step = partition_states(step, _partitioning(how, s, o, every_micro_batch=False))
    return step


def _sharding(how: Division) -> Sharding:
    p, o = how.factors.parameters, how.factors.optimizer
    return Sharding(
        degree=p,
        replicas=how.ranks // p if o == p else 1,
        reshard_after_forward=how.reshard_after_forward,
        blocks_per_unit=how.blocks_per_unit,
        replicas_across_nodes=how.link(how.ranks // p, p) is Resource.INTER_LINK,
        stages_messages=how.stages_messages,
        two_hop=how.sums != "whole",
        sums=how.sums,
        micro_batches=how.micro_batches,
        param_itemsize=how.param_itemsize,
        reduce_itemsize=how.reduce_itemsize,
    )


def _partitioning(how: Division, held: int, over: int, *, every_micro_batch: bool) -> Partitioning:
    """Return the settings of the division from groups of `held` ranks to groups of `over`."""
    is_last = over == how.factors.optimizer
    return Partitioning(
        ranks=over // held,
        bucket_bytes=how.bucket_bytes,
        accumulate=how.micro_batches,
        every_micro_batch=every_micro_batch,
        stages_messages=how.stages_messages,
        at_end=held > 1,
        link=how.link(over // held, held),
        copies=how.ranks // over if is_last else 1,
        between_copies=how.link(how.ranks // over, over),
    )
