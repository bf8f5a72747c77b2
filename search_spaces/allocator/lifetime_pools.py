"""Pools by lifetime: what stays, gradients, what backward needs and what is gone in a moment do not lie
between one another.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.memory import ArenaSettings
from memtune.search_spaces.allocator._own_allocator import OwnAllocator
from memtune.technique import Target


class LifetimePools(OwnAllocator):
    """Trades room that pools do not share for memory without holes: a brief tensor that goes leaves none
    between lasting ones.

    ZeRO-R copies gradients and checkpoints into buffers of their own. Here nothing is copied: one step is
    watched, and from then on each request comes from the pool of those that live as long as it did:
    parameters and optimizer state, gradients (which outlive the optimizer's step), what is kept for backward,
    the rest. A request that is not recognised, or lives otherwise than foreseen, is served all the same.
    Buffers of constant size, the rest of ZeRO-R, are `bucket_cap_mb` of `sharding.states`.

    Distinguishing test: kept and brief blocks in turn, then one request as large as the brief ones, need no
    more than is alive.
    """

    kind: Literal["lifetime_pools"] = "lifetime_pools"
    title: ClassVar[str] = "Pools by lifetime"
    source: ClassVar[str] = (
        "Rajbhandari et al. 2020, ZeRO, SC 2020, section 6.3 (memory defragmentation), arXiv:1910.02054"
    )

    transient_within: Annotated[int, Field(ge=1)] = 64
    """What is freed within so many requests and frees is transient: few keep brief tensors of long ops among
    the kept ones.
    """
    relearn_after: Annotated[int, Field(ge=1)] = 64
    """Requests that no watched one stands for before another step is watched; doubles each time."""

    def record(self, target: Target) -> dict[str, Any]:
        """The allocator and its knobs."""
        return {"allocator": {"pools": dict(self.knobs())}}

    def settings(self) -> ArenaSettings:
        """The knobs as the allocator takes them."""
        return ArenaSettings(
            kind=self.kind,
            pools=True,
            transient_within=self.transient_within,
            replan_after=self.relearn_after,
        )
