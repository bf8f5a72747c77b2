"""How the model state is divided: what the passes of FSDP2's gathers and reductions go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memtune.program import Phase, Resource

_COMPUTE_STREAM, _REDUCE_STREAM, _REPLICA_STREAM = 1, 2, 3

Sums = Literal["shards", "whole", "further"]


@dataclass(frozen=True)
class Sharding:
    """How the model state is divided: `degree` ranks share a copy, `replicas` copies exist."""

    degree: int
    replicas: int = 1
    reshard_after_forward: bool | int = True
    """Whether a unit's parameters go between forward and backward; a number: what stays is divided over groups of that many."""
    blocks_per_unit: int = 1
    keeps_root: bool = True
    """Whether what is in no block stays gathered between forward and backward."""
    prefetch: int | None = None
    """Units gathered ahead of the one that runs; None: as FSDP2 does it, none in forward and one in backward."""
    reduce_itemsize: int | None = None
    """Bytes of an element of a gradient on the link; None: as many as it has."""
    replicas_across_nodes: bool = False
    """Whether the ranks that hold the same shard sit on different nodes, each with a network card of its own."""
    stages_messages: bool = False
    """Whether reductions copy their whole message first and compute waits for collectives, as with gloo on CPU."""
    two_hop: bool = False
    """Whether gradients are averaged between the copies once a step, not in every micro-batch."""
    sums: Sums = "shards"
    """What micro-batches add up: shards, or whole gradients that are reduced in the last one; or nothing here, as shards are
    divided further in every micro-batch."""
    micro_batches: int = 1
    """Per step."""

    @property
    def between_copies(self) -> Resource:
        """The link between ranks that hold the same shard."""
        return Resource.INTER_LINK if self.replicas_across_nodes else Resource.INTRA_LINK

    @property
    def average_phase(self) -> Phase:
        """What runs once per step although it stands in the middle of backward belongs to the boundary."""
        return Phase.BOUNDARY if self.two_hop else self.reduce_phase

    @property
    def reduce_phase(self) -> Phase:
        """Whole sums are reduced once per step."""
        return Phase.BOUNDARY if self.sums == "whole" and self.micro_batches > 1 else Phase.BACKWARD

    @property
    def reduce_streams(self) -> tuple[int, int]:
        """Of the reductions inside a group and between the copies."""
        return (_COMPUTE_STREAM, _COMPUTE_STREAM) if self.stages_messages else (_REDUCE_STREAM, _REPLICA_STREAM)

    @property
    def gather_stream(self) -> int:
        """Of the gathers: they wait for nothing but the link, or compute waits for them."""
        return _COMPUTE_STREAM if self.stages_messages else 0

    @property
    def group_after_forward(self) -> int:
        """Ranks over which a unit is divided between its forward and its backward."""
        return self.degree if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward

    def ahead(self, phase: Phase) -> int:
        """How far a gather runs ahead of compute on the link's own stream (`Step.op_prefetch`)."""
        if self.stages_messages:
            return 0
        return 1 if phase == Phase.BACKWARD else 2 if self.prefetch else 3
