"""The pass of `parallel.sharding.nested_sharding`: FSDP2's pass for sharded parameters, and nested divisions
for the other states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def divide_states(step: Step, division: Division) -> Step:
    """Return `step` as one rank runs it."""
    p, o, s = division.factors.parameters, division.factors.optimizer, division.factors.summed_over
    if p > 1:
        step = shard_states(step, _sharding(division))
    if s > p:
        step = partition_states(step, _partitioning(division, p, s, every_micro_batch=True))
    if o > s:
        # One division after FSDP2's: its sums are complete unit by unit.
        last = _partitioning(division, s, o, every_micro_batch=False)
        step = partition_states(step, replace(last, overlaps=s == p > 1))
    return step


def _sharding(division: Division) -> Sharding:
    p, o = division.factors.parameters, division.factors.optimizer
    return Sharding(
        degree=p,
        replicas=division.ranks // p if o == p else 1,
        reshard_after_forward=division.reshard_after_forward,
        blocks_per_unit=division.blocks_per_unit,
        replicas_across_nodes=division.link(division.ranks // p, p) is Resource.INTER_LINK,
        stages_messages=division.stages_messages,
        two_hop=division.sums != "whole",
        sums=division.sums,
        micro_batches=division.micro_batches,
        param_itemsize=division.param_itemsize,
        reduce_itemsize=division.reduce_itemsize,
    )


def _partitioning(division: Division, held: int, over: int, *, every_micro_batch: bool) -> Partitioning:
    """Return the settings of the division from groups of `held` ranks to groups of `over`."""
    is_last = over == division.factors.optimizer
    return Partitioning(
        ranks=over // held,
        bucket_bytes=division.bucket_bytes,
        accumulate=division.micro_batches,
        every_micro_batch=every_micro_batch,
        stages_messages=division.stages_messages,
        at_end=held > 1,
        link=division.link(over // held, held),
        copies=division.ranks // over if is_last else 1,
        between_copies=division.link(division.ranks // over, over),
    )
